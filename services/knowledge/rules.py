"""Reading a few plain English statements by rule, for the demonstration model, which cannot read facts.

A real model replaces these claims by its own. Questions, conditions, quotations and pronouns are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from services.knowledge.claims import Claim, Turn, claim, distinct, sentences
from services.knowledge.dates import MONTHS
from services.knowledge.relations import ALIAS, KIN, PARTNERS, kinship

_PART = r"(?!I\b)[A-ZÀ-ÖØ-Þ][\w'’-]*"
NAME = rf"{_PART}(?: (?:(?:de|da|di|du|la|le|of|the|van|von|der|den) ){{0,2}}{_PART}){{0,4}}"
# The whole name, and not if it belongs to another word: "Tom's office", "French companies".
_OBJECT = rf"(?>{NAME})(?! (?!(?:in|at|for|from|to|as|and|but|since|until|till|last|this|now|again|too|back)\b)[a-z])"
_WORD = r"[a-zà-öø-ÿ][\w'’-]*"
_SMALL = rf"{_WORD}(?: {_WORD}){{0,2}}"
_MONTH = "|".join(month.capitalize() for month in MONTHS)
_DATE = rf"(?:(?:\d{{1,2}} )?(?:{_MONTH})(?: \d{{1,2}}\b)?(?:,? \d{{4}})?|\d{{4}}|(?:last|this) (?:year|month))"
_WHEN = rf"(?:,? (?P<prep>in|since|until|till) (?P<date>{_DATE}))?"
_WORDS = sorted([*KIN, *PARTNERS, "mom", "mum", "dad", "best friend"], key=len, reverse=True)
_KIN = rf"(?:(?:older|younger|little|big|twin) )?(?:{'|'.join(_WORDS)})"
_WHO = rf"(?P<who>I|[Mm]y {_KIN},? {NAME},?|{NAME})"
_ADVERB = r"(?:now |currently |still |just |recently |also |has |have |had |am |is |are )*"
_NO_NAMES = frozenset(
    {"He", "She", "It", "They", "We", "You", "The", "This", "That", "These", "Those", "There", "Here", "Who", "What",
     "When", "Where", "Why", "How", "Which", "Please", "If", "My", "Your", "His", "Her", "Our", "Their", "Yes", "No",
     "So", "And", "But", "Or", "Then", "Now", "Today", "Yesterday", "Tomorrow", "Nobody", "Somebody", "Someone",
     "Everyone", "In", "On", "At", "From", "For", "To", "After", "Before", "Since", "While", "As", "Maybe", "Perhaps",
     "Both", "Neither", "Either"}
)  # fmt: skip
# Relation, kind of the object, and what follows the subject. `how` may say that it is over.
_STATEMENTS = [
    (relation, kind, re.compile(rf"^{_WHO} {_ADVERB}{words}{_WHEN}"))
    for relation, kind, words in (
        ("lives in", "place", rf"(?P<how>lives?|living|lived|used to live|no longer lives?) in (?P<what>{_OBJECT})"),
        ("lives in", "place", rf"(?P<how>moved) (?:from (?P<left>{_OBJECT}) )?(?:back )?to (?P<what>{_OBJECT})"),
        ("works at", "organisation",
         rf"(?P<how>works?|working|worked|used to work|no longer works?) (?:at|for) (?P<what>{_OBJECT})"),
        ("was born in", "place", rf"(?P<how>was|were) born in (?P<what>{_OBJECT})"),
        ("is married to", "person", rf"(?P<how>married) to (?P<what>{_OBJECT})"),
        ("is engaged to", "person", rf"(?P<how>engaged) to (?P<what>{_OBJECT})"),
        ("is married to", "person", rf"(?P<how>divorced)(?: from)? (?P<what>{_OBJECT})"),
    )
]  # fmt: skip
_OVER = re.compile(r"lived|worked|used to|no longer|divorced")
_RELATIVES = (
    re.compile(rf"\b[Mm]y (?P<kin>{_KIN})(?:,|'s name is| is called| is named| called| named)? (?P<name>{NAME})"),
    re.compile(rf"^(?P<name>{NAME}) is my (?P<kin>{_KIN})\b"),
    re.compile(rf"\bI have an? (?P<kin>{_KIN})(?:,| who is)? (?:called|named) (?P<name>{NAME})"),
)
_CALLED = re.compile(rf"^(?:[Mm]y name is|I am called|[Cc]all me) (?P<name>{NAME})")
_FAVOURITE = re.compile(rf"^[Mm]y favou?rite (?P<thing>{_SMALL}) is (?P<what>{NAME}|{_SMALL})(?=$|[.,;!])")
_PET = re.compile(rf"\bI have an? (?P<thing>{_SMALL}) (?:called|named) (?P<name>{NAME})")
_REQUEST = re.compile(r"^(?:please )?(?:remember|note)(?: that)?:? ", re.IGNORECASE)
_SUPPOSED = re.compile(
    r"^(?:if|suppose|imagine|assume|pretend|maybe|perhaps|would|could|should|what if|I wish)\b", re.IGNORECASE
)
# The rest may be the words of another person.
_QUOTED = re.compile(r":\s|[\"“„«»]")
_JOINT = re.compile(r",? (?:and|but|while) |, |; ")
_VERB = re.compile(
    rf"{_ADVERB}(?:lives?|lived|living|moved|used to|no longer|works?|worked|working|married|engaged|divorced|was born)"
    r"\b"
)
_STATED = re.compile(rf"{_WHO} (?:is|{_VERB.pattern})|[Mm]y \w+|I have\b")


def read(turn: Turn) -> list[Claim]:
    """Return the claims that the user's words state."""
    return distinct(found for found in _claims(turn) if found is not None)


def _claims(turn: Turn) -> Iterator[Claim | None]:
    for sentence in sentences(turn.query):
        if sentence.endswith("?") or _SUPPOSED.match(sentence):
            continue
        told = re.sub(r"\bI['’](m|ve)\b", lambda short: {"m": "I am", "ve": "I have"}[short[1]], sentence)
        for clause in _clauses(_QUOTED.split(_REQUEST.sub("", told), maxsplit=1)[0]):
            yield from _of_clause(turn, clause, sentence)


def _clauses(sentence: str) -> Iterator[str]:
    """Return the statements of a sentence. A verb behind a joint has the subject of the statement before it."""
    begun, subject = 0, ""
    for joint in _JOINT.finditer(sentence):
        clause, rest = subject + sentence[begun : joint.start()], sentence[joint.end() :]
        before = next((found for _, _, words in _STATEMENTS if (found := words.match(clause))), None)
        if _STATED.match(rest):
            subject = ""
        elif before is not None and _VERB.match(rest):
            subject = f"{before['who']} "
        else:
            continue
        yield clause
        begun = joint.end()
    yield subject + sentence[begun:]


def _of_clause(turn: Turn, clause: str, quote: str) -> Iterator[Claim | None]:
    for pattern in _RELATIVES:
        for found in pattern.finditer(clause):
            if (relation := kinship(found["kin"])) and _is_name(found["name"]):
                yield _claim(turn, found["name"], relation, "me", "person", quote)
    for relation, kind, words in _STATEMENTS:
        if (stated := words.match(clause)) is not None:
            yield from _of_statement(turn, relation, kind, stated, quote)
    if (called := _CALLED.match(clause)) is not None and _is_name(called["name"]):
        yield _claim(turn, "me", ALIAS, called["name"], "person", quote)
    if (liked := _FAVOURITE.match(clause)) is not None:
        yield _claim(turn, "me", f"favourite {liked['thing']}", liked["what"], "thing", quote)
    if (pet := _PET.search(clause)) is not None and kinship(pet["thing"]) is None:
        yield _claim(turn, "me", f"has {pet['thing']}", pet["name"], "thing", quote)


def _of_statement(turn: Turn, relation: str, kind: str, found: re.Match[str], quote: str) -> Iterator[Claim | None]:
    who = re.sub(rf"^[Mm]y {_KIN},? ", "", found["who"]).rstrip(",")
    if who != "I" and not _is_name(who):
        return
    date, ended = found["date"], found["prep"] in ("until", "till") or found["how"] == "divorced"
    over = ended or _OVER.search(found["how"]) is not None
    dates = {"until": date} if ended else {} if over else {"since": date}
    yield _claim(turn, who, relation, found["what"], kind, quote, "was" if over else "is", **dates)
    if found.groupdict().get("left"):
        yield _claim(turn, who, relation, found["left"], kind, quote, "was", until=date)


def _claim(
    turn: Turn, subject: str, relation: str, object_: str, kind: str, quote: str, holds: str = "is",
    **dates: str | None,
) -> Claim | None:  # fmt: skip
    return claim(
        turn, subject, relation, object_, subject_kind="person", object_kind=kind, holds=holds, by="rules",
        quote=quote, since=dates.get("since"), until=dates.get("until"),
    )  # fmt: skip


def _is_name(text: str) -> bool:
    """Return whether a text may be a name: it does not begin with a word that begins sentences."""
    return text.split()[0] not in _NO_NAMES
