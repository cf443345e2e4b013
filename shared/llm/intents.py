"""What kind of request a turn was: a closed set, told by what the turn did and, where it used no tool, by its words."""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import StrEnum


class Intent(StrEnum):
    LOOKUP = "lookup"  # something that has to be looked up: news, prices, a page
    REMEMBER = "remember"  # the user wants something kept
    RECALL = "recall"  # the user asks for something kept
    CODE = "code"
    WRITING = "writing"  # a text to be written, changed, shortened or translated
    QUESTION = "question"
    CHAT = "chat"  # anything else: statements, greetings


_BY_TOOL = {
    "web_search": Intent.LOOKUP,
    "web_fetch": Intent.LOOKUP,
    "save_memory": Intent.REMEMBER,
    "save_topic": Intent.REMEMBER,
    "search_memory": Intent.RECALL,
    "recall_topic": Intent.RECALL,
    "search_knowledge_graph": Intent.RECALL,
}

# The first that fits.
_BY_WORDS: tuple[tuple[Intent, re.Pattern[str]], ...] = tuple(
    (intent, re.compile(pattern, re.IGNORECASE))
    for intent, pattern in (
        (Intent.REMEMBER, r"^(?:please |can you |could you )*(?:remember|note|keep in mind|don't forget)\b"),
        (Intent.RECALL, r"\b(?:do you remember|did (?:I|we) (?:say|tell|mention|decide|agree)|have I (?:told|said)|"
                        r"what do you (?:know|remember) about)\b|"
                        r"\b(?:(?:do|did|was|am) I (?:like|prefer|want|usually|live|work)|my favou?rite)\b.*\?\s*$"),
        (Intent.CODE, r"```|\b(?:python|javascript|typescript|rust|golang|sql|regex|bash|traceback|stack ?trace|"
                      r"function|compile|unit test|refactor|debug)\b"),
        (Intent.WRITING, r"^(?:please |can you |could you )*(?:write|draft|compose|rewrite|rephrase|translate|"
                         r"summari[sz]e|shorten|proofread|improve)\b"),
        (Intent.LOOKUP, r"\b(?:look up|search (?:for|the web)|google|latest|news|this week|right now|today'?s?|"
                        r"price of|weather)\b|https?://"),
        (Intent.QUESTION, r"\?\s*$|^(?:who|what|when|where|why|which|how|is|are|was|were|do|does|did|can|could|should|"
                          r"explain|tell me|describe|define|compare)\b"),
    )
)  # fmt: skip


def intent_of(query: str, tools: Collection[str] = ()) -> Intent:
    """The intent of a turn by rule. `tools`: the names of the tools that answered in it, the first one first."""
    for tool in tools:
        if tool in _BY_TOOL:
            return _BY_TOOL[tool]
    text = query.strip()
    return next((intent for intent, pattern in _BY_WORDS if pattern.search(text)), Intent.CHAT)
