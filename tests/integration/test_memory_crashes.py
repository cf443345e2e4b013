"""Memory when it dies, when what it needs is away, and when there are several of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import sqlite3
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from support.memories import (
    MemoryClient,
    asking,
    critique,
    memory_settings,
    new_query,
    remembering,
    response,
    reward,
    verdict,
)
from support.mortal import replica
from support.services import announced, running
from support.waiting import eventually

from services.memory.index import engrams_of
from services.memory.notes import States
from services.memory.portable import exported
from services.memory.service import app, builder
from services.memory.settings import MemorySettings
from services.memory.store import StoreLocked
from shared.bus import Bus
from shared.envelope import now_ms
from shared.participant.service import Service
from shared.testing.model_server import ScriptedModelServer


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


STEPS = ("owned", "stored", "indexed", "noted", "updated", "annotated")


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
async def test_after_a_crash_at_any_step_nothing_is_lost_and_nothing_is_there_twice(
    redis_url: str, tmp_path: Path, step: str
) -> None:
    async with ScriptedModelServer() as server, asking(redis_url, tmp_path, server) as client:
        said = [response(f"Question number {n}?", f"Answer {n}.", query_id=new_query()) for n in range(3)]
        with replica("memory", redis_url, tmp_path, server.url, step) as dying:
            await announced(redis_url, "memory", timeout=30)
            # the second has its grade before it is there
            await client.publish(critique(said[1], 2), said[0], said[1])
            if step == "updated":
                await client.idle()
            await client.publish(critique(said[0], 5), verdict(said[0].query_id, "A"), reward(said[1], 1), said[2])
            await dying.died()
        since = now_ms()
        async with running(app, memory_settings(redis_url, tmp_path, server.url)):
            await client.indexed(since)
            await client.idle(30)
            engrams = await client.engrams()
            rated = {engram_id: (e["score"], e["winner"], e["reward"]) for engram_id, e in engrams.items()}
            assert rated == {
                said[0].response_id: (5, "A", None),
                said[1].response_id: (2, None, 1.0),
                said[2].response_id: (None, None, None),
            }
            hits = (await client.manage("search", query="question number"))["hits"]
            assert sorted(hit["id"] for hit in hits) == sorted(rated)


@pytest.mark.slow
@pytest.mark.parametrize("step", ["marked", "removed"])
async def test_a_deletion_that_was_cut_off_is_carried_out(redis_url: str, tmp_path: Path, step: str) -> None:
    async with ScriptedModelServer() as server, asking(redis_url, tmp_path, server) as client:
        said = response("Question?", "Answer.")
        with replica("memory", redis_url, tmp_path, server.url, step) as dying:
            await announced(redis_url, "memory", timeout=30)
            await client.publish(said)
            await client.idle()
            deleting = asyncio.create_task(client.managed("delete", id=said.response_id))
            await dying.died()
        since = now_ms()
        async with running(app, memory_settings(redis_url, tmp_path, server.url)):
            await client.indexed(since)
            await deleting
            await client.publish(said, critique(said, 4))
            await client.idle()
            assert await client.engrams() == {}
            assert (await client.manage("search", query="question"))["hits"] == []


@pytest.mark.parametrize("step", ["owned", "stored", "indexed"])
async def test_deletion_by_another_replica_during_a_write_leaves_nothing(
    redis_url: str, tmp_path: Path, step: str
) -> None:
    said = response("Where is the key?", "Under the mat.")
    deletions: list[None] = []

    async def delete() -> None:
        async with Bus(redis_url, "another") as bus:
            await States(bus, 30, 30).delete([said.response_id])

    def deleting(reached: str) -> None:
        if reached == step and not deletions:
            with ThreadPoolExecutor(1) as pool:
                deletions.append(pool.submit(asyncio.run, delete()).result())

    service = Service("memory", MemorySettings, builder(deleting))
    async with (
        ScriptedModelServer() as server,
        running(service, memory_settings(redis_url, tmp_path, server.url)),
        asking(redis_url, tmp_path, server) as client,
    ):
        await announced(redis_url, "memory")
        await client.indexed()
        await client.publish(said)
        await client.idle()
        assert len(deletions) == 1
        assert await client.engrams() == {}
        assert (await client.manage("search", query="key mat"))["hits"] == []


async def test_while_the_embedding_model_is_away_nothing_is_lost(redis_url: str, tmp_path: Path) -> None:
    port = free_port()
    settings = memory_settings(redis_url, tmp_path, f"http://127.0.0.1:{port}", ingest_limit=4)
    nowhere = ScriptedModelServer(port=port)
    async with running(app, settings), asking(redis_url, tmp_path, nowhere) as client:
        await announced(redis_url, "memory")

        async def known() -> bool:
            return "embedding model" in ((await client.facts()).get("degraded") or "")

        await eventually(known, 10, "the memory says what is missing")
        said = [response(f"Question number {n}?", "Yes.") for n in range(12)]
        await client.publish(*said, critique(said[0], 4))
        # what is saved on purpose is there at once, by its words alone
        assert (await client.tool("save_topic", topic="user.pet", content="A cat.")).error is None
        assert (await client.tool("save_memory", content="The meeting is in Leipzig.")).result == "Memory saved."
        assert (await client.tool("recall_topic", topic="user.pet")).result.endswith("A cat.")
        assert (await client.tool("search_memory", query="question")).result == "No memories found."
        found = (await client.tool("search_memory", query="meeting in Leipzig")).result
        assert "Saved: The meeting is in Leipzig." in found
        assert len(await client.engrams()) == 2
        async with nowhere:
            await client.idle(30)

            async def whole() -> bool:
                return len(await client.engrams()) == 14

            await eventually(whole, 20, "everything is there")
            assert (await client.engrams())[said[0].response_id]["score"] == 4

            async def placed() -> bool:
                hits = (await client.manage("search", query="meeting in Leipzig"))["hits"]
                return hits[0]["content"] == "The meeting is in Leipzig." and hits[0]["why"]["similarity"] is not None

            await eventually(placed, 20, "what was saved by its words has a vector")


async def held(client: MemoryClient, count: int) -> None:
    """Waits until so many texts wait for the embedding model."""

    async def waiting() -> bool:
        return bool((await client.facts()).get("waiting") == count)

    await eventually(waiting, 20, "all are held")


@pytest.mark.slow
@pytest.mark.parametrize("step", ["owned", "stored", "indexed"])
async def test_a_crash_in_the_middle_of_a_batch_loses_nothing_of_it(redis_url: str, tmp_path: Path, step: str) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = ScriptedModelServer(port=port)
    async with asking(redis_url, tmp_path, server) as client:
        users = {user: [response(f"Question {n}?", f"Of {user}.", user_id=user) for n in range(12)] for user in "ab"}
        # the first write has one engram, the second those that waited for it
        with replica("memory", redis_url, tmp_path, url, step, 2) as dying:
            await announced(redis_url, "memory", timeout=30)
            await client.publish(*users["a"], *users["b"], critique(users["a"][3], 5))
            await held(client, 24)
            async with server:
                await dying.died()
                since = now_ms()
                async with running(app, memory_settings(redis_url, tmp_path, url)):
                    await client.indexed(since)
                    await client.idle(30)
                    for user, said in users.items():
                        engrams = await client.engrams(user)
                        ids = sorted(each.response_id for each in said)
                        assert sorted(engrams) == ids
                        assert sorted(line["metadata"]["id"] for line in await client.exported(user)) == ids
                        hits = (await client.manage("search", user, query=f"Question 3? Of {user}.", limit=50))["hits"]
                        assert {hit["answer"] for hit in hits} == {f"Of {user}."}
                        assert None not in [hit["why"]["similarity"] for hit in hits]
                    assert (await client.engrams("a"))[users["a"][3].response_id]["score"] == 5


async def test_a_text_that_the_model_refuses_is_shortened_and_kept(redis_url: str, tmp_path: Path) -> None:
    async with remembering(redis_url, tmp_path) as client:
        said = response("word " * 6_000, "ok")
        await client.publish(said, response("Another?", "Yes."))
        await client.idle()
        assert len(await client.engrams()) == 2


async def test_a_second_process_on_the_folder_is_told_so(redis_url: str, tmp_path: Path) -> None:
    async with remembering(redis_url, tmp_path) as client:
        with pytest.raises(BaseExceptionGroup) as refused:
            await app.run(memory_settings(redis_url, tmp_path, client.server.url), asyncio.Event())
        assert refused.group_contains(StoreLocked, match="in use by another process .* set LOCAL2_CHROMA_URL")
        assert await client.engrams() == {}


async def test_after_another_model_everything_has_new_vectors(redis_url: str, tmp_path: Path) -> None:
    said = [response(f"Question number {n}?", "Yes.") for n in range(5)]
    async with remembering(redis_url, tmp_path, embedding_model="all-minilm") as client:
        await client.publish(*said, critique(said[0], 4))
        await client.idle()
    async with remembering(redis_url, tmp_path, embedding_model="nomic-embed-text") as client:

        async def through() -> bool:
            return (await client.facts())["reembedding"] == 0

        await eventually(through, 20, "all have new vectors")
        hits = (await client.manage("search", query="question number"))["hits"]
        assert len(hits) == 5
        assert all(hit["why"]["similarity"] is not None for hit in hits)
        assert (await client.engrams())[said[0].response_id]["score"] == 4


async def test_another_model_can_be_refused(redis_url: str, tmp_path: Path) -> None:
    async with remembering(redis_url, tmp_path, embedding_model="all-minilm") as client:
        await client.publish(response("Question?", "Yes."))
        await client.idle()
    settings = memory_settings(redis_url, tmp_path, client.server.url, on_model_change="refuse")
    with pytest.raises(BaseExceptionGroup) as refused:
        await app.run(settings, asyncio.Event())
    assert refused.group_contains(Exception, match="holds 1 engrams with vectors of another model")


# ── several replicas on a server ─────────────────────────────────────────────────────────────────────────────


@contextlib.asynccontextmanager
async def chroma_server(folder: Path) -> AsyncIterator[str]:
    """The Rust server that comes with the package."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("chroma")), "run", "--host", "127.0.0.1", "--port", str(port)]
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, "--path", str(folder), stdout=quiet, stderr=quiet)
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(trust_env=False, verify=False) as http:

            async def up() -> bool:
                with contextlib.suppress(httpx.HTTPError):
                    return (await http.get(f"{url}/api/v2/heartbeat")).status_code == 200
                return False

            await eventually(up, 30, "the Chroma server answers", every=0.1)
        yield url
    finally:
        process.kill()
        await process.wait()


@pytest.mark.slow
async def test_two_replicas_share_a_server_and_one_may_die(redis_url: str, tmp_path: Path) -> None:
    async with (
        chroma_server(tmp_path / "server") as chroma,
        ScriptedModelServer() as server,
        asking(redis_url, tmp_path, server) as client,
    ):
        with (
            replica("memory", redis_url, tmp_path / "1", server.url, chroma_url=chroma) as one,
            replica("memory", redis_url, tmp_path / "2", server.url, chroma_url=chroma),
        ):
            await announced(redis_url, "memory", 2, timeout=40)
            said = [response(f"Question number {n}?", f"Answer {n}.") for n in range(20)]
            for number, each in enumerate(said):
                await client.publish(critique(each, 1 + number % 5), each, reward(each, 1), verdict(each.query_id, "A"))
                if number == 10:
                    one.kill()
            await client.idle(60)

            async def followed() -> bool:
                return len(await client.engrams()) == 20

            await eventually(followed, 20, "the survivor knows all")
            engrams = await client.engrams()
            found = [(e["score"], e["reward"], e["winner"]) for e in (engrams[s.response_id] for s in said)]
            assert found == [(1 + number % 5, 1.0, "A") for number in range(20)]
            with replica("memory", redis_url, tmp_path / "3", server.url, chroma_url=chroma):
                await announced(redis_url, "memory", 2, timeout=40)
                gone = said[0].response_id
                assert await client.manage("delete", id=gone) == {"found": True}

                async def nobody_has_it() -> bool:
                    answers = [await client.manage("search", query="question number", limit=50) for _ in range(6)]
                    return all(gone not in [hit["id"] for hit in answer["hits"]] for answer in answers)

                await eventually(nobody_has_it, 10, "both replicas have forgotten it")


def indexed(file: Path) -> dict[str, str]:
    """The data of the engrams in an index of words, by id; nothing while its replica makes the file."""
    with (
        contextlib.suppress(sqlite3.OperationalError),
        contextlib.closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as index,
    ):
        return dict(index.execute("SELECT id, data FROM engram"))
    return {}


@pytest.mark.slow
async def test_what_two_replicas_annotate_at_once_is_the_same_in_both_and_in_the_store(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A replica keeps its index of words in a folder of its own.
    words = tmp_path / "words"
    words.mkdir()
    monkeypatch.setenv("TMPDIR", str(words))
    async with (
        chroma_server(tmp_path / "server") as chroma,
        ScriptedModelServer() as server,
        asking(redis_url, tmp_path, server) as client,
    ):
        with contextlib.ExitStack() as stack:
            for name in "12":
                stack.enter_context(replica("memory", redis_url, tmp_path / name, server.url, chroma_url=chroma))
            await announced(redis_url, "memory", 2, timeout=30)
            said = [response(f"Question number {n}?", "Yes.") for n in range(2)]
            await client.publish(*said)
            for number in (3, 5, 1, 0, 4, 2):
                for each in said:
                    vote = reward(each, number / 5, f"170000000000{number}-0")
                    await client.publish(critique(each, 1 + number % 5), vote, verdict(each.query_id, "A"))
            await client.idle(40)
            ids = [each.response_id for each in said]

            async def agreed() -> bool:
                stored = {line["metadata"]["id"]: line for line in await client.exported()}
                known = [engrams_of(indexed(file), "ann") for file in words.glob("local2-words-*/*.db")]
                return len(known) == 2 and all(
                    {one: exported(engram) for one, engram in found.items()} == stored for found in known
                )

            await eventually(agreed, 15, "both replicas know what the store holds")
            engrams = await client.engrams()
            assert {(e["winner"], e["reward"]) for e in engrams.values()} == {("A", 1.0)}
            assert all(e["score"] in range(1, 6) for e in engrams.values())
            assert set(engrams) == set(ids)
    # an open connection to the Chroma server would be reported, and fail the test
    gc.collect()
