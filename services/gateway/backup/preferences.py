"""Answers, verdicts, grades and votes, as reward keeps them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from services.gateway.backup.section import Tally
from services.gateway.gateway import Gateway
from services.gateway.operations import operate
from shared.participant.backup import Record

# In this order: what was forgotten first, so that nothing of it is put back.
_TABLES = ("forgotten", "responses", "pairs", "critiques", "votes", "consents", "experiments")


class PreferenceRecord(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    table: Literal["forgotten", "responses", "pairs", "critiques", "votes", "consents", "experiments"]
    row: dict[str, Any]


class PreferencesSection:
    name = "preferences"
    version = 1

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def absent(self) -> str | None:
        if await self._gateway.context.registry.served("reward_manage") is not None:
            return None
        return "No reward is running, so preference data cannot be reached; start it and try again."

    async def export(self) -> AsyncIterator[Sequence[Record]]:
        for table in _TABLES:
            cursor: str | None = ""
            while cursor is not None:
                page = await self._ask(op="dump", table=table, cursor=cursor)
                cursor = page["cursor"]
                yield [{"table": table, "row": row} for row in page["rows"]]

    def check(self, record: Record) -> None:
        PreferenceRecord.model_validate(record)

    async def empty(self) -> bool:
        return not any((await self._ask(op="counts")).values())

    async def clear(self) -> AsyncIterator[int]:
        yield int((await self._ask(op="clear"))["removed"])

    async def write(self, records: Sequence[Record], tally: Tally) -> None:
        by_table: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for record in records:
            wanted = PreferenceRecord.model_validate(record)
            by_table[wanted.table].append(wanted.row)
        for table, rows in by_table.items():
            written = (await self._ask(op="load", table=table, rows=rows))["written"]
            tally.written += written
            tally.kept += len(rows) - written

    async def _ask(self, **args: Any) -> dict[str, Any]:
        return await operate(self._gateway, "reward", "", **args)
