"""The files of all users. Their text, and what a search needs of it, is read anew from them."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.gateway.backup.proxy_section import ProxySection
from services.gateway.backup.section import Tally
from services.gateway.http.errors import ApiError
from services.gateway.http.keys import ADMIN
from services.gateway.http.participant_rpc import memory_files
from shared.participant.backup import Record

_PAGE = 100


class FileRecord(BaseModel):
    """One file; `data` in base64."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    user_id: str = Field(min_length=1, max_length=200)
    name: str = Field(min_length=1, max_length=1_000)
    type: str = Field(max_length=200)
    added: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    data: str = Field(min_length=1)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if hashlib.sha256(base64.b64decode(self.data, validate=True)).hexdigest() != self.sha256:
            raise ValueError(f"the bytes of {self.name} are not those that were saved")
        return self


class FilesSection(ProxySection):
    """A record is one file. Images of a request that are kept for a while only are left out."""

    name, participant, what = "files", "memory", "files"
    record = FileRecord

    async def export(self) -> AsyncIterator[Sequence[Record]]:
        for user_id in await self._users():
            cursor: int | None = None
            while True:
                page = await self._operate(user_id, op="list", limit=_PAGE, cursor=cursor)
                for about in page["files"]:
                    if about["expires"] is None and (record := await self._record(user_id, about)) is not None:
                        yield [record]
                if (cursor := page["cursor"]) is None:
                    break

    async def _record(self, user_id: str, about: dict[str, Any]) -> Record | None:
        try:
            async with memory_files(self._gateway) as files:
                data = (await files.fetch(user_id, about["id"])).content
        except ApiError as exc:
            if exc.status_code != 404:
                raise
            if (await self._operate(user_id, op="get", ids=[about["id"]]))["files"]:
                text = f"the content of {about['name']} of {user_id} is lost: delete this file, or leave files out"
                raise ApiError(500, "file_lost", text) from exc
            # removed meanwhile
            return None
        kept = {name: about[name] for name in ("name", "type", "added", "sha256")}
        return {"user_id": user_id, **kept, "data": base64.b64encode(data).decode()}

    async def empty(self) -> bool:
        return not await self._users()

    async def clear(self) -> AsyncIterator[int]:
        for user_id in await self._users():
            yield int((await self._operate(user_id, op="delete_user"))["deleted"])

    async def write(self, records: Sequence[Record], tally: Tally) -> None:
        for record in records:
            data = await asyncio.to_thread(base64.b64decode, record["data"])
            try:
                async with memory_files(self._gateway) as files:
                    new, _ = await files.add(
                        record["user_id"], data, name=record["name"], content_type=record["type"], added=record["added"]
                    )
            except ApiError as exc:
                if exc.status_code >= 500:
                    raise
                tally.skip(f"file {record['name']} of {record['user_id']}: {exc.message}")
            else:
                tally.written += new
                tally.kept += not new

    async def _users(self) -> list[str]:
        found: list[str] = (await self._operate(ADMIN, op="users"))["users"]
        return found

    async def _operate(self, user_id: str, **args: Any) -> dict[str, Any]:
        async with memory_files(self._gateway) as files:
            return await files.operate(user_id, **args)
