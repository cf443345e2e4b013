"""A section of a backup that another participant keeps."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from pydantic import BaseModel

from services.gateway.backup.section import Tally
from services.gateway.http.gateway import Gateway
from services.gateway.http.keys import ADMIN
from services.gateway.http.participant_rpc import operate
from shared.participant.backup import Record


class ProxySection:
    """Reads and writes by the operations `stats`, `export`, `import` and `clear` of `PARTICIPANT_manage`.

    what: the data, as the sentence about an absent participant calls it. unit: one record, as a reason calls it.
    counted: the field of `stats` that counts the records. record: the form of a record. page: records of a page.
    """

    name: str
    version = 1
    participant: str
    what: str
    unit: str
    counted: str
    record: type[BaseModel]
    page: int = 100

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def absent(self) -> str | None:
        if await self._gateway.context.registry.served(f"{self.participant}_manage") is not None:
            return None
        return f"No {self.participant} is running, so {self.what} cannot be reached; start it and try again."

    def check(self, record: Record) -> None:
        self.record.model_validate(record)

    async def export(self) -> AsyncIterator[Sequence[Record]]:
        cursor: str | None = None
        while True:
            found = await self._ask(op="export", limit=self.page, cursor=cursor)
            yield found["lines"]
            cursor = found["cursor"]
            if cursor is None:
                return

    async def empty(self) -> bool:
        return not await self._count()

    async def clear(self) -> AsyncIterator[int]:
        left, more = await self._count(), True
        while more:
            more = (await self._ask(op="clear")).get("left", False)
            before, left = left, await self._count()
            yield max(0, before - left)

    async def write(self, records: Sequence[Record], tally: Tally) -> None:
        found = await self._ask(op="import", lines=list(records))
        tally.written += self._new(found)
        tally.kept += found["there"]
        for wrong in found["errors"]:
            tally.skip(f"{self.unit} of {records[wrong['line']]['user_id']}: {wrong['message']}")

    def _new(self, imported: dict[str, Any]) -> int:
        """Return how many records of an import were not there before."""
        return int(imported["imported"])

    async def _count(self) -> int:
        return int((await self._ask(op="stats"))[self.counted])

    async def _ask(self, **args: Any) -> dict[str, Any]:
        return await operate(self._gateway, self.participant, ADMIN, all_users=True, **args)
