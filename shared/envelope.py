"""A message on the bus and its flat, readable form as the fields of a Redis stream entry."""

from __future__ import annotations

import os
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


def age_ms(entry_id: str) -> int:
    """Milliseconds since an entry was written."""
    return now_ms() - int(entry_id.partition("-")[0])


def fresh_id() -> str:
    """A new random id: 128 bits, as 32 hexadecimal digits."""
    return os.urandom(16).hex()


# Not frozen, though nothing ever changes one: a frozen one costs five times as much to make, once per message.
@dataclass(slots=True)
class Envelope:
    """What travels with every payload. Empty string or None means "not set".

    `deadline` is in milliseconds since the epoch; `traceparent` follows W3C Trace Context.
    """

    subject: str
    payload: bytes
    source: str = ""
    id: str = field(default_factory=fresh_id)
    time: int = field(default_factory=now_ms)
    correlation_id: str = ""
    causation_id: str = ""
    session_id: str = ""
    user_id: str = ""
    respondent_id: str = "A"
    traceparent: str = ""
    deadline: int | None = None
    attempt: int = 1

    def fields(self, source: str | None = None) -> list[str | bytes]:
        """Flat `[name, value, …]` as XADD takes it; `source` replaces the sender."""
        return [
            "id", self.id,
            "subject", self.subject,
            "source", self.source if source is None else source,
            "time", str(self.time),
            "correlation_id", self.correlation_id,
            "causation_id", self.causation_id,
            "session_id", self.session_id,
            "user_id", self.user_id,
            "respondent_id", self.respondent_id,
            "traceparent", self.traceparent,
            "deadline", "" if self.deadline is None else str(self.deadline),
            "attempt", str(self.attempt),
            "payload", self.payload,
        ]  # fmt: skip

    @staticmethod
    def parse(subject: str, entry_id: str, fields: Sequence[bytes]) -> Envelope:
        """The envelope of a stored entry; only `payload` must be there, so that any client can write one.

        Raises DecodeError when a field is missing or malformed.
        """
        raw = dict(zip(fields[::2], fields[1::2], strict=True))
        payload = raw.get(b"payload")
        if payload is None:
            raise DecodeError("the entry has no field 'payload'")

        def text(name: bytes, default: str = "") -> str:
            value = raw.get(name)
            return default if value is None else value.decode()

        try:
            deadline = text(b"deadline")
            return Envelope(
                subject=subject,
                payload=payload,
                source=text(b"source"),
                id=text(b"id", entry_id),
                time=int(text(b"time") or entry_id.partition("-")[0]),
                correlation_id=text(b"correlation_id"),
                causation_id=text(b"causation_id"),
                session_id=text(b"session_id"),
                user_id=text(b"user_id"),
                respondent_id=text(b"respondent_id") or "A",
                traceparent=text(b"traceparent"),
                deadline=int(deadline) if deadline else None,
                attempt=int(text(b"attempt") or "1"),
            )
        except (UnicodeDecodeError, ValueError) as exc:
            raise DecodeError(f"the envelope is malformed: {exc}") from exc


@dataclass(frozen=True, slots=True)
class Message(Generic[P]):
    """A payload as received.

    entry_id: the id that Redis gave the stream entry.
    deliveries: how often the entry has been handed to a replica, this time included.
    parked: a context in which the handler waits for something without occupying one of the replica's slots.
    """

    entry_id: str
    envelope: Envelope
    payload: P
    deliveries: int = 1
    parked: Callable[[], AbstractAsyncContextManager[None]] = nullcontext

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
