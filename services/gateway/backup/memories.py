"""What the memory keeps of all users: turns, notes and topics."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from services.gateway.backup.section import Tally
from services.gateway.gateway import Gateway
from services.gateway.keys import ADMIN
from services.gateway.operations import operate
from shared.participant.backup import Record

_PAGE = 100


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


class MemoriesSection:
    """A record is one engram or one topic. Vectors are not in it: the memory that takes it in makes its own."""

    name = "memories"
    version = 1

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def absent(self) -> str | None:
        if await self._gateway.context.registry.served("memory_manage") is not None:
            return None
        return "No memory is running, so memories cannot be reached; start it and try again."

    async def export(self) -> AsyncIterator[Sequence[Record]]:
        cursor: str | None = None
        while True:
            page = await self._ask(op="export", limit=_PAGE, cursor=cursor)
            yield page["lines"]
            cursor = page["cursor"]
            if cursor is None:
                return

    def check(self, record: Record) -> None:
        line = MemoryRecord.model_validate(record)
        if not (line.query.strip() or line.content.strip()):
            raise ValueError("a query or a content is needed")

    async def empty(self) -> bool:
        return not (await self._ask(op="stats"))["engrams"]

    async def clear(self) -> AsyncIterator[int]:
        while (user_id := await self._somebody()) is not None:
            yield int((await operate(self._gateway, "memory", user_id, op="delete_user"))["deleted"])

    async def _somebody(self) -> str | None:
        """A user of whom something is kept."""
        async for lines in self.export():
            if lines:
                return str(lines[0]["user_id"])
        return None

    async def write(self, records: Sequence[Record], tally: Tally) -> None:
        lines = [line for line in records if not await self._newer_topic(line, tally)]
        if not lines:
            return
        found = await self._ask(op="import", lines=lines)
        tally.written += found["imported"] - found["there"]
        tally.kept += found["there"]
        for wrong in found["errors"]:
            tally.skip(f"memory of {lines[wrong['line']]['user_id']}: {wrong['message']}")

    async def _newer_topic(self, line: Record, tally: Tally) -> bool:
        """Whether it is a topic that was kept here at that time or later. Engrams may be taken in again and again."""
        if not line.get("topic"):
            return False
        there = await operate(self._gateway, "memory", line["user_id"], op="topic_get", topic=line["topic"])
        if not there["found"] or there["time"] < line["time"]:
            return False
        tally.kept += 1
        return True

    async def _ask(self, **args: Any) -> dict[str, Any]:
        return await operate(self._gateway, "memory", ADMIN, all_users=True, **args)
