"""Sure rules for the choice of a tool, and the arguments that a text gives for one."""

from __future__ import annotations

import re
from calendar import month_name
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.zones import city_zone

QUERY_CHARS = 200


@dataclass(frozen=True, slots=True)
class Call:
    """A tool and its arguments."""

    name: str
    args: dict[str, Any]


def follow_up(question: str, results: Sequence[tuple[str, str]], tools: Sequence[Mapping[str, Any]]) -> Call | None:
    """After a search for "the top result", the fetch of that page; None when the results are to be answered from."""
    if "web_fetch" not in {str(tool["name"]) for tool in tools}:
        return None
    if len(results) != 1 or results[0][0] != "web_search" or not _TOP_RESULT.search(question):
        return None
    found = _RESULT_URL.search(results[0][1])
    return Call("web_fetch", {"url": found[1]}) if found else None


def ruled(text: str, offered: frozenset[str]) -> Call | None:
    """The call that a rule is sure of, if its tool is offered."""
    for rule in (_save, _topic, _fetch, _time, _search, _documents, _recall, _news):
        call = rule(text)
        if call is not None and call.name in offered:
            return call
    return None


# A subject, and a verb of the plainest kinds.
_STATEMENT = re.compile(
    r"(?:(?i:my|our)\s+[\w' -]{2,40}?|(?i:i|we|he|she|they)|[A-Z][\w-]+(?:\s+[A-Z][\w-]+)?)\s+"
    r"(?:is|are|am|was|were|has|have|had|lives?|lived|works?|worked|moved|likes?|liked|loves?|prefers?|speaks?|owns?"
    r"|hates?|drinks?|bought|married|studies|studied)\b[^?\n]{1,200}$"
)
_ASKING = re.compile(r"(?:who|whom|whose|what|which|where|when|why|how|is|are|was|were|do|does|did)\b", re.IGNORECASE)


def is_statement(text: str) -> bool:
    """Whether a message plainly tells something, and asks for nothing."""
    return _STATEMENT.match(text) is not None and not _ASKING.match(text)


_URL = re.compile(r"\bhttps?://[^\s<>\"'`]+", re.IGNORECASE)
_RESULT_URL = re.compile(r"^\s*URL:\s*(https?://\S+)", re.MULTILINE)
_BARE = re.compile(
    r"\b(?:open|fetch|read|visit|load|get|summari[sz]e)\b.*?\b((?:[a-z0-9-]+\.)+[a-z]{2,}(?:/\S*)?)", re.I
)
_TOP_RESULT = re.compile(r"\b(top|first|best)\s+(search\s+)?(result|hit|page|link)\b", re.IGNORECASE)
_REMEMBER = re.compile(
    r"^(?:please\s+|can you\s+|could you\s+|i want you to\s+)*"
    r"(?:remember|memori[sz]e|note|make a note|take a note|keep in mind|keep a note|bear in mind|put on record"
    r"|don'?t forget|do not forget"
    r"|save|store|write down|log)\b(?:\s+(?:this|that|down)\b)?(?:\s+for later\b)?\s*[:,]?\s*"
    r"(?!what\b|when\b|how\b|who\b)(\S.+)$",
    re.IGNORECASE | re.DOTALL,
)
_REMEMBER_AFTER = re.compile(
    r"^(.+?)[,.;]\s*(?:please\s+)?(?:remember|note|keep|don'?t forget)\s*(?:that|it|this)?(?:\s+in mind)?[.!]?$",
    re.IGNORECASE | re.DOTALL,
)
_SEARCH = re.compile(
    r"^(?:please\s+|can you\s+|could you\s+)*(?:search|google|look|browse)\s+(?:(?:on|in|up|through)\s+)?"
    r"(?:the\s+)?(?:web|internet|online|net)?\s*(?:for|about|up)?\s+(.+)$",
    re.IGNORECASE | re.DOTALL,
)
_STATED = (
    (re.compile(r"\bmy\s+(?:preferred|favou?rite|new|own)?\s*([\w' -]{2,40}?)\s+(?:is|are|was)\b", re.I), "user."),
    (re.compile(r"\b(?:our|the|this)\s+project(?:'s)?\s+([\w -]{2,30}?)\s+(?:is|are|of)\b", re.I), "project."),
    (re.compile(r"\b(?:our|the|this)\s+project\s+(uses|is\s+\w+)\b", re.I), "project."),
    (re.compile(r"\bi(?:'m| am)\s+(allergic|a \w+|an \w+)\b", re.I), "user."),
    (re.compile(r"\bi\s+(?:like|love|prefer|hate|enjoy|drink|take)\s+(?:my\s+|the\s+)?(\w+)\b", re.I), "user."),
    (re.compile(r"\bi\s+(live|work|speak)\b", re.I), "user."),
    (re.compile(r"\b(?:always|never|from now on|don'?t ever)\s+(\w+(?:\s\w+)?)", re.I), "constraint."),
)
_TOPIC = re.compile(r"\b((?:user|project|constraint)\.[a-z0-9_.-]*[a-z0-9_])", re.IGNORECASE)


def _fetch(text: str) -> Call | None:
    found = _URL.search(text)
    if found:
        return Call("web_fetch", {"url": found[0].rstrip(".,;:!?)]}")})
    bare = _BARE.search(text)
    return Call("web_fetch", {"url": f"https://{bare[1].rstrip('.,;:!?)')}"}) if bare else None


def _save(text: str) -> Call | None:
    asked = _REMEMBER.match(text.strip()) or _REMEMBER_AFTER.match(text.strip())
    if asked is None or text.rstrip().endswith("?"):
        return None
    return _saved(asked[1])


def _saved(content: str) -> Call:
    """A fact about the user, the project or a standing order gets a topic, anything else is kept as a sentence."""
    content = _sentence(content)
    for pattern, prefix in _STATED:
        stated = pattern.search(content)
        if stated:
            slug = re.sub(r"[^a-z0-9]+", "_", re.sub(r"^an? ", "", stated[1].lower())).strip("_")
            return Call("save_topic", {"topic": prefix + slug, "content": content})
    return Call("save_memory", {"content": content})


def _topic(text: str) -> Call | None:
    """Topics are read by their exact key only."""
    found = _TOPIC.search(text)
    return Call("recall_topic", {"topic": found[1].lower()}) if found else None


_TIME = re.compile(
    r"\b(?:what time is it\b|(?:what|which) (?:day|date|weekday)(?: of the week)? is (?:it|today)\b"
    r"|what(?:'s| is) the (?:exact |current |local )?time(?: of day)?(?=\W*$| (?:in|now|right|here)\b)"
    r"|what(?:'s| is) (?:the|today'?s) date\W*$)",
    re.IGNORECASE,
)
_CITY = re.compile(r"\bin (?:the )?([A-Z][\w.'-]+(?: [A-Z][\w.'-]+)*)")


def _time(text: str) -> Call | None:
    """Return the call for a question about the time or the date."""
    return _current_time(text) if _TIME.search(text) else None


def _current_time(text: str) -> Call:
    place = _CITY.search(text)
    return Call("current_time", {"zone": city_zone(place[1]) or place[1]} if place else {})


def _search(text: str) -> Call | None:
    if _TOP_RESULT.search(text):
        return _web_search(text)
    found = _SEARCH.match(text.strip())
    if found is None or re.search(r"\b(memory|memories|knowledge graph)\b", text, re.IGNORECASE):
        return None
    query = search_query(found[1])
    return Call("web_search", {"query": query}) if query else None


_DOCUMENTS = re.compile(
    r"\b(?:my|our|the|this|that|these|those)\s+(?:\w+\s+){0,2}?(?:documents?|manuals?|pdfs?|handbooks?|contracts?|notes)\b",
    re.IGNORECASE,
)


def _documents(text: str) -> Call | None:
    """A question about what stands in the user's documents."""
    asked = text.rstrip().endswith("?") or re.match(r"\W*(?:please\s+)?(?:find|search|look)\b", text, re.IGNORECASE)
    if not asked or not _DOCUMENTS.search(text):
        return None
    return Call("search_documents", {"query": text.strip()[:QUERY_CHARS]})


_ABOUT_ME = re.compile(
    r"^(?:(?:what|which|when|where|who|how)\b.*?\b"
    r"(?:my|mine|am i|was i|did i|do i (?:like|prefer|take|live|work|use|drink|eat|speak))\b"
    r"|(?:am|do|did|have|was|were)\s+(?:i|we)\b"
    r"|what (?:do|did) you (?:remember|know about me|tell me|answer)\b|(?:do|can) you (?:remember|recall)\b"
    r"|what (?:did|have) (?:we|i)\b|(?:remind me|recall|what have i)\b)",
    re.IGNORECASE,
)
_NOW = re.compile(
    r"\b(?:today|tonight|tomorrow|yesterday|right now|at the moment|these days|current(?:ly)?|latest|newest|most recent"
    r"|this (?:week|month|year|weekend|morning)|last night|breaking"
    r"|headlines|news|share price|weather|forecast|exchange rate)\b",
    re.IGNORECASE,
)
_MAKE = re.compile(
    r"^\W*(?:please\s+|can you\s+)*(?:what is the difference"
    r"|write|draft|compose|translate|rewrite|explain|correct|fix|plan|suggest)\b",
    re.I,
)


def _recall(text: str) -> Call | None:
    """A question about the user, or about what was said."""
    return _search_memory(text) if _ABOUT_ME.match(text.strip()) and not _MAKE.match(text) else None


def _news(text: str) -> Call | None:
    """A question about the present: what a model has learnt is out of date."""
    return _web_search(text) if _NOW.search(text) and not _MAKE.match(text) else None


# Arguments, for a tool that the examples have named.


def _web_search(text: str) -> Call | None:
    query = search_query(text)
    return Call("web_search", {"query": query}) if query else None


def _search_memory(text: str) -> Call:
    return Call("search_memory", {"query": text.strip()[:QUERY_CHARS]})


def _save_topic(text: str) -> Call | None:
    call = _saved(text)
    return call if call.name == "save_topic" else Call("save_topic", {"topic": "user.note", "content": _sentence(text)})


def _graph(text: str) -> Call | None:
    people, locations = names(text)
    if not people and not locations:
        return None
    return Call("search_knowledge_graph", {"people": people, "locations": locations})


_ARGUMENTS: dict[str, Callable[[str], Call | None]] = {
    "web_search": _web_search,
    "search_memory": _search_memory,
    "save_memory": lambda text: Call("save_memory", {"content": _sentence(text)}),
    "save_topic": _save_topic,
    "search_knowledge_graph": _graph,
    "current_time": _current_time,
}
# These are called by rule only: without a URL or a topic key there is nothing to call them with.
RULED = frozenset({"web_fetch", "recall_topic"})


def filled(name: str, text: str, tool: Mapping[str, Any]) -> Call | None:
    if name in RULED or not text.strip():
        return None
    if name in _ARGUMENTS:
        return _ARGUMENTS[name](text)
    parameters = tool.get("parameters") or {}
    required = list(parameters.get("required") or [])
    properties = parameters.get("properties") or {}
    if not required:
        return Call(name, {})
    if len(required) == 1 and (properties.get(required[0]) or {}).get("type") == "string":
        return Call(name, {required[0]: text.strip()[:QUERY_CHARS]})
    return None


_POLITE = re.compile(
    r"^(?:(?:hey|hi|hello|ok|okay|so|please|kindly)[,\s]+|(?:can|could|would|will) you (?:please )?"
    r"|(?:i (?:want|would like|need) to know|tell me|show me|give me|find out|find me|find|look up|google|check)\s+)+",
    re.IGNORECASE,
)
_TASK = re.compile(
    r"^\W*(?:summari[sz]e|describe|explain|read|open)\b.{0,60}?\b(?:result|hit|page|link)s?\s+(?:for|about|on)\b\s*:?\s*",
    re.I,
)


def search_query(text: str) -> str:
    """The question without courtesies and without the task around it."""
    query = _TASK.sub("", text.strip())
    query = _POLITE.sub("", query)
    query = re.sub(r",?\s*please[.!?]*\s*$", "", query, flags=re.IGNORECASE)
    query = re.sub(r"\s+", " ", query).strip(" \t\"'“”?!.")
    return query[:QUERY_CHARS].strip()


_PLACE = re.compile(r"\b(?:in|at|from|near|to|with)\s+(?:the\s+)?([A-Z][\w-]+(?:\s+[A-Z][\w-]+)*)")
_NAME = re.compile(r"\b[A-Z][\w-]*[a-z](?:\s+[A-Z][\w-]*[a-z])*")
_NOT_NAMES = frozenset(
    {
        "who", "what", "where", "when", "which", "whose", "why", "how", "is", "are", "was", "were",
        "did", "do", "does", "has", "have", "had", "can", "could", "please", "tell", "look",
        "search", "find", "the", "a", "an", "i", "in", "of", "on", "at", "and", "or",
        "my", "our", "your", "his", "her", "its", "their", "he", "she", "they", "we", "you", "it", "this", "that",
    }
)  # fmt: skip

_MONTHS = frozenset(filter(None, month_name))


def names(text: str) -> tuple[list[str], list[str]]:
    """Capitalised names as (people, locations): a location is what stands behind a preposition of place."""
    places: list[str] = []
    dates: set[str] = set()
    for match in _PLACE.finditer(text):
        # "married to Peter", "connected with David", "works with Alice" are about people.
        before = text[: match.start()].lower().rstrip()
        if match[0].startswith("in ") and match[1] in _MONTHS:
            dates.add(match[1])
            continue
        joined = match[0].lower().startswith(("to ", "with ")) and not before.endswith(("move", "moved", "connected"))
        if not joined and match[1] not in places:
            places.append(match[1])
    people: list[str] = []
    for match in _NAME.finditer(text):
        words = [word for word in match[0].split() if word.lower() not in _NOT_NAMES]
        name = " ".join(words)
        if name and name not in people and name not in places and name not in dates:
            people.append(name)
    return people, places


def _sentence(text: str) -> str:
    content = text.strip().rstrip(" .!") + "."
    return content[:1].upper() + content[1:]
