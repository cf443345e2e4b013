"""What the memory keeps of all users: turns, notes and topics."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.gateway.backup.proxy_section import ProxySection
from services.gateway.backup.section import Tally
from services.gateway.http.participant_rpc import operate
from shared.participant.backup import Record


class MemoryRecord(BaseModel):
    """A line as the memory's own export writes it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    user_id: str = Field(min_length=1, max_length=200)
    query: str = ""
    answer: str = ""
    content: str = ""
    topic: str = ""
    session_id: str = ""
    time: int = Field(ge=0)
    metadata: dict[str, Any] = {}

    @model_validator(mode="after")
    def _has_words(self) -> Self:
        if not (self.query.strip() or self.content.strip()):
            raise ValueError("a query or a content is needed")
        return self


class MemoriesSection(ProxySection):
    """A record is one engram or one topic. Vectors are not in it: the memory that takes it in makes its own."""

    name, participant = "memories", "memory"
    what, unit, counted = "memories", "memory", "engrams"
    record = MemoryRecord

    async def clear(self) -> AsyncIterator[int]:
        while (user_id := await self._first_user()) is not None:
            yield int((await operate(self._gateway, self.participant, user_id, op="delete_user"))["deleted"])

    async def _first_user(self) -> str | None:
        async for lines in self.export():
            if lines:
                return str(lines[0]["user_id"])
        return None

    async def write(self, records: Sequence[Record], tally: Tally) -> None:
        if lines := [line for line in records if not await self._newer_topic(line, tally)]:
            await super().write(lines, tally)

    def _new(self, imported: dict[str, Any]) -> int:
        # Memory takes an engram again that is there, and counts it in both.
        return int(imported["imported"] - imported["there"])

    async def _newer_topic(self, line: Record, tally: Tally) -> bool:
        """Return whether a topic is kept here with that time or a later one, and count it as kept."""
        if not line.get("topic"):
            return False
        there = await operate(self._gateway, self.participant, line["user_id"], op="topic_get", topic=line["topic"])
        if not there["found"] or there["time"] < line["time"]:
            return False
        tally.kept += 1
        return True
