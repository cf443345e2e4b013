"""Memory when it dies, when what it needs is away, and when there are several of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

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

from services.memory.index import Index, engrams_of
from services.memory.portable import exported
from services.memory.service import app
from services.memory.store import StoreLocked
from services.memory.writer import Keeper
from shared.contracts import DEAD_LETTER
from shared.envelope import now_ms
from shared.errors import PermanentError
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


async def test_a_deletion_between_the_last_look_and_the_end_of_a_write_leaves_nothing(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Keeper._changed
    deleted: list[str] = []

    async def late(self: Keeper, items: Any, before: Any) -> Any:
        changed = await look(self, items, before)
        if not deleted:
            deleted.extend(items)
            await self.delete("ann", list(items))
        return changed

    monkeypatch.setattr(Keeper, "_changed", late)
    async with remembering(redis_url, tmp_path) as client:
        await client.publish(response("Where is the key?", "Under the mat."))
        await client.idle()
        assert len(deleted) == 1
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


async def test_what_waits_is_written_together_and_what_cannot_be_is_set_aside_alone(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    put = Keeper.put

    async def refusing(self: Keeper, user_id: str, items: Any) -> Any:
        tried.append(len(items))
        if any(engram.query == "Cursed?" for engram, _ in items):
            raise PermanentError("it cannot be written")
        return await put(self, user_id, items)

    monkeypatch.setattr(Keeper, "put", refusing)
    port = free_port()
    server = ScriptedModelServer(port=port)
    settings = memory_settings(redis_url, tmp_path, f"http://127.0.0.1:{port}")
    async with running(app, settings), asking(redis_url, tmp_path, server) as client:
        await announced(redis_url, "memory")
        said = [response("Cursed?" if n == 7 else f"Question number {n}?", "Yes.") for n in range(20)]
        await client.publish(*said)
        await held(client, 20)
        async with server:
            await client.idle(30)
            assert set(await client.engrams()) == {each.response_id for each in said} - {said[7].response_id}
        # how many have their vectors when the first write begins is the machine's affair
        assert max(tried) >= 4
        assert await client.bus.link.call("XLEN", DEAD_LETTER.stream) == 1


async def test_a_text_that_the_model_refuses_is_shortened_and_kept(redis_url: str, tmp_path: Path) -> None:
    async with remembering(redis_url, tmp_path) as client:
        said = response("word " * 6_000, "ok")
        await client.publish(said, response("Another?", "Yes."))
        await client.idle()
        assert len(await client.engrams()) == 2


async def test_a_second_process_on_the_folder_is_told_so(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.memory.folder._LOCK_PATIENCE", 0.2)
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


@pytest.mark.slow
async def test_what_two_replicas_annotate_at_once_is_the_same_in_both_and_in_the_store(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexes: list[Index] = []

    class Watched(Index):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            indexes.append(self)

    monkeypatch.setattr("services.memory.service.Index", Watched)
    async with chroma_server(tmp_path / "server") as chroma, ScriptedModelServer() as server:
        one, two = (memory_settings(redis_url, tmp_path / name, server.url, chroma_url=chroma) for name in "12")
        async with running(app, one), running(app, two), asking(redis_url, tmp_path, server) as client:
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
                known = [
                    engrams_of(await index.look("ann", lambda words: words.data("ann", ids)) or {}, "ann")
                    for index in indexes
                ]
                return all({one: exported(engram) for one, engram in found.items()} == stored for found in known)

            await eventually(agreed, 15, "both replicas know what the store holds")
            assert len(indexes) == 2
            engrams = await client.engrams()
            assert {(e["winner"], e["reward"]) for e in engrams.values()} == {("A", 1.0)}
            assert all(e["score"] in range(1, 6) for e in engrams.values())
            assert set(engrams) == set(ids)
    # an open connection to the Chroma server would be reported, and fail the test
    gc.collect()
