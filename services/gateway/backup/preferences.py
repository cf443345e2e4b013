"""Answers, verdicts, grades and votes, as reward keeps them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from services.gateway.backup.proxy_section import ProxySection
from services.gateway.backup.section import Tally
from services.gateway.http.participant_rpc import operate
from shared.participant.backup import Record

# In this order: what was forgotten first, so that nothing of it is put back.
_TABLES = ("forgotten", "responses", "pairs", "critiques", "votes", "consents", "experiments")


class PreferenceRecord(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    table: Literal["forgotten", "responses", "pairs", "critiques", "votes", "consents", "experiments"]
    row: dict[str, Any]


class PreferencesSection(ProxySection):
    """A record is one row of a table."""

    name, participant = "preferences", "reward"
    what = "preference data"
    record = PreferenceRecord

    async def export(self) -> AsyncIterator[Sequence[Record]]:
        for table in _TABLES:
            cursor: str | None = ""
            while cursor is not None:
                page = await self._ask(op="dump", table=table, cursor=cursor)
                cursor = page["cursor"]
                yield [{"table": table, "row": row} for row in page["rows"]]

    async def write(self, records: Sequence[Record], tally: Tally) -> None:
        by_table: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for record in records:
            by_table[record["table"]].append(record["row"])
        for table, rows in by_table.items():
            written = (await self._ask(op="load", table=table, rows=rows))["written"]
            tally.written += written
            tally.kept += len(rows) - written

    async def _count(self) -> int:
        return sum((await self._ask(op="counts")).values())

    async def _ask(self, **args: Any) -> dict[str, Any]:
        return await operate(self._gateway, self.participant, "", **args)
