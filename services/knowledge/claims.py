"""Claims: at one moment, the user or the assistant said that something is or was so. `merging` makes facts of them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from services.knowledge.dates import date_of
from services.knowledge.names import KINDS, MAX_NAME, USER, USER_NAME, Kind, named, occurs, shown
from services.knowledge.relations import relation_of, symmetric

Holds = Literal["is", "was"]
Speaker = Literal["user", "assistant"]
By = Literal["model", "rules", "person"]

MAX_QUOTE = 240
# Not after "St.", as in "St. Gallen".
_END = re.compile(r"(?<=[.!?])(?<!\bSt\.)\s+|\n+")


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer, from which claims are read.

    answer: '' if the assistant used a tool. said: when the question was accepted, in ms.
    """

    source: str
    user_id: str
    session_id: str
    said: int
    query: str
    answer: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """A subject, a relation and an object. `subject` and `object` are the names as they were written.

    source: the response that states it, or `person:…` if a person entered it. said: in ms. since, until: dates as
    `dates.date_of` returns them, or ''. by: what read it. quote: the sentence that states it.
    """

    id: str
    source: str
    session_id: str
    said: int
    subject_key: str
    subject: str
    subject_kind: Kind
    relation: str
    object_key: str
    object: str
    object_kind: Kind
    holds: Holds = "is"
    since: str = ""
    until: str = ""
    speaker: Speaker = "user"
    by: By = "model"
    quote: str = ""

    def row(self) -> dict[str, Any]:
        return asdict(self)


FIELDS = tuple(field.name for field in fields(Claim))


def claim_of(row: dict[str, Any]) -> Claim:
    return Claim(**{name: row[name] for name in FIELDS})


def claim(
    turn: Turn,
    subject: str,
    relation: str,
    object_: str,
    *,
    subject_kind: str = "thing",
    object_kind: str = "thing",
    holds: str = "is",
    since: str | None = None,
    until: str | None = None,
    speaker: Speaker = "user",
    by: By,
    quote: str = "",
) -> Claim | None:
    """Return a claim in its canonical form; None when a part is missing: a name, a relation, or a second thing.

    subject_kind, object_kind: `thing` stands for an unknown kind, which the relation may imply.
    """
    by_assistant = speaker == "assistant"
    subject_key, object_key = named(subject, by_assistant=by_assistant), named(object_, by_assistant=by_assistant)
    found = relation_of(relation)
    if subject_key is None or object_key is None or found is None or subject_key == object_key:
        return None
    first = (subject_key, _written(subject, subject_key), _kind(subject_kind, subject_key, found.kinds[0]))
    second = (object_key, _written(object_, object_key), _kind(object_kind, object_key, found.kinds[1]))
    if found.turned:
        first, second = second, first
    if symmetric(found.name) and second[0] < first[0]:
        first, second = second, first
    over: Holds = "was" if found.past or holds == "was" else "is"
    digest = hashlib.sha256("\0".join((turn.user_id, turn.source, first[0], found.name, second[0])).encode())
    return Claim(
        id=digest.hexdigest()[:24],
        source=turn.source,
        session_id=turn.session_id,
        said=turn.said,
        subject_key=first[0], subject=first[1], subject_kind=first[2],
        relation=found.name,
        object_key=second[0], object=second[1], object_kind=second[2],
        holds=over,
        since=date_of(since, turn.said) or "",
        until=date_of(until, turn.said) or "",
        speaker=speaker,
        by=by,
        quote=" ".join(quote.split())[:MAX_QUOTE],
    )  # fmt: skip


def grounded(turn: Turn, found: dict[str, Any], by: By) -> Claim | None:
    """Return the claim of a reading; None unless both names stand in the turn, outside of questions.

    The speaker is the user if the user's words have both names, else the assistant.
    """
    subject, object_ = str(found.get("subject", "")), str(found.get("object", ""))
    for speaker, text in _said(turn):
        by_assistant = speaker == "assistant"
        ends = [named(name, by_assistant=by_assistant) for name in (subject, object_)]
        keys = [key for key in ends if key is not None]
        if len(keys) < 2:
            continue
        quote = _sentence(text, [key for key in keys if key != USER])
        if quote is None:
            continue
        return claim(
            turn, subject, str(found.get("relation", "")), object_,
            subject_kind=str(found.get("subject_kind", "")), object_kind=str(found.get("object_kind", "")),
            holds=str(found.get("holds", "is")),
            since=str(found.get("since", "")), until=str(found.get("until", "")),
            speaker=speaker, by=by, quote=quote,
        )  # fmt: skip
    return None


def distinct(claims: Iterable[Claim]) -> list[Claim]:
    """Return one claim for each id; if a turn says that something is and was so, the claim that it is."""
    found: dict[str, Claim] = {}
    for one in claims:
        before = found.get(one.id)
        found[one.id] = one if before is None or before.holds == "was" else before
    return list(found.values())


def _said(turn: Turn) -> list[tuple[Speaker, str]]:
    said: list[tuple[Speaker, str]] = [("user", turn.query)]
    if turn.answer:
        # A statement of the assistant may refer to the question.
        said += [("assistant", turn.answer), ("assistant", f"{turn.query}\n{turn.answer}")]
    return said


def sentences(text: str) -> list[str]:
    return [part.strip() for part in _END.split(text) if part.strip()]


def _sentence(text: str, keys: list[str]) -> str | None:
    """Return a sentence with the names that is no question; else the first with one of them, if the text has all."""
    told = [one for one in sentences(text) if not one.endswith("?")]
    for one in told:
        if all(occurs(key, one) for key in keys):
            return one
    if told and all(occurs(key, " ".join(told)) for key in keys):
        return next((one for one in told if any(occurs(key, one) for key in keys)), told[0])
    return None


def _written(text: str, key: str) -> str:
    return USER_NAME if key == USER else shown(text)[:MAX_NAME]


def _kind(kind: str, key: str, implied: Kind) -> Kind:
    """Return the kind of a name. implied: the kind that the relation implies."""
    if key == USER:
        return "person"
    known: Kind = next((one for one in KINDS if one == kind), "thing")
    return implied if known == "thing" else known
