"""Markers of chat templates in text from outside.

Model servers tokenize a whole prompt at once, and make real control tokens of `<|im_end|>` in a page as well: the page
would end the tool's turn and begin one of its own. A space behind a marker's first character keeps it readable, for
people and for the model, and it is no control token any more.
"""

from __future__ import annotations

import re

# By the names that stand between the brackets; `/NAME` closes.
_ANGLED = (
    # Llama 2, Mistral, and most tokenizers' ends and fillers
    "s", "SYS", "bos", "eos", "pad", "PAD", "unk", "mask", "sep", "cls", "sop", "eop", "eod",
    # Gemma
    "start_of_turn", "end_of_turn", r"(?:start|end)_of_(?:image|audio)", "(?:image|audio)_soft_token", r"unused\d+",
    # Qwen, and whoever took over its tools and thoughts
    "think", "tool_call", "tool_calls", "tool_response", "tools", r"arg_(?:key|value)",
    # Command-R, Nemotron, Baichuan, InternLM, Bailing, Seed
    "[A-Z]{3}_TOKEN", r"SPECIAL_\d+", r"extra_id_\d+", r"reserved_\d+", "eo[a-z]", "role", "seed:[a-z_]+",
    # code models' gaps, and the place of an image in llama.cpp
    r"(?:fim|file|repo|issue|jupyter|commit)_[a-z_]+", "filename", "__media__", "image", "video",
)  # fmt: skip
_BRACKETED = (
    # Llama 2 and Mistral
    "INST", "AVAILABLE_TOOLS", "TOOL_CALLS", "TOOL_RESULTS", "TOOL_CONTENT", "SYSTEM_PROMPT", "MODEL_SETTINGS", "ARGS",
    "CALL_ID", "THINK", "IMG", "IMG_BREAK", "IMG_END", "PREFIX", "MIDDLE", "SUFFIX", r"(?:BEGIN_)?AUDIO", "TRANSCRIBE",
    # GLM, BERT's heirs, InternLM
    "gMASK", "sMASK", "MASK", "CLS", "SEP", "PAD", "UNK", r"UNUSED_TOKEN_\d+",
)  # fmt: skip
# DeepSeek writes the bar at full width.
_BAR = "[|｜]"

# Each alternative ends where the space is to stand.
_MARKER = re.compile(
    rf"<(?={_BAR}[^\s|｜]|{_BAR}{{2}})"  # <|im_end|>, <|turn>, <｜User｜>: ChatML, Gemma, Llama 3, Phi, Command-R …
    rf"|{_BAR}(?=>)(?<=[^\s|｜]{_BAR})"  # <turn|>, and the other end of those
    rf"|<(?=/?(?:{'|'.join(_ANGLED)})>)"
    rf"|\[(?=/?(?:{'|'.join(_BRACKETED)})\])"
    rf"|\[(?={_BAR}[^\s|｜\]]+{_BAR}\])"  # EXAONE
    r"|\](?=~!?b[\[\]])|\[(?=e~\[)"  # MiniMax
)


def broken(text: str) -> str:
    """The text with every marker broken by a space: `< |im_end| >`, `[ INST]`. Doing it again changes nothing."""
    return _MARKER.sub(lambda match: f"{match[0]} ", text)
