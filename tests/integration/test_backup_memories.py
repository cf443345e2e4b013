"""Memories and preference data in a backup: asked of their participants, or left out loudly."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from support.backups import WITHOUT, Place, backed_up, key_of, place, remembering
from support.http_gateway import client
from support.waiting import eventually

from services.cli.launch.embedded_redis import EmbeddedRedis


@pytest.fixture
async def source(redis_url: str, tmp_path: Path) -> AsyncIterator[Place]:
    async with place(redis_url, tmp_path / "source") as found, remembering(found, redis_url, tmp_path / "source"):
        yield found


@pytest.fixture
async def bare(redis_server: EmbeddedRedis, tmp_path: Path) -> AsyncIterator[Place]:
    """An empty stack without a memory and a reward."""
    async with place(redis_server.url, tmp_path / "target") as found:
        yield found


async def memories(http: httpx.AsyncClient) -> list[dict[str, Any]]:
    lines = [orjson.loads(line) for line in (await http.get("/memory/export")).content.splitlines()]
    return sorted(lines, key=lambda line: orjson.dumps(line))


async def fill(stack: Place) -> str:
    """Two users' answers, a topic and a rating; ann's key."""
    ann = await key_of(stack, "ann")
    for number in range(3):
        rated = await stack.ask(f"ann asks about lighthouse number {number}", f"ann-{number}", ann)
    await stack.ask("the administrator asks about windmills", "admin-1")
    async with client(stack.site.url, ann) as http:
        await http.put("/memory/topics/user.language", json={"content": "Ann prefers Elixir."})
        assert (await http.post("/feedback", json={"query_id": rated["query_id"], "stars": 5})).status_code == 202

        async def all_there() -> bool:
            engrams = (await http.get("/memory/engrams")).json()["engrams"]
            return len(engrams) == 4 and any(engram["sentiment"] == "positive" for engram in engrams)

        await eventually(all_there, 15, "the answers and the rating are remembered")
    await eventually(lambda: _count(stack, 1), 15, "the administrator's answer is remembered")
    return ann


async def _count(stack: Place, number: int) -> bool:
    return len((await stack.site.http.get("/memory/engrams")).json()["engrams"]) == number


async def test_memories_and_votes_of_all_users_arrive(
    source: Place, bare: Place, redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    ann_key = await fill(source)
    file = await backed_up(source, tmp_path / "all.backup", plain=False)
    async with remembering(bare, redis_server.url, tmp_path / "target"):
        done = await bare.local2("restore", str(file))
        assert done.exit_code == 0, done.output
        async with client(source.site.url, ann_key) as there, client(bare.site.url, ann_key) as here:
            assert await memories(here) == await memories(there) != []
            hits = (await here.get("/memory", params={"query": "lighthouse number 2"})).json()["hits"]
            assert "lighthouse number 2" in hits[0]["query"]
            assert (await here.get("/memory/topics/user.language")).json()["content"] == "Ann prefers Elixir."
            rated = [e["sentiment"] for e in (await here.get("/memory/engrams")).json()["engrams"]]
            assert rated.count("positive") == 1
        assert await memories(bare.site.http) == await memories(source.site.http)
        boards = [(await one.site.http.get("/preferences/leaderboard")).json() for one in (source, bare)]
        assert boards[0] == boards[1]
        assert boards[0]["people"]["rows"]
        # again, onto what is there, with a topic that is newer here
        async with client(bare.site.url, ann_key) as here:
            await here.put("/memory/topics/user.language", json={"content": "Ann prefers Gleam now."})
            done = await bare.local2("restore", "--merge", str(file))
            assert done.exit_code == 0
            assert re.search(r"memories: 0 restored, \d+ already there", done.output), done.output
            assert (await here.get("/memory/topics/user.language")).json()["content"] == "Ann prefers Gleam now."
            assert len((await here.get("/memory/engrams")).json()["engrams"]) == 4
        await bare.ask("something new here", "own")
        await eventually(lambda: _count(bare, 2), 15, "the new answer is remembered")
        assert (await bare.local2("restore", "--replace", str(file))).exit_code == 0
        assert await memories(bare.site.http) == await memories(source.site.http)


async def test_without_a_memory_a_backup_is_refused_unless_it_is_asked_for(
    bare: Place, source: Place, tmp_path: Path
) -> None:
    done = await bare.local2("backup", str(tmp_path / "some.backup"))
    assert done.exit_code == 1
    assert "No memory is running, so memories cannot be reached" in done.output
    assert "--without memories" in done.output
    done = await bare.local2("backup", "--without", "memories", "--without", "files", str(tmp_path / "some.backup"))
    assert done.exit_code == 1
    assert "--without preferences" in done.output
    done = await bare.local2("backup", *WITHOUT, str(tmp_path / "some.backup"))
    assert done.exit_code == 0
    assert "memories are NOT in this file" in done.output
    await fill(source)
    whole = await backed_up(source, tmp_path / "all.backup", plain=False)
    done = await bare.local2("restore", str(whole))
    assert done.exit_code == 1
    assert "No memory is running" in done.output
    assert (await bare.site.http.get("/sessions")).json()["sessions"] == []
    done = await bare.local2("restore", *WITHOUT, str(whole))
    assert done.exit_code == 0, done.output
    assert len((await bare.site.http.get("/sessions")).json()["sessions"]) == 1
