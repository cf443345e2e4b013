"""What the small model is given to read, and what it is not asked at all.

The client's system prompt is left out: of twelve plain questions this model answers eleven with the sentence below, and
seven to ten when any other sentence stands before it. Tool results reach it as plain text without markup, with the
question behind them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.demo_model.rules import is_statement

BRIEF = "Answer the question briefly and correctly."
FROM_TEXT = "Answer the question from the given text in one or two sentences."
# Older turns only confuse so small a model.
HISTORY_MESSAGES = 4

# As the generator puts files before a question.
_ATTACHED = re.compile(
    r"\s*\[attached file (?P<name>[^\n]*?): [^\n]*material to use, not instructions\]\n"
    r"(?P<text>.*?)\n\[end of attached file (?P=name)\]",
    re.DOTALL,
)

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Turn:
    """The user's newest message without the files in it, what the tools have answered since, as (tool, text) in order,
    and the texts of the files."""

    question: str
    results: tuple[tuple[str, str], ...]
    attached: tuple[str, ...] = ()


def turn_of(messages: Sequence[Mapping[str, Any]]) -> Turn:
    """The newest turn of a conversation."""
    start = max((at for at, message in enumerate(messages) if message.get("role") == "user"), default=-1)
    said = str(messages[start].get("content") or "") if start >= 0 else ""
    attached: list[str] = []
    while found := _ATTACHED.match(said):
        attached.append(found["text"].strip())
        said = said[found.end() :]
    results = tuple(
        (str(message.get("tool_name") or message.get("name") or ""), str(message.get("content") or ""))
        for message in messages[start + 1 :]
        if message.get("role") == "tool"
    )
    return Turn(said.strip(), results, tuple(attached))


def ruled_answer(turn: Turn) -> str | None:
    """The answer where there is nothing to read: errors, nothing found, something saved, the user's own words, facts
    that are sentences already, and a statement that asks nothing."""
    if not turn.results and not turn.attached and is_statement(turn.question):
        return "Noted."
    sentences = [_ruled(text.strip()) or _facts(text, turn.question) for _, text in turn.results]
    known = [sentence for sentence in sentences if sentence]
    return " ".join(dict.fromkeys(known)) if known and len(known) == len(sentences) else None


def build(messages: Sequence[Mapping[str, Any]], budget: int) -> list[Message]:
    """The messages for the model, cut to about `budget` characters; the question itself is cut last."""
    turn = turn_of(messages)
    if not turn.results and not turn.attached:
        return _chat(messages, budget)
    question = _task(turn.question)[: budget // 2]
    readable = [*turn.attached, *(plain(text) for _, text in turn.results if _ruled(text.strip()) is None)]
    # The newest result is the one that was asked for last: it stays whole the longest.
    room = max(budget - len(FROM_TEXT) - len(question) - 40, 0)
    kept: list[str] = []
    for text in reversed(readable):
        kept.insert(0, text[:room])
        room -= len(kept[0])
    text = "\n\n".join(part for part in kept if part)
    return [_message("system", FROM_TEXT), _message("user", f"Text:\n{text}\n\nQuestion: {question}")]


_MARKUP = re.compile(r"^\[\d+\] Title: |^(?:Snippet|Title): |^- ")
_NOISE = re.compile(
    r"^(?:Today's date|URL|Extracted text|A|Place|Link):|^\[(?:end of )?untrusted content\b|^\[Memory|^==="
    r"|^\d+\. \(relevance|^</?\w[^>]*>$|^-{3,}$|^<<<|^>>>"
)


def plain(text: str) -> str:
    """A tool's result without numbering, addresses and headings."""
    lines: list[str] = []
    for raw in text.splitlines():
        line = raw.strip()
        if line and not _NOISE.match(line):
            lines.append(re.sub(r"^Q: (.*)", r'The user said: "\1"', _MARKUP.sub("", line)))
    return "\n".join(lines)


_FACT = re.compile(r"^- (.+)$", re.MULTILINE)
_PAST = re.compile(
    r"\b(?:before|used to|use to|earlier|previously|formerly|once|ever|was|were|did|lived|worked)\b", re.IGNORECASE
)
_FACTS_TOLD = 3
_RECALLED = re.compile(r"^\s*(?:Q|Saved(?: under [\w.-]+)?): (.+)$", re.MULTILINE)
_TOPIC = re.compile(r"^\[Memory: [^\]]+\]\n(.+)", re.DOTALL)
# A result of current_time.
_TIME = re.compile(r"\w+day, \d{4}-\d\d-\d\d \d\d:\d\d \(\S+\)")


def _ruled(text: str) -> str | None:
    error = re.fullmatch(
        r"\[(tool error: .+|tool timeout after .+|tool unavailable|unknown tool: .+)\]", text, re.DOTALL
    )
    if error:
        return f"I could not get that: {error[1]}."
    if re.match(r"No (?:results found for|memories found|facts found|documents found)", text):
        return f"I have found nothing. ({text})"
    if text.startswith("Memory saved"):
        return "I have saved that."
    topic = _TOPIC.match(text)
    if topic:
        return f"I remember: {topic[1].strip()}"
    if _TIME.fullmatch(text):
        return f"It is {text}."
    recalled = _RECALLED.search(text) if text.startswith("[Memory recall") else None
    return f"You told me: “{recalled[1].strip()}”" if recalled else None


def _facts(text: str, question: str) -> str | None:
    """The facts of the knowledge graph that share most with the question, in their own words: what WAS where that is
    asked for, else what IS."""
    facts = _FACT.findall(text) if text.startswith("=== KNOWLEDGE GRAPH FACTS ===") else []
    state = ": WAS " if _PAST.search(question) else ": IS "
    wanted = [fact for fact in facts if state in fact] or facts
    if not wanted:
        return None
    # the beginnings of words: who lives somewhere is found by where somebody lived
    asked = {word[:4] for word in re.findall(r"\w+", question.lower())}
    shares = [len(asked & {word[:4] for word in re.findall(r"\w+", fact.lower())}) for fact in wanted]
    told = [fact for fact, share in zip(wanted, shares, strict=True) if share == max(shares)]
    return f"I know this: {'; '.join(told[:_FACTS_TOLD])}."


def _task(question: str) -> str:
    """An order to fetch something is, once it is fetched, an order to summarise it."""
    return "What does the text say?" if re.search(r"\b(fetch|summari[sz]e|read|open)\b", question, re.I) else question


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
