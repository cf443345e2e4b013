"""A user's library of documents that is damaged: it is named, no backup leaves it out, and a backup restores it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.backups import Place, backed_up, key_of, place, remembering
from support.http_gateway import client
from support.waiting import eventually

from services.cli.commands.repair import damages, repair


def garble(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


# What is done to ann's database.
DAMAGE: dict[str, Callable[[Path], object]] = {
    "garbled": garble,
    "cut off": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "gone": os.unlink,
}
TEXT = b"The key of the lighthouse hangs behind the door."


@contextlib.asynccontextmanager
async def stack(redis_url: str, folder: Path) -> AsyncIterator[Place]:
    async with place(redis_url, folder) as found, remembering(found, redis_url, folder):
        yield found


async def add(http: httpx.AsyncClient, text: bytes) -> dict[str, Any]:
    answer = await http.post("/files", params={"name": "a.txt"}, content=text)
    assert answer.status_code == 201, answer.text
    file: dict[str, Any] = answer.json()

    async def read() -> bool:
        return any(one["state"] == "ready" for one in await files(http) if one["id"] == file["id"])

    await eventually(read, 20, "the file is read")
    return file


async def files(http: httpx.AsyncClient) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await http.get("/files")).json()["files"]
    return found


@pytest.mark.parametrize("damage", DAMAGE)
async def test_damaged_library_is_named_and_a_backup_restores_it(redis_url: str, tmp_path: Path, damage: str) -> None:
    folder, whole, partial = tmp_path / "data", tmp_path / "whole.backup", tmp_path / "partial.backup"
    async with stack(redis_url, folder) as here:
        keys = {user: await key_of(here, user) for user in ("ann", "bob")}
        async with client(here.site.url, keys["ann"]) as ann:
            file = await add(ann, TEXT)
        (database,) = (folder / "documents").glob("*/library.db")
        async with client(here.site.url, keys["bob"]) as bob:
            await add(bob, b"The boat is red.")
        await backed_up(here, whole, plain=False)
    DAMAGE[damage](database)
    named = dict(damages(folder, embedded=False))
    assert list(named) == [f"documents of user {database.parent.name}"]
    async with stack(redis_url, folder) as here:

        async def reported() -> bool:
            memory = (await here.site.http.get("/ready")).json()["parts"]["memory"]
            return "the documents of a user are damaged" in (memory.get("reason") or "")

        await eventually(reported, 20, "memory names the damage")
        async with client(here.site.url, keys["ann"]) as ann:
            for answer in (
                await ann.get("/files"),
                await ann.post("/files", params={"name": "b.txt"}, content=b"new"),
                await ann.get(f"/files/{file['id']}"),
                await ann.get("/documents", params={"query": "lighthouse"}),
            ):
                assert answer.status_code == 503, answer.text
                assert "local2 restore --merge FILE" in answer.json()["error"]["message"]
        async with client(here.site.url, keys["bob"]) as bob:
            await add(bob, b"The boat is blue.")
            assert len(await files(bob)) == 2
            hits = (await bob.get("/documents", params={"query": "boat red"})).json()["hits"]
            assert "The boat is red." in [hit["text"] for hit in hits]
        refused = await here.local2("backup", str(partial))
        assert refused.exit_code == 1
        assert "the documents of a user are damaged" in refused.output
        assert not partial.exists()
    said = "\n".join(await asyncio.to_thread(repair, folder, embedded=False))
    assert f"{database.parent}.broken-" in said
    assert damages(folder, embedded=False) == []
    async with stack(redis_url, folder) as here:
        done = await here.local2("restore", "--merge", str(whole))
        assert done.exit_code == 0, done.output
        async with client(here.site.url, keys["ann"]) as ann:
            assert [one["id"] for one in await files(ann)] == [file["id"]]
            assert (await ann.get(f"/files/{file['id']}")).content == TEXT
        await backed_up(here, partial, plain=False)


async def test_backup_names_a_file_whose_content_is_lost(redis_url: str, tmp_path: Path) -> None:
    async with stack(redis_url, tmp_path / "data") as here:
        await add(here.site.http, TEXT)
        (content,) = (tmp_path / "data" / "documents").glob("*/files/*")
        content.unlink()
        refused = await here.local2("backup", str(tmp_path / "partial.backup"))
        assert refused.exit_code == 1
        assert "the content of a.txt of admin is lost: delete this file" in refused.output
        assert not (tmp_path / "partial.backup").exists()
