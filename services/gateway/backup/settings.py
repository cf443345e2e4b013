"""Run-time settings of all participants."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field

from services.gateway.backup.section import KeptHere, Tally
from shared.bus.keys import schema_key, settings_key
from shared.contracts import SETTINGS_UPDATE, SettingsUpdate
from shared.participant.backup import Record
from shared.participant.complaint import complaint
from shared.participant.settings import Described, stored_values


class SettingsRecord(BaseModel):
    """What an operator changed at one participant."""

    model_config = ConfigDict(extra="forbid", strict=True)

    participant: str = Field(pattern=r"^[a-z][a-z0-9_-]{0,63}$")
    values: dict[str, Any]


class SettingsSection(KeptHere):
    """A record is one participant's changed values. Running replicas hear of them at once."""

    name = "settings"
    version = 1

    async def _participants(self) -> list[str]:
        found: set[str] = set()
        async for keys in self._gateway.bus.scan(settings_key.glob):
            names = (settings_key.parts(key.decode(errors="replace")) for key in keys)
            found.update(name for parts in names if parts is not None for name in parts)
        return sorted(found)

    async def _changed(self, participant: str) -> dict[str, Any]:
        raw = await self._gateway.bus.link.call("HGETALL", settings_key(participant))
        return stored_values(participant, raw)

    async def _described(self, participant: str) -> Described | None:
        return Described.parse(participant, await self._gateway.bus.link.call("GET", schema_key(participant)))

    async def export(self) -> AsyncIterator[Sequence[Record]]:
        for participant in await self._participants():
            if values := await self._changed(participant):
                yield [{"participant": participant, "values": values}]

    def check(self, record: Record) -> None:
        SettingsRecord.model_validate(record)

    async def empty(self) -> bool:
        return not await self._participants()

    async def clear(self) -> AsyncIterator[int]:
        for participant in await self._participants():
            changed = await self._changed(participant)
            described = await self._described(participant)
            defaults = described.defaults if described else {}
            start = {name: defaults[name] for name in changed if name in defaults}
            await self._gateway.bus.link.call("DEL", settings_key(participant))
            await self._tell(participant, start)
            yield 1

    async def write(self, records: Sequence[Record], tally: Tally) -> None:
        for record in records:
            wanted = SettingsRecord.model_validate(record)
            participant = wanted.participant
            described, there = await self._described(participant), await self._changed(participant)
            fresh = {}
            for name, value in wanted.values.items():
                wrong = complaint(described.schema, {name: value}) if described else None
                if wrong:
                    tally.skip(f"setting of {participant}: {wrong}")
                elif name in there:
                    tally.kept += 1
                else:
                    fresh[name] = value
            if fresh:
                stored = [part for name, value in fresh.items() for part in (name, orjson.dumps(value))]
                await self._gateway.bus.link.call("HSET", settings_key(participant), *stored)
                await self._tell(participant, fresh)
                tally.written += len(fresh)

    async def _tell(self, participant: str, values: dict[str, Any]) -> None:
        if values:
            await self._gateway.bus.publish(SETTINGS_UPDATE.of(SettingsUpdate(participant=participant, values=values)))
