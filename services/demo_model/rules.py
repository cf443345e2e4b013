"""Choice of a tool by a URL or a topic key, and the arguments that a text has for a tool. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.zones import city_zone

QUERY_CHARS = 200
# Their argument must stand in the text. The demonstration saves no topics: a text has no key for a new one.
FETCH, TOPIC = "web_fetch", "recall_topic"
BY_RULE = frozenset({FETCH, TOPIC, "save_topic"})

_URL = re.compile(r"\bhttps?://[^\s<>\"'`]+|(?<!\S)(?:[a-z0-9-]+\.)+(?:com|net|org|io|dev|eu)(?:/\S*)?", re.IGNORECASE)
_RESULT_URL = re.compile(r"^\s*URL:\s*(https?://\S+)", re.MULTILINE)
_TOP_RESULT = re.compile(r"\b(?:top|first|best)\s+(?:search\s+)?(?:result|hit|page|link)\b", re.IGNORECASE)
_TOPIC = re.compile(r"\b(?:user|project|constraint)\.[a-z0-9_.-]*[a-z0-9_]", re.IGNORECASE)
_PLACE = re.compile(r"\bin (?:the )?([A-Z][\w.'-]+(?: [A-Z][\w.'-]+)*)")
_NAME = re.compile(r"\b[A-Z][\w-]*[a-z](?:\s+[A-Z][\w-]*[a-z])*")
# Words with a capital letter that begin a question.
_NOT_NAMES = frozenset({
    "who", "what", "where", "when", "which", "whose", "why", "how", "is", "are", "was", "were", "did", "do", "does",
    "has", "have", "had", "can", "could", "please", "tell", "my", "our", "i",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Call:
    """A tool and its arguments."""

    name: str
    args: dict[str, Any]


def ruled(text: str, offered: Collection[str]) -> Call | None:
    """Return the fetch of the URL in a text, or the recall of its topic key, if that tool is offered."""
    if FETCH in offered and (found := _URL.search(text)):
        url = found[0].rstrip(".,;:!?)]}")
        return Call(FETCH, {"url": url if "://" in url else f"https://{url}"})
    if TOPIC in offered and (found := _TOPIC.search(text)):
        return Call(TOPIC, {"topic": found[0].lower()})
    return None


def follow_up(question: str, results: Sequence[tuple[str, str]], tools: Sequence[Mapping[str, Any]]) -> Call | None:
    """Return the fetch of the first page found, when the question asks for the top result of a search."""
    if FETCH not in {str(tool["name"]) for tool in tools}:
        return None
    if len(results) != 1 or results[0][0] != "web_search" or not _TOP_RESULT.search(question):
        return None
    found = _RESULT_URL.search(results[0][1])
    return Call(FETCH, {"url": found[1]}) if found else None


def filled(name: str, text: str, tool: Mapping[str, Any]) -> Call | None:
    """Return the call of a tool with the arguments that the text has; None if it lacks a required one."""
    text = text.strip()
    if not text or name in BY_RULE:
        return None
    match name:
        case "search_knowledge_graph":
            found = names(text)
            return Call(name, {"people": found}) if found else None
        case "current_time":
            place = _PLACE.search(text)
            return Call(name, {"zone": city_zone(place[1]) or place[1]} if place else {})
    parameters = tool.get("parameters") or {}
    required = list(parameters.get("required") or [])
    properties = parameters.get("properties") or {}
    if not required:
        return Call(name, {})
    if len(required) == 1 and (properties.get(required[0]) or {}).get("type") == "string":
        return Call(name, {required[0]: text[:QUERY_CHARS]})
    return None


def names(text: str) -> list[str]:
    """Return the capitalised names of people and places in a text."""
    found = (
        " ".join(word for word in match[0].split() if word.lower() not in _NOT_NAMES) for match in _NAME.finditer(text)
    )
    return list(dict.fromkeys(filter(None, found)))
