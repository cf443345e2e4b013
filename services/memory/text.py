"""The words of a text, as the keyword index and the ranking see them, and the texts that an engram is found by."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache

_WORD = re.compile(r"[^\W_]+")
# Scripts that write words without spaces: each run is indexed by pairs of characters.
_UNSPACED = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]+"
)
# Not from the locale: what is indexed must not depend on where the program runs.
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
# The one month that is a word without a meaning as well: what stands beside it tells them apart.
_MAY = re.compile(
    r"(?<=[^\W\d_] )May\b|(?i:\b(?:in|of|since|until|last|next|early|late|mid|during|before|after)[\s-]+may\b"
    r"|\bmay[\s,]+\d|\d(?:st|nd|rd|th|\.)?\s+may\b)"
)
_VOWEL = re.compile(r"[aeiouy]")
# A word is rare when at most this share of a store's engrams have it.
RARE_SHARE = 0.1

# Words that say nothing about what a question is after. They stay in the index, and are left out of a query that has
# other words.
_STOP_WORDS = """
a about after again all also am an and any are as at be because been before being but by can could d did do does doing
done don for from get gets getting got had has have having he her hers him his how i if in into is it its just ll m
may me might mine must my no not now of on or our ours out over own please re s same shall she should so some such t
tell than that the their theirs them then there these they this those to too under until up us ve very was we were
what when where which while who whom whose why will with would you your yours remember recall say said know
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())
# Words about having talked, which carry no subject in a question with a period.
_TALKING = frozenset(
    {"ask", "asked", "asking", "chat", "chatted", "conversation", "conversations", "discuss", "discussed", "happen",
     "happened", "mention", "mentioned", "speak", "spoke", "talk", "talked", "talking"}
)  # fmt: skip

# Forms of English words that no rule of endings brings together: a question asks "did you buy" for what was "bought".
_FORMS = """
be|am is are was were been being become|became begin|began begun bite|bitten blow|blew blown break|broke broken
bring|brought build|built burn|burnt buy|bought catch|caught choose|chose chosen come|came creep|crept deal|dealt
dig|dug draw|drew drawn dream|dreamt drink|drank drunk drive|drove driven eat|ate eaten fall|fell fallen feed|fed
feel|felt fight|fought find|found flee|fled fly|flew flown forget|forgot forgotten forgive|forgave forgiven
freeze|froze frozen get|got gotten give|gave given go|went gone going goes grow|grew grown hang|hung hear|heard
hide|hid hidden hold|held keep|kept kneel|knelt know|knew known lay|laid lead|led leave|left lend|lent
lie|lain lying light|lit
lose|lost make|made mean|meant meet|met pay|paid prove|proven ride|rode ridden ring|rang rung rise|risen
run|ran say|said see|saw seen seek|sought sell|sold send|sent sew|sewn shake|shook shaken shine|shone shoot|shot
show|shown shrink|shrank shrunk sing|sang sung sink|sank sunk sit|sat sleep|slept slide|slid speak|spoke spoken
spell|spelt spend|spent spill|spilt spin|spun stand|stood steal|stole stolen stick|stuck strike|struck swear|swore sworn
sweep|swept swim|swam swum swing|swung take|took taken teach|taught tear|tore torn tell|told think|thought
throw|threw thrown understand|understood wake|woke woken wear|wore worn weep|wept win|won write|wrote written
child|children foot|feet goose|geese man|men mouse|mice person|people tooth|teeth woman|women
knife|knives loaf|loaves shelf|shelves thief|thieves wife|wives wolf|wolves half|halves
"""
_BASES = {
    form: base
    for base, _, forms in (entry.partition("|") for entry in re.findall(r"\w+\|[^|]+?(?=\s\w+\||\s*$)", _FORMS))
    for form in forms.split()
}


def tokens(text: str) -> list[str]:
    """Folded and stemmed words in their order, stop words included."""
    return [part for word in _WORD.findall(_fold(text)) for part in _parts(word)]


def query_tokens(text: str, *, dated: bool = False) -> list[str]:
    """Return the different words that a query is searched by: without stop words, unless it has no others.

    dated: the query's period was removed from the text; the result may then be empty.
    """
    words = _WORD.findall(_fold(text))
    telling = {"may"} if _MAY.search(text) else frozenset()
    left_out = STOP_WORDS | _TALKING if dated else STOP_WORDS
    chosen = [word for word in words if word not in left_out or word in telling] or ([] if dated else words)
    return list(dict.fromkeys(part for word in chosen for part in _parts(word)))


def rare_words(counts: Mapping[str, int], total: int) -> frozenset[str]:
    """Return the words that few engrams of a store have: each of them distinguishes subjects.

    counts: the number of engrams that have a word. total: the number of engrams in the store. A word is rare while at
    most one engram of ten has it, or two engrams of a small store.
    """
    most = max(2, total * RARE_SHARE)
    return frozenset(word for word, count in counts.items() if 0 < count <= most)


def dense_text(query: str, answer: str, at: datetime) -> str:
    """What is embedded of a turn. Its date stands between the two, where a cut of a long answer leaves it."""
    return "\n".join(part for part in (query.strip(), f"({_day(at)})", answer.strip()) if part)


def keyword_text(query: str, answer: str, at: datetime) -> str:
    """What is indexed of a turn: with its date, because questions name days and months ("on 14 March")."""
    return f"{query}\n{answer}\n{_day(at)} {_WEEKDAYS[at.weekday()]} {at:%Y-%m-%d}"


def _day(at: datetime) -> str:
    return f"{at.day} {_MONTHS[at.month - 1]} {at.year}"


def _fold(text: str) -> str:
    lowered = text.lower()
    if lowered.isascii():
        return lowered
    apart = unicodedata.normalize("NFKD", lowered)
    return unicodedata.normalize("NFKC", "".join(char for char in apart if not unicodedata.combining(char)))


@lru_cache(maxsize=65_536)
def _parts(word: str) -> tuple[str, ...]:
    if word.isascii():
        return (_stem(word),)
    found: list[str] = []
    end = 0
    for run in _UNSPACED.finditer(word):
        if run.start() > end:
            found.append(_stem(word[end : run.start()]))
        chars = run.group()
        found.extend(chars[at : at + 2] for at in range(max(1, len(chars) - 1)))
        end = run.end()
    if end < len(word):
        found.append(_stem(word[end:]))
    return tuple(found)


def _stem(word: str) -> str:
    """The word without its common English endings; what is left need not be a word, only the same for its forms."""
    word = _BASES.get(word, word)
    if len(word) < 4 or not word.isalpha():
        return word
    for ending in ("ing", "edly", "ed", "ly"):
        base = word.removesuffix(ending)
        if base != word and len(base) >= 3 and _VOWEL.search(base):
            word = base[:-1] if base[-1] == base[-2] and base[-1] not in "lsz" else base
            break
    else:
        if word.endswith("ies") and len(word) > 4:
            word = word[:-3] + "y"
        elif word.endswith(("sses", "xes", "ches", "shes", "zes")):
            word = word[:-2]
        elif word.endswith("s") and not word.endswith(("ss", "us", "is")):
            word = word[:-1]
    if len(word) > 3 and word.endswith("e"):
        word = word[:-1]
    return word[:-1] + "i" if len(word) > 3 and word.endswith("y") else word
