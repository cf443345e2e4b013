"""What is known of all users: everything that was said, of which facts are made."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from services.gateway.backup.section import Tally
from services.gateway.gateway import Gateway
from services.gateway.keys import ADMIN
from services.gateway.operations import operate
from shared.participant.backup import Record

_PAGE = 200


class KnowledgeRecord(BaseModel):
    """A line as the knowledge's own export writes it."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    user_id: str = Field(min_length=1, max_length=200)
    source: str = Field(min_length=1)
    said: int = Field(ge=0)
    subject: str = Field(min_length=1)
    relation: str = Field(min_length=1)
    object: str = Field(min_length=1)


class KnowledgeSection:
    name = "knowledge"
    version = 1

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def absent(self) -> str | None:
        if await self._gateway.context.registry.served("knowledge_manage") is not None:
            return None
        return "No knowledge is running, so facts cannot be reached; start it and try again."

    async def export(self) -> AsyncIterator[Sequence[Record]]:
        cursor: str | None = None
        while True:
            page = await self._ask(op="export", limit=_PAGE, cursor=cursor)
            yield page["lines"]
            cursor = page["cursor"]
            if cursor is None:
                return

    def check(self, record: Record) -> None:
        KnowledgeRecord.model_validate(record)

    async def empty(self) -> bool:
        return not (await self._ask(op="stats"))["claims"]

    async def clear(self) -> AsyncIterator[int]:
        left, more = (await self._ask(op="stats"))["claims"], True
        while more:
            more = (await self._ask(op="clear"))["left"]
            before, left = left, (await self._ask(op="stats"))["claims"]
            yield max(0, before - left)

    async def write(self, records: Sequence[Record], tally: Tally) -> None:
        found = await self._ask(op="import", lines=list(records))
        tally.written += found["imported"]
        tally.kept += found["there"]
        for wrong in found["errors"]:
            tally.skip(f"fact of {records[wrong['line']]['user_id']}: {wrong['message']}")

    async def _ask(self, **args: Any) -> dict[str, Any]:
        return await operate(self._gateway, "knowledge", ADMIN, all_users=True, **args)
