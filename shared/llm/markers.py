"""Markers of chat templates in text from outside.

Model servers tokenize a whole prompt at once, and make real control tokens of `<|im_end|>` in a page as well: the page
would end the tool's turn and begin one of its own. A space behind a marker's first character keeps it readable, for
people and for the model, and it is no control token any more. The names are those of llama.cpp's templates and
vocabularies and of mistral-common's tokenizers; tokens that only stand for something left out (StarCoder's `<KEY>`,
numbered fillers) are not among them where the name is an ordinary word.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shared.llm.port import ChatRequest

# By the names that stand between the brackets; `/NAME` closes, and `NAME:…` is one too.
_ANGLED = (
    # Llama 2, Mistral, and most tokenizers' ends and fillers
    "s", "SYS", "bos", "eos", "pad", "PAD", "unk", "UNK", "mask", "sep", "SEP", "cls", "CLS", "sop", "eop", "eod",
    # Gemma, SmolVLM, MiniMax, Laguna, MiniCPM
    r"(?:start|begin|beginning|end)_of_[a-z]+", "(?:image|audio)_soft_token", r"unused\d+",
    "system", "user", "assistant", "用户", "AI", "role",
    # tools and thoughts: Qwen, and whoever took over its markers; Nemotron, Apriel, MiniMax, Seed
    "think(?:ing)?", "tools?(?:_[a-z]+)?", "available_tools", "(?:AVAILABLE_)?TOOL[A-Z_]*", r"arg_(?:key|value)",
    "(?:seed|minimax|mm|atem):[a-z_]+",
    # Command-R, Nemotron, Baichuan, InternLM, Bailing, Reka
    "[A-Z_]+_TOKEN", r"SPECIAL_\d+", r"extra_id_\d+", r"reserved_\d+", "eo[a-z]", "im_[a-z]+",
    # code models' gaps, and the place of an image in llama.cpp
    r"(?:fim|file|repo|issue|jupyter|commit|pr)_[a-z_]+", "filename", "reponame", "gh_stars", "empty_output",
    "code_to_intermediate", "intermediate_to_code", "__media__", "image", "video",
)  # fmt: skip
_BRACKETED = (
    # Llama 2 and Mistral
    "INST", "AVAILABLE_TOOLS", "TOOL_CALLS", "TOOL_RESULTS", "TOOL_CONTENT", "SYSTEM_PROMPT", "MODEL_SETTINGS", "ARGS",
    "CALL_ID", "THINK", "IMG", "IMG_BREAK", "IMG_END", "PREFIX", "MIDDLE", "SUFFIX", r"(?:BEGIN_)?AUDIO", "TRANSCRIBE",
    # EXAONE, GLM, BERT's heirs, InternLM, and the fillers of converted vocabularies
    "BOS", "EOS", "gMASK", "sMASK", "MASK", "CLS", "SEP", r"PAD\d*", "UNK", r"UNUSED_TOKEN_\d+",
)  # fmt: skip

# The first character is looked for, the rest looked at; the space stands behind it.
_MARKER = re.compile(
    r"[<|>\[\]◁](?:"
    r"(?<=<)(?=\|[^\s|]|\|{2}"  # <|im_end|>, <|turn>, <｜User｜>: ChatML, Gemma, Llama 3, Phi, Command-R …
    rf"|/?(?:{'|'.join(_ANGLED)})(?::[^\s<>]*)?>"
    r"|\][a-z_]+\[>)"  # MiniMax
    r"|(?<=[^\s|]\|)(?=>)"  # <turn|>, and the other end of those
    rf"|(?<=\[)(?=/?(?:{'|'.join(_BRACKETED)})\]|\|[^\s|\]]+\|\]|e~\[)"  # and EXAONE's [|user|]
    r"|(?<=\])(?=~!?b[\[\]])"
    r"|(?<=>)(?=>[A-Z]+<<)"  # Falcon
    r"|(?<=◁)(?=/?think▷))"  # Kimi-VL
)


class _Seen(dict[int, int | None]):
    """Each character as a tokenizer may see it that drops what is invisible and folds what is written wide: DeepSeek's
    `｜` is a bar for all of them. One character is at most one, so that places can be found again."""

    def __missing__(self, code: int) -> int | None:
        char, value = chr(code), code
        folded = unicodedata.normalize("NFKC", char)
        if len(folded) == 1 and folded.isascii():
            value = ord(folded)
        invisible = unicodedata.category(char) in ("Cf", "Cc", "Mn") and not char.isspace()
        self[code] = None if invisible else value
        return self[code]


_SEEN = _Seen()


def broken(text: str) -> str:
    """The text with every marker broken by a space: `< |im_end| >`, `[ INST]`. Doing it again changes nothing."""
    # every marker has one of these, and each part of a request is looked at before the first token
    if text.isascii() and not ("<" in text or "[" in text or "]" in text or "|" in text):
        return text
    seen = text.translate(_SEEN)
    places = [match.end() for match in _MARKER.finditer(seen)]
    if not places:
        return text
    if len(seen) != len(text):
        kept = [at for at, char in enumerate(text) if _SEEN[ord(char)] is not None]
        places = [kept[place - 1] + 1 for place in places]
    return " ".join(text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True))


def without_markers(request: ChatRequest, tools: Sequence[Mapping[str, Any]] | None = None) -> ChatRequest:
    """The request with every marker in its messages and tools broken, whoever wrote them.

    A user's name stands in a prompt of ours, and an answer of the model quotes a page: no text is told apart.
    tools: its tools without markers, where they are known.
    """
    return replace(
        request,
        # their fields are ours; what stands in them may be anybody's
        messages=[{name: all_broken(value) for name, value in message.items()} for message in request.messages],
        tools=all_broken(request.tools) if tools is None else tools,
    )


def all_broken(value: Any) -> Any:
    if isinstance(value, str):
        return broken(value)
    if value is None or isinstance(value, int | float):
        return value
    # what JSON is read as comes first: to ask for the abstract types takes several times as long
    if isinstance(value, dict) or isinstance(value, Mapping):  # noqa: SIM101
        return {all_broken(key): all_broken(part) for key, part in value.items()}
    if isinstance(value, list) or (isinstance(value, Sequence) and not isinstance(value, bytes | bytearray)):
        return [all_broken(part) for part in value]
    return value
