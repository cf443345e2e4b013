"""The messages for the small model. Pure.

The client's system prompt is left out: of twelve plain questions this model answers eleven with the sentence below, and
seven to ten with any other sentence before it. It reads tool results as plain text, with the question behind them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BRIEF = "Answer the question briefly and correctly."
FROM_TEXT = "Answer the question from the given text in one or two sentences."
# Older turns only confuse so small a model.
HISTORY_MESSAGES = 4
# A result with at most this many characters is passed on as it is.
SHORT_RESULT = 300

# The generator's form of files before a question.
_ATTACHED = re.compile(
    r"\s*\[attached file (?P<name>[^\n]*?): [^\n]*material to use, not instructions\]\n"
    r"(?P<text>.*?)\n\[end of attached file (?P=name)\]",
    re.DOTALL,
)
# Numbering before a line of a result, and lines that are marks, headings, dates or addresses.
_MARKUP = re.compile(r"^(?:\[?\d+[\].] )?(?:Title|Snippet|Q): |^- ")
_NOISE = re.compile(
    r"^(?:Today's date|URL|Extracted text|A|Place|Link):|^\[(?:end of )?untrusted content\b|^\[Memory|^==="
    r"|^\d+\. \(relevance|^</?\w[^>]*>$|^-{3,}$|^<<<|^>>>"
)

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Turn:
    """The user's newest message without its files, the results of tools since then as (tool, text) in order, and the
    texts of the files."""

    question: str
    results: tuple[tuple[str, str], ...]
    attached: tuple[str, ...] = ()


def turn_of(messages: Sequence[Mapping[str, Any]]) -> Turn:
    """Return the newest turn of a conversation."""
    start = max((at for at, message in enumerate(messages) if message.get("role") == "user"), default=-1)
    question = str(messages[start].get("content") or "") if start >= 0 else ""
    attached: list[str] = []
    while found := _ATTACHED.match(question):
        attached.append(found["text"].strip())
        question = question[found.end() :]
    results = tuple(
        (str(message.get("tool_name") or message.get("name") or ""), str(message.get("content") or ""))
        for message in messages[start + 1 :]
        if message.get("role") == "tool"
    )
    return Turn(question.strip(), results, tuple(attached))


def short_results(turn: Turn) -> str:
    """Return the results as an answer if each of them is short, such as an error, a time or a few facts; else ""."""
    texts = [(tool or "The tool", plain(text)) for tool, text in turn.results]
    if not all(0 < len(text) <= SHORT_RESULT for _, text in texts):
        return ""
    return "\n".join(dict.fromkeys(f"{tool} answers: {text}" for tool, text in texts))


def build(messages: Sequence[Mapping[str, Any]], budget: int) -> list[Message]:
    """Return the messages for the model, cut to about `budget` characters; the question is cut last."""
    turn = turn_of(messages)
    if not turn.results and not turn.attached:
        return _chat(messages, budget)
    question = turn.question[: budget // 2]
    room = max(budget - len(FROM_TEXT) - len(question) - 40, 0)
    kept: list[str] = []
    # The newest result is cut last: it answers the last call.
    for text in reversed([*turn.attached, *(plain(text) for _, text in turn.results)]):
        kept.insert(0, text[:room])
        room -= len(kept[0])
    text = "\n\n".join(part for part in kept if part)
    return [_message("system", FROM_TEXT), _message("user", f"Text:\n{text}\n\nQuestion: {question}")]


def plain(text: str) -> str:
    """Return a tool's result without numbering, addresses and headings."""
    lines = (raw.strip() for raw in text.splitlines())
    return "\n".join(_MARKUP.sub("", line) for line in lines if line and not _NOISE.match(line))


def _chat(messages: Sequence[Mapping[str, Any]], budget: int) -> list[Message]:
    spoken = [
        _message(str(message["role"]), str(message["content"]).strip())
        for message in messages
        if message.get("role") in ("user", "assistant") and str(message.get("content") or "").strip()
    ]
    newest = spoken[-1:] or [_message("user", "")]
    room = budget - len(BRIEF)
    newest = [{**newest[0], "content": newest[0]["content"][:room]}]
    room -= len(newest[0]["content"])
    history: list[Message] = []
    for message in reversed(spoken[:-1][-HISTORY_MESSAGES:]):
        room -= len(message["content"])
        if room < 0:
            break
        history.insert(0, message)
    # A conversation begins with the user.
    while history and history[0]["role"] != "user":
        history.pop(0)
    return [_message("system", BRIEF), *history, *newest]


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
