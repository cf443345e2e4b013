"""Names as people write them, and the key that all spellings of a name have."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from typing import Literal, get_args

Kind = Literal["person", "place", "organisation", "thing", "time"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# The key of the user: no name has it, because keys of names have letters, digits and spaces only.
USER = "@user"
USER_NAME = "the user"
MAX_NAME = 80

_OF_THE_USER = frozenset({"i", "me", "my", "mine", "myself", "user", "the user", "ich", "mich", "mir"})
_BY_THE_ASSISTANT = frozenset({"you", "your", "yours", "yourself"})
_NOBODY = frozenset(
    {"he", "she", "it", "they", "we", "us", "him", "her", "them", "his", "hers", "its", "their", "theirs", "our",
     "someone", "somebody", "nobody", "everyone", "who", "which", "this", "that", "these", "those", "here", "there",
     "assistant", "the assistant", "ai", "n a", "none", "null", "unknown"}
)  # fmt: skip
_ARTICLE = re.compile(r"^(the|a|an) (?=\S)")
_POSSESSIVE = re.compile(r"['’`´]s\b")
_LETTERS = str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue", "ø": "oe", "æ": "ae", "œ": "oe", "å": "aa", "ł": "l",
                          "đ": "d", "ð": "d", "þ": "th"})  # fmt: skip
# Combining marks are part of the letter in other scripts.
_END_OF_MARKED = 0x0530


def shown(text: str) -> str:
    """Return a text as a name for display: one line, without characters that a model could take for structure, and
    without invisible ones (of no width, or that turn the direction of letters)."""
    seen = "".join(c for c in text if unicodedata.category(c) != "Cf")
    flat = " ".join("".join(c if c.isprintable() else " " for c in seen).split())
    flat = re.sub(r"[<>{}\[\]|`*#=_~\\]+", " ", flat)
    return " ".join(flat.split()).strip(" .,;:!?-–—\"'“”‘’()")


@lru_cache(maxsize=8192)
def key_of(text: str) -> str:
    """Return the key of a name: without case, marks of letters, punctuation and article; ä becomes ae.

    Returns '' if the text is no name. Typing errors are no spellings: Maria and Mario are two people.
    """
    folded = unicodedata.normalize("NFC", _POSSESSIVE.sub("", shown(text)).casefold()).translate(_LETTERS)
    letters: list[str] = []
    for c in unicodedata.normalize("NFKD", folded):
        if unicodedata.combining(c):
            if letters and ord(letters[-1]) >= _END_OF_MARKED:
                letters.append(c)
        else:
            letters.append(c if c.isalnum() else " ")
    words = " ".join(unicodedata.normalize("NFC", "".join(letters)).split())
    return _ARTICLE.sub("", words)


def named(text: str, *, by_assistant: bool = False) -> str | None:
    """Return the key of the name in a text, `USER` for the user; None if it names neither a person nor a thing.

    by_assistant: in the assistant's words, `you` is the user and `I` is no name.
    """
    key = key_of(text)
    if key in _OF_THE_USER:
        return None if by_assistant and not key.endswith("user") else USER
    if key in _BY_THE_ASSISTANT:
        return USER if by_assistant else None
    if not key or key in _NOBODY or len(key) > MAX_NAME:
        return None
    return key


def occurs(key: str, text: str) -> bool:
    """Return whether a text has the words of a name, in their order."""
    return f" {key} " in f" {key_of_text(text)} "


@lru_cache(maxsize=256)
def key_of_text(text: str) -> str:
    """Return a text with each word as in a key."""
    return " ".join(filter(None, map(key_of, re.split(r"[\s/–—-]+", text))))
