"""API keys: what they are recognised by, never the keys themselves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from services.gateway.backup.section import KeptHere, Tally
from services.gateway.http.keys import KeyRecord
from shared.bus.keys import API_KEYS
from shared.participant.backup import Record
from shared.zones import LONGEST_NAME


class StoredKey(BaseModel):
    """An API key by its SHA-256."""

    model_config = ConfigDict(extra="forbid", strict=True)

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    name: str = Field(min_length=1, max_length=200)
    user_id: str = Field(min_length=1, max_length=200)
    role: Literal["admin", "user"]
    created: int = Field(ge=0)
    trusted: bool = False
    time_zone: str = Field(default="", max_length=LONGEST_NAME)


class KeysSection(KeptHere):
    """A record is one key. An administrator's start key is none: it belongs to the installation, not to its data; a
    browser's is none either: it ends soon."""

    name = "keys"
    version = 1

    async def export(self) -> AsyncIterator[Sequence[Record]]:
        yield [
            {"sha256": hashed, "name": k.name, "user_id": k.user_id, "role": k.role, "created": k.created}
            | ({"trusted": True} if k.trusted else {})
            | ({"time_zone": k.time_zone} if k.time_zone else {})
            for hashed, k in await self._gateway.keys.stored()
            if k.lasting
        ]

    def check(self, record: Record) -> None:
        StoredKey.model_validate(record)

    async def empty(self) -> bool:
        return not any(record.lasting for _, record in await self._gateway.keys.stored())

    async def clear(self) -> AsyncIterator[int]:
        gone = [hashed for hashed, record in await self._gateway.keys.stored() if record.lasting]
        if gone:
            await self._gateway.bus.link.call("HDEL", API_KEYS, *gone)
        yield len(gone)

    async def write(self, records: Sequence[Record], tally: Tally) -> None:
        keys = [StoredKey.model_validate(record) for record in records]
        commands = [
            (
                "HSETNX",
                API_KEYS,
                key.sha256,
                KeyRecord(
                    key.sha256[:12], key.name, key.user_id, key.role, key.created, trusted=key.trusted,
                    time_zone=key.time_zone,
                ).dump(),
            )
            for key in keys
        ]  # fmt: skip
        if commands:
            added = sum(await self._gateway.bus.link.pipe(commands))
            tally.written += added
            tally.kept += len(keys) - added
