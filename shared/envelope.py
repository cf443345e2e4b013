"""A message on the bus and its flat, readable form as the fields of a Redis stream entry."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from shared.errors import DecodeError

P = TypeVar("P")


def now_ms() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


def entry_ms(entry_id: str) -> int:
    """Return when an entry was written, in ms since the epoch, by the clock of Redis."""
    return int(entry_id.partition("-")[0])


def order(entry_id: str) -> tuple[int, int]:
    """Return a stream id as a value that compares as Redis compares ids."""
    ms, _, seq = entry_id.partition("-")
    return int(ms), int(seq or 0)


def age_ms(entry_id: str) -> int:
    """Milliseconds since an entry was written."""
    return now_ms() - entry_ms(entry_id)


# Ids and times of Redis stay below it for ever; a script counts no further.
_LARGEST = 2**53


# Not frozen: that costs five times as much to make, once per message.
@dataclass(slots=True)
class Envelope:
    """What travels with every payload. Empty string or None means "not set", and is left out of the entry; so is the
    subject, which the stream's name says.

    `id` is that of the stream entry.
    `deadline` is in milliseconds since the epoch by the bus's clock; `traceparent` follows W3C Trace Context.
    `attempt`: how often the sender has asked for this; None when it does not know, or does not say.
    `turn`: of a query, the respondents whose turn it has had since it was accepted; Redis alone writes it.
    """

    subject: str
    payload: bytes
    source: str = ""
    id: str = ""
    time: int = field(default_factory=now_ms)
    correlation_id: str = ""
    causation_id: str = ""
    session_id: str = ""
    user_id: str = ""
    respondent_id: str = "A"
    traceparent: str = ""
    deadline: int | None = None
    attempt: int | None = None
    turn: str = ""

    def fields(self, source: str | None = None) -> list[str | bytes]:
        """Flat `[name, value, …]` as XADD takes it; `source` replaces the sender."""
        fields: list[str | bytes] = [
            "source", self.source if source is None else source,
            "time", str(self.time),
            "correlation_id", self.correlation_id,
            "session_id", self.session_id,
            "respondent_id", self.respondent_id,
        ]  # fmt: skip
        if self.causation_id:
            fields += ("causation_id", self.causation_id)
        if self.user_id:
            fields += ("user_id", self.user_id)
        if self.traceparent:
            fields += ("traceparent", self.traceparent)
        if self.deadline is not None:
            fields += ("deadline", str(self.deadline))
        if self.attempt is not None:
            fields += ("attempt", str(self.attempt))
        fields += ("payload", self.payload)
        return fields

    def ids(self) -> dict[str, str]:
        """What every event logged while it is handled is told with."""
        return {
            "query_id": self.correlation_id or self.id,
            "session_id": self.session_id,
            "respondent_id": self.respondent_id,
        }

    @staticmethod
    def parse(subject: str, entry_id: str, fields: Sequence[bytes]) -> Envelope:
        """The envelope of a stored entry; only `payload` must be there, so that any client can write one.

        Raises DecodeError when a field is missing or malformed.
        """
        parts = iter(fields)
        raw = dict(zip(parts, parts))  # noqa: B905 (Redis gives pairs)
        payload = raw.get(b"payload")
        if payload is None:
            raise DecodeError("the entry has no field 'payload'")

        get = raw.get
        try:
            deadline, attempt, at = get(b"deadline"), get(b"attempt"), get(b"time")
            return Envelope(
                subject,
                payload,
                get(b"source", b"").decode(),
                entry_id,
                _number(at or entry_id.partition("-")[0]),
                get(b"correlation_id", b"").decode(),
                get(b"causation_id", b"").decode(),
                get(b"session_id", b"").decode(),
                get(b"user_id", b"").decode(),
                get(b"respondent_id", b"").decode() or "A",
                get(b"traceparent", b"").decode(),
                _number(deadline) if deadline else None,
                _number(attempt) if attempt else None,
                get(b"turn", b"").decode(),
            )
        except (UnicodeDecodeError, ValueError) as exc:
            raise DecodeError(f"the envelope is malformed: {exc}") from exc


def _number(text: bytes | str) -> int:
    """One that Redis' scripts can count with. Raises ValueError."""
    value = int(text)
    if abs(value) >= _LARGEST:
        raise ValueError(f"{value} is no number of anything here")
    return value


@dataclass(slots=True)
class Message(Generic[P]):
    """A payload as received.

    entry_id: the id that Redis gave the stream entry.
    deliveries: how often the entry has been handed to a replica, this time included.
    suspended: a context in which the handler waits without occupying a slot of the replica.
    """

    entry_id: str
    envelope: Envelope
    payload: P
    deliveries: int = 1
    suspended: Callable[[], AbstractAsyncContextManager[None]] = nullcontext

    def headers(self) -> dict[str, Any]:
        """The envelope fields that a message caused by this one inherits."""
        e = self.envelope
        return {
            "correlation_id": e.correlation_id or self.entry_id,
            "causation_id": e.id,
            "session_id": e.session_id,
            "user_id": e.user_id,
            "respondent_id": e.respondent_id,
            "traceparent": e.traceparent,
            "deadline": e.deadline,
        }
