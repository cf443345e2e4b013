"""An engram: a remembered turn, note or topic, with its annotations. Values in, values out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal

import orjson

from shared.contracts import OWN_TOOLS, ResponseGeneration, Winner
from shared.zones import first_zone, local_time

Kind = Literal["turn", "note", "topic"]
NoteKind = Literal["critique", "pairwise", "reward", "class"]

RECALLING = frozenset({"search_memory", "recall_topic"})
PREVIEW = 200
# Longer texts are cut in the store: a record must fit into a message on the bus several times.
MAX_TEXT = 100_000
MAX_BEFORE = 600
# How the ids of engrams begin that came from outside.
IMPORTED = "import:"


@dataclass(frozen=True, slots=True)
class Note:
    """One annotation. Of two of a kind the one with the larger stamp counts, whichever came first."""

    stamp: str
    values: Mapping[str, Any]

    def dump(self) -> str:
        return f"{self.stamp}\n{orjson.dumps(self.values, option=orjson.OPT_SORT_KEYS).decode()}"

    @staticmethod
    def load(text: str) -> Note:
        stamp, _, values = text.partition("\n")
        return Note(stamp, orjson.loads(values))


Notes = Mapping[str, Note]


def stamp(time_ms: int, message_id: str) -> str:
    """Orders annotations of a kind: by their time, then by anything that is the same each time they are seen."""
    tie = int.from_bytes(hashlib.blake2b(message_id.encode(), digest_size=8).digest())
    return f"{time_ms:015d}{tie:020d}"


def merged(one: Notes, other: Notes) -> dict[str, Note]:
    """Commutative, associative and idempotent: annotations in any order, once or often, give the same."""
    result = dict(one)
    for kind, note in other.items():
        there = result.get(kind)
        if there is None or there.dump() < note.dump():
            result[kind] = note
    return result


@dataclass(frozen=True, slots=True)
class Engram:
    """`time` is when it was said, `recorded` when it entered the memory; both in ms since the epoch. `time_zone`: IANA
    name of the user's zone at that time; empty: UTC.

    before: the turn before it in the session, by whose words it is found too; follows: the id of that one's engram.
    tainted: its answer used what strangers may have written.
    echo: its answer only repeats what memory held.
    """

    id: str
    user_id: str
    kind: Kind
    time: int
    recorded: int
    session_id: str = ""
    query_id: str = ""
    respondent_id: str = ""
    query: str = ""
    answer: str = ""
    content: str = ""
    topic: str = ""
    before: str = ""
    follows: str = ""
    generator_id: str = ""
    model: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    finish_reason: str = ""
    tainted: bool = False
    echo: bool = False
    time_zone: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    notes: Notes = field(default_factory=dict)

    def note(self, kind: NoteKind, name: str) -> Any:
        found = self.notes.get(kind)
        return None if found is None else found.values.get(name)

    @property
    def score(self) -> int | None:
        value: int | None = self.note("critique", "score")
        return value

    @property
    def pairwise_verdict(self) -> Winner | None:
        """What the comparison with the other respondent's answer said; None when it was not compared."""
        value: Winner | None = self.note("pairwise", "winner")
        return value

    @property
    def pairwise_winner(self) -> bool | None:
        """Whether it is the better of the two; None for a tie, and when it was not compared."""
        return self.pairwise_verdict == self.respondent_id if self.pairwise_verdict in ("A", "B") else None

    @property
    def reward(self) -> float | None:
        value: float | None = self.note("reward", "reward")
        return value

    @property
    def sentiment(self) -> str | None:
        return None if not self.reward else "positive" if self.reward > 0 else "negative"

    @property
    def shown(self) -> bool:
        """Whether the user saw the answer. Respondent B's answers serve comparisons only."""
        return self.respondent_id != "B"

    @property
    def said_at(self) -> datetime:
        """The user's local time of the turn; the embedded text and the index have its date."""
        return local_time(self.time, first_zone(self.time_zone))

    def annotated(self, notes: Notes) -> Engram:
        together = merged(self.notes, notes)
        return self if together == self.notes else replace(self, notes=together)

    def said(self) -> tuple[str, str]:
        """What is searched: the question and its answer; of a note or topic the content."""
        return (self.query, self.answer) if self.kind == "turn" else (self.topic, self.content)

    def flat(self) -> dict[str, str | int | float | bool]:
        """As a record's metadata: what is filtered by stands alone, the rest as JSON."""
        values = {name: getattr(self, name) for name in _BODY}
        flat: dict[str, str | int | float | bool] = {
            "user_id": self.user_id,
            "session_id": self.session_id,
            "kind": self.kind,
            "respondent_id": self.respondent_id,
            "time": self.time,
            "recorded": self.recorded,
            "tainted": self.tainted,
            "body": orjson.dumps({name: value for name, value in values.items() if value}).decode(),
            "notes": orjson.dumps({kind: note.dump() for kind, note in self.notes.items()}).decode(),
        }
        for name in ("score", "pairwise_winner", "pairwise_verdict", "reward"):
            if (value := getattr(self, name)) is not None:
                flat[name] = value
        return flat

    @staticmethod
    def from_flat(engram_id: str, flat: Mapping[str, Any]) -> Engram:
        body = orjson.loads(flat["body"])
        body["tool_calls"] = tuple(body.get("tool_calls", ()))
        return Engram(
            id=engram_id,
            user_id=flat["user_id"],
            session_id=flat["session_id"],
            kind=flat["kind"],
            respondent_id=flat["respondent_id"],
            time=int(flat["time"]),
            recorded=int(flat["recorded"]),
            tainted=bool(flat["tainted"]),
            notes={kind: Note.load(text) for kind, text in orjson.loads(flat["notes"]).items()},
            **{name: value for name, value in body.items() if name in _BODY},
        )


_BODY = (
    "query_id", "query", "answer", "content", "topic", "before", "follows", "generator_id", "model", "options",
    "tool_calls", "finish_reason", "echo", "time_zone", "metadata",
)  # fmt: skip


def of_response(response: ResponseGeneration, time_ms: int, before: str = "", follows: str = "") -> Engram:
    """The engram of one respondent's answer; `time_ms` is when its query was accepted."""
    calls = response.tool_calls
    used = [call for call in calls if call.error is None]
    return Engram(
        id=response.response_id,
        user_id=response.user_id,
        kind="turn",
        time=time_ms,
        recorded=time_ms,
        session_id=response.session_id,
        query_id=response.query_id,
        respondent_id=response.respondent_id,
        query=response.query[:MAX_TEXT],
        answer=response.answer[:MAX_TEXT],
        before=before[:MAX_BEFORE],
        follows=follows,
        generator_id=response.generator_id,
        model=response.model,
        options=dict(response.options),
        tool_calls=tuple(
            {"tool": c.tool, "args": _short(c.args), "result_preview": c.result[:PREVIEW], "error": c.error,
             "call_id": c.call_id}
            for c in calls
        ),
        finish_reason=response.finish_reason,
        time_zone=response.time_zone,
        tainted=any(call.tool not in OWN_TOOLS or _recalled_taint(call.data) for call in used),
        echo=bool(calls) and all(call.tool in RECALLING for call in calls),
    )  # fmt: skip


def _short(args: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value[:PREVIEW] if isinstance(value, str) else value for name, value in args.items()}


def _recalled_taint(data: Any) -> bool:
    """Whether a recall brought back something tainted, as a hit or round one: what is made of it is tainted too."""
    parts = [data.get("hits"), data.get("log")] if isinstance(data, dict) else []
    return any(
        isinstance(one, dict) and bool(one.get("tainted")) for part in parts if isinstance(part, list) for one in part
    )


def as_before(turn: Engram) -> str:
    """What the next turn keeps of this one."""
    return f"{turn.query}\n{turn.answer}"[:MAX_BEFORE]


def topic_id(user_id: str, topic: str) -> str:
    """The id of a topic's record: the same for every save of it."""
    return f"topic:{_digest(user_id, topic)}"


def imported_id(user_id: str, session_id: str, time_ms: int, *texts: str) -> str:
    """The id of an engram that comes from outside: the same line imported twice is the same engram."""
    return f"{IMPORTED}{_digest(user_id, session_id, str(time_ms), *texts)}"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
