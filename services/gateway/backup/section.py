"""A part of a backup: whoever keeps something adds one of these to `sections`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.gateway.http.gateway import Gateway
from shared.participant.backup import Record

# So many things that were left out are named; of the rest, the number is told.
_NAMED = 50


@dataclass(slots=True)
class Tally:
    """What became of a section's records: `written` anew or completed, `kept` as they were, `skipped` with a reason."""

    written: int = 0
    kept: int = 0
    skipped: int = 0
    reasons: list[str] = field(default_factory=list)

    def skip(self, reason: str) -> None:
        self.skipped += 1
        if len(self.reasons) < _NAMED:
            self.reasons.append(reason)


class KeptHere:
    """A section of what the gateway itself keeps on the bus: it is always within reach."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def absent(self) -> str | None:
        return None


class Section(Protocol):
    """Its records are JSON objects with a meaning of their own, never the store's bytes.

    version: of the records' form; a file with a higher one is refused.
    """

    name: str
    version: int

    async def absent(self) -> str | None:
        """Why this section can be neither read nor written now, as a sentence that says what to do; else None."""

    def export(self) -> AsyncIterator[Sequence[Record]]:
        """Everything, in pages of bounded size."""

    def check(self, record: Record) -> None:
        """Raises ValueError (pydantic's is one) for a record that `write` could not take."""

    async def empty(self) -> bool:
        """Whether nothing is kept yet."""

    def clear(self) -> AsyncIterator[int]:
        """Remove everything, a bounded part at each step. Yields the number of items that a step has removed."""

    async def write(self, records: Sequence[Record], tally: Tally) -> None:
        """Adds what is not there yet; what is there stays. Repeating it changes nothing."""
