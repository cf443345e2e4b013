"""Detect the texts that chat programs add to users' messages, and the programs' own prompts. Pure.

Source: the prompts of Open WebUI 0.5 to 0.12 (its `config.py`, `utils/task.py`, `utils/middleware.py` and
`utils/context_compaction.py`). Users may change the templates, so this module looks for their parts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from shared.contracts import ChatTurnMessage

# Title, tags, follow-ups, queries, autocompletion and image prompts quote the conversation; a summary what it replaces.
_TASK = "### Task:"
_QUOTED = ("<chat_history>", "### Messages Being Compacted:")
_OTHERS = (
    "Your task is to reflect the speaker's likely facial expression through a fitting emoji.",
    "You have been provided with a set of responses from various models to the latest user query:",
)
# The choice of a tool by a prompt, where its users have switched a model's own calls off.
_CHOICE = ("Available Tools: ", "Your task is to choose and return the correct tool(s)")

_CONTEXT, _CONTEXT_END = "<context>", "</context>"
_ATTACHED, _ATTACHED_END = "<attached_files>", "</attached_files>"
_QUERY, _QUERY_END = "<user_query>", "</user_query>"
_FOLDED = re.compile(r"<details\b[^<>]{0,1000}\btype=[\"'](?:reasoning|tool_calls|code_interpreter)[\"'][^<>]{0,1000}>")
_FOLDED_END = "</details>"


def is_housekeeping(messages: Sequence[ChatTurnMessage]) -> bool:
    """Whether a request is a program's own: for a title, tags, queries and the like, not for an answer to a person."""
    system = [message.content for message in messages if message.role == "system"]
    said = [message for message in messages if message.role != "system"]
    if len(said) != 1 or said[0].role != "user":
        return False
    text = said[0].content.lstrip()
    if text.startswith(_TASK):
        # a conversation that is quoted may hold a context, and a context may quote a conversation
        return _first(text, *_QUOTED) < _first(text, _CONTEXT)
    return text.startswith(_OTHERS) or any(one.startswith(_CHOICE[0]) and _CHOICE[1] in one for one in system)


def _first(text: str, *marks: str) -> int:
    return min((place for mark in marks if (place := text.find(mark)) >= 0), default=len(text))


def undressed(text: str) -> tuple[str, str]:
    """(what a program put before a person's words: files and passages of them; those words)."""
    words = text.lstrip()
    if words.startswith(_TASK) and _CONTEXT in words:
        # the last end: pages and files may hold others
        _, end, after = words.rpartition(_CONTEXT_END)
        words = after.strip() if end else words
    if words.startswith(_ATTACHED):
        _, end, after = words.partition(_ATTACHED_END)
        words = after.strip() if end else words
    if words.startswith(_QUERY) and words.endswith(_QUERY_END):
        words = words[len(_QUERY) : -len(_QUERY_END)].strip()
    if not words or len(words) == len(text.lstrip()):
        # a template may have the question elsewhere
        return "", text
    return text[: text.rindex(words)], words


def spoken(text: str) -> str:
    """An assistant's words, without what a program keeps folded between them: its thoughts, the calls of tools."""
    kept, at = [], 0
    for found in _FOLDED.finditer(text):
        if found.start() < at:
            continue
        end = text.find(_FOLDED_END, found.end())
        if end < 0:
            break
        kept.append(text[at : found.start()])
        at = end + len(_FOLDED_END)
    return "".join((*kept, text[at:])).strip() if kept else text
