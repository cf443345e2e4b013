"""Participants killed at every step, with a second replica running: the query completes, once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis
from support.entries import event_of
from support.redis_servers import unsynced
from support.stack import Client, Participant, Participants, order, shown
from support.waiting import eventually

from services.cli.launch.embedded_redis import EmbeddedRedis
from services.gateway.http.bus_state import read_bus
from shared.bus import Bus
from shared.bus.keys import journal_key
from shared.contracts import ANSWER_DIALOG, QUERY_RECEIVED, RESPONSE_GENERATION, TOOL_REQUEST, TOOL_RESULT
from shared.records.journal import EntryType, JournalEntry
from shared.testing.model_server import Rules, ScriptedModelServer

pytestmark = pytest.mark.slow

ANSWER = "The probe has answered and all is well."


def asking(**args: Any) -> dict[str, Any]:
    """The model looks first, and says so."""
    call = {"name": "probe", "args": {"text": "<<query>>", **args}, "id": "call_1"}
    return {
        "when": {"tool_results": 0},
        "respond": {"thinking": "I should look. ", "text": "One moment. ", "tool_calls": [call]},
    }


def stalling(after: int, times: int = 1) -> dict[str, Any]:
    """The answer stands still after so many words (six of thinking first), and is complete when asked for again."""
    fault = {"kind": "stall", "after": after}
    return {
        "name": "stalling",
        "times": times,
        "when": {"tool_results": 1},
        "respond": {"thinking": "Now I know what to say. ", "text": ANSWER, "pace": 0.01, "fault": fault},
    }


ANSWERING = {"respond": {"thinking": "Now I know what to say. ", "text": ANSWER}}


class Scene(Client):
    """Two generators, two tool workers, all processes; and the scripted model in this one."""

    def __init__(self, bus: Bus, server: ScriptedModelServer, processes: Participants) -> None:
        super().__init__(bus)
        self.server = server
        self.processes = processes

    async def owner(self, query_id: str) -> Participant:
        """The generator that works on the query."""
        return await self.processes.owner(await self.seen(query_id, EntryType.CLAIMED))

    async def spoken(self, chunks: int, answers: int = 2) -> None:
        """Returns when the model has sent so many chunks of its second answer (or another one)."""
        requests = self.server.requests
        await eventually(lambda: len(requests) >= answers and requests[answers - 1].chunks >= chunks)

    async def consistent(self, query_id: str, session: str, effects: int = 1) -> list[JournalEntry]:
        """Completes the query and checks everything that was promised of it; returns its journal."""
        assert await self.answer(query_id) == ANSWER
        await self.idle()
        journal = await self.journal(query_id)
        assert shown(journal) == ANSWER
        assert [order(e.id) for e in journal] == sorted({order(e.id) for e in journal})
        ends = [e.type for e in journal if e.type.value in ("completed", "failed", "cancelled")]
        assert ends == [EntryType.COMPLETED]
        assert journal[-1].type is EntryType.COMPLETED
        assert [(t.query_id, t.answer) for t in await self.turns(session)] == [(query_id, ANSWER)]
        (generation,) = await self.published(RESPONSE_GENERATION, query_id)
        assert generation.answer == ANSWER
        assert len(await self.published(ANSWER_DIALOG, query_id)) == 1
        for kind in (EntryType.TOOL_REQUEST, EntryType.TOOL_RESULT):
            ids = [e.value()["call_id"] for e in journal if e.type is kind]
            assert ids == [f"{query_id}:A:0:0"]
        logged = await self.logged(query_id)
        assert logged.count("tool.result.probe") == 1
        assert {"agent.transition", "response.generation", "answer.dialog"} <= set(logged)
        assert await self.effects() == {"look": effects}
        assert await self.bus.range("local2:dead.letter") == []
        groups = (await read_bus(self.bus)).groups
        queries = [(g.group, g.pending, g.lag) for g in groups if g.stream == QUERY_RECEIVED.stream]
        assert queries == [("generator", 0, 0)]
        return journal


@contextlib.asynccontextmanager
async def scene(
    url: str, folder: Path, rules: Rules, *, generators: int = 2, probes: int = 1, **values: Any
) -> AsyncIterator[Scene]:
    async with ScriptedModelServer(rules) as server, Bus(url, "test/client") as bus:
        with Participants(url, server.url, folder, **values) as processes:
            for name, count in (("probe", probes), ("generator", generators)):
                for _ in range(count):
                    processes.start(name)
            if probes:
                await processes.ready("probe", probes)
            await processes.ready("generator", generators)
            yield Scene(bus, server, processes)


async def test_killed_before_the_first_delta(redis_url: str, tmp_path: Path) -> None:
    first = asking()
    first["respond"] = {**first["respond"], "fault": {"kind": "stall", "after": 0}}
    async with scene(redis_url, tmp_path, [{**first, "times": 1}, asking(), ANSWERING]) as on:
        query_id = await on.ask("look", "s1")
        await on.server.wait_until(lambda server: server.streaming == 1)
        (await on.owner(query_id)).kill()
        journal = await on.consistent(query_id, "s1")
    claims = [e.value()["replica"] for e in journal if e.type is EntryType.CLAIMED]
    assert len(set(claims)) == 2
    # there was no text to discard
    assert EntryType.RESTARTED not in [e.type for e in journal]


async def test_killed_in_the_middle_of_the_answer(redis_url: str, tmp_path: Path) -> None:
    async with scene(redis_url, tmp_path, [asking(), stalling(10), ANSWERING]) as on:
        query_id = await on.ask("look", "s1")
        owner = await on.owner(query_id)
        await on.spoken(10)

        async def partial() -> bool:
            return shown(await on.journal(query_id)).startswith("The probe")

        await eventually(partial)
        owner.kill()
        journal = await on.consistent(query_id, "s1")
        # the call that was finished is not made again
        assert [r.rule for r in on.server.requests] == ["", "stalling", ""]
    (restarted,) = [e for e in journal if e.type is EntryType.RESTARTED]
    assert restarted.value()["step"] == 1
    thoughts = shown(journal, EntryType.THINKING)
    assert thoughts == "I should look. Now I know what to say. "


async def test_killed_after_a_tool_request(redis_url: str, tmp_path: Path) -> None:
    async with scene(redis_url, tmp_path, [asking(seconds=1.5), ANSWERING]) as on:
        query_id = await on.ask("look", "s1")
        owner = await on.owner(query_id)

        async def runs() -> bool:
            return bool(await on.effects())

        await eventually(runs)
        owner.kill()
        journal = await on.consistent(query_id, "s1")
        assert len(await on.published(TOOL_RESULT.for_tool("probe"))) == 1
    results = [e.value()["result"] for e in journal if e.type is EntryType.TOOL_RESULT]
    assert results == ["you said look"]


async def test_killed_while_the_tool_answers_into_the_void(redis_url: str, tmp_path: Path) -> None:
    """The tool ends while nobody owns the query: its stored result is used."""
    async with scene(redis_url, tmp_path, [asking(seconds=0.2), ANSWERING]) as on:
        query_id = await on.ask("look", "s1")
        owner = await on.owner(query_id)

        async def runs() -> bool:
            return bool(await on.effects())

        await eventually(runs, every=0.002)
        owner.kill()
        await on.consistent(query_id, "s1")


async def test_killed_after_a_tool_result(redis_url: str, tmp_path: Path) -> None:
    async with scene(redis_url, tmp_path, [asking(), stalling(0), ANSWERING]) as on:
        query_id = await on.ask("look", "s1")
        owner = await on.owner(query_id)
        await on.seen(query_id, EntryType.TOOL_RESULT)
        # the owner, not its successor, has come to the model that stands still
        await on.spoken(0)
        owner.kill()
        await on.consistent(query_id, "s1")


@pytest.mark.parametrize("published", [False, True], ids=["before it published", "after it published"])
async def test_killed_while_publishing(redis_server: EmbeddedRedis, tmp_path: Path, published: bool) -> None:
    """Redis lets the owner come to PUBLISHING; what it may do then is decided by what the user of Redis may write."""
    blocked = "local2:answer.dialog" if published else "local2:response.generation"
    others = [f"~{blocked[:n]}[^{letter}]*" for n, letter in enumerate(blocked)]
    async with scene(redis_server.url, tmp_path / "logs", [asking(), ANSWERING], generators=1) as on:
        await on.bus.link.call("ACL", "SETUSER", "default", "resetkeys", *others)
        query_id = await on.ask("look", "s1")
        await on.seen(query_id, EntryType.STATE, action="PUBLISH")

        async def stuck() -> bool:
            return "bus.try_again" in "".join(p.log() for p in on.processes.started)

        await eventually(stuck, what="the owner is refused")
        (owner,) = on.processes.alive("generator")
        owner.kill()
        await on.bus.link.call("ACL", "SETUSER", "default", "allkeys")
        assert len(await on.published(RESPONSE_GENERATION)) == published
        assert "completed" not in await on.types(query_id)
        on.processes.start("generator")
        await on.consistent(query_id, "s1")
        assert len(on.server.requests) == 2


async def test_killed_between_the_end_and_its_acknowledgement(redis_server: EmbeddedRedis, tmp_path: Path) -> None:
    async with scene(redis_server.url, tmp_path / "logs", [asking(), ANSWERING], generators=1) as on:
        # the tool's may be acknowledged
        await on.bus.link.call("ACL", "SETUSER", "default", "-xack", f"(+xack ~{TOOL_REQUEST.stream}.*)")
        query_id = await on.ask("look", "s1")
        assert await on.answer(query_id) == ANSWER
        before = await on.journal(query_id)
        (owner,) = on.processes.alive("generator")
        owner.kill()
        groups = (await read_bus(on.bus)).groups
        assert [group.pending for group in groups if group.stream == QUERY_RECEIVED.stream] == [1]
        await on.bus.link.call("ACL", "SETUSER", "default", "clearselectors", "+xack")
        on.processes.start("generator")
        await on.idle()
        assert await on.journal(query_id) == before
        assert len(await on.published(RESPONSE_GENERATION)) == 1
        assert len(await on.turns("s1")) == 1
        assert len(on.server.requests) == 2
        assert await on.effects() == {"look": 1}


async def test_killed_at_a_random_moment_again_and_again(redis_url: str, tmp_path: Path) -> None:
    """Whatever the moment: five owners die one after the other, each a little later in the query than the last."""
    async with scene(redis_url, tmp_path, [asking(seconds=0.2), ANSWERING], max_deliveries=10) as on:
        query_id = await on.ask("look", "s1")
        for number in range(4):
            claims = number + 1

            async def claimed(wanted: int = claims) -> bool:
                return (await on.types(query_id)).count("claimed") >= wanted or bool(await on.turns("s1"))

            await eventually(claimed)
            if await on.turns("s1"):
                break
            await asyncio.sleep(0.004 * number)
            last = [e for e in await on.journal(query_id) if e.type is EntryType.CLAIMED][-1]
            owner = await on.processes.owner(last)
            if owner.alive:
                owner.kill()
                on.processes.start("generator")
        await on.consistent(query_id, "s1")


# ── zombies ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_generator_that_was_stopped_past_its_claim_writes_nothing_more(redis_url: str, tmp_path: Path) -> None:
    slow = {"times": 1, **ANSWERING, "respond": {**ANSWERING["respond"], "pace": 0.15}}
    async with scene(redis_url, tmp_path, [asking(), slow, ANSWERING]) as on:
        query_id = await on.ask("look", "s1")
        zombie = await on.owner(query_id)
        await on.seen(query_id, EntryType.TOOL_RESULT)
        await on.spoken(4)
        zombie.send(signal.SIGSTOP)
        try:
            journal = await on.consistent(query_id, "s1")
        finally:
            zombie.send(signal.SIGCONT)

        async def noticed() -> bool:
            return "bus.claim_lost" in zombie.log()

        await eventually(noticed)
        await asyncio.sleep(0.5)
        assert await on.journal(query_id) == journal
        assert zombie.alive
        await on.consistent(query_id, "s1")
        # and it works on
        (other,) = [one for one in on.processes.alive("generator") if one is not zombie]
        other.kill()
        next_id = await on.ask("more", "s2", messages=[], tools=[])
        assert await on.answer(next_id)
        assert await on.owner(next_id) is zombie


# ── tool workers ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_tool_worker_killed_in_the_middle_of_a_call(redis_url: str, tmp_path: Path) -> None:
    async with scene(redis_url, tmp_path, [asking(seconds=1.0), ANSWERING], generators=1, probes=2) as on:
        query_id = await on.ask("look", "s1")

        async def holder() -> str | None:
            rows = await on.bus.link.call("XPENDING", "local2:tool.request.probe", "probe", "-", "+", 1)
            return rows[0][1].decode() if rows and await on.effects() else None

        name = await eventually(holder)
        os.kill(int(str(name).rsplit("-", 2)[1]), signal.SIGKILL)
        # it had begun, so the run counts; the call is answered once
        await on.consistent(query_id, "s1", effects=2)
        assert len(await on.published(TOOL_RESULT.for_tool("probe"))) == 1


# ── Redis ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_redis_killed_in_the_middle_of_the_answer(tmp_path: Path) -> None:
    with unsynced(tmp_path / "redis") as server:
        paced = {"times": 1, "when": {"tool_results": 1}, "respond": {"text": ANSWER, "pace": 0.15}}
        async with scene(server.url, tmp_path / "logs", [asking(), paced, ANSWERING], generators=1) as on:
            query_id, waiting = await on.ask("look", "s1"), await on.ask("later", "s1")

            async def partial() -> bool:
                return bool(shown(await on.journal(query_id)))

            await eventually(partial)
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(0.3)
            await asyncio.to_thread(server.start)
            assert await on.answer(query_id) == ANSWER
            assert shown(await on.journal(query_id)) == ANSWER
            assert await on.answer(waiting) == ANSWER
            await on.idle()
            assert [t.query for t in await on.turns("s1")] == ["look", "later"]
            assert len(await on.published(RESPONSE_GENERATION)) == 2
            assert await on.effects() == {"look": 1, "later": 1}
            assert all(one.alive for one in on.processes.started)
            assert await on.answer(await on.ask("look again", "s2")) == ANSWER


# ── cancelling ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_cancel_after_the_owner_was_killed(redis_url: str, tmp_path: Path) -> None:
    async with scene(redis_url, tmp_path, [asking(), stalling(10, times=9)]) as on:
        query_id = await on.ask("look", "s1")
        owner = await on.owner(query_id)
        await on.spoken(10)

        async def partial() -> bool:
            return bool(shown(await on.journal(query_id)))

        await eventually(partial)
        owner.kill()
        await on.server.wait_until(lambda server: server.streaming == 0, timeout=1)
        await on.cancel(query_id)
        end = await on.ended(query_id)
        assert end.type is EntryType.CANCELLED
        assert len(on.server.requests) == 2
        assert end.value()["answer"] == shown(await on.journal(query_id))
        (turn,) = await on.turns("s1")
        assert turn.interrupted
        assert turn.answer == end.value()["answer"] != ""
        await on.idle()


async def test_a_cancel_of_a_query_that_the_second_owner_works_on(redis_url: str, tmp_path: Path) -> None:
    async with scene(redis_url, tmp_path, [asking(), stalling(10, times=9)]) as on:
        query_id = await on.ask("look", "s1")
        owner = await on.owner(query_id)
        await on.spoken(10)
        owner.kill()
        await on.server.wait_until(lambda server: len(server.requests) == 3 and server.streaming == 1, timeout=5)
        await on.cancel(query_id)
        await on.server.wait_until(lambda server: server.streaming == 0, timeout=1)
        assert (await on.ended(query_id, 1)).type is EntryType.CANCELLED


async def test_a_cancel_after_the_owner_was_killed_stops_its_tool(redis_url: str, tmp_path: Path) -> None:
    async with scene(redis_url, tmp_path, [asking(seconds=60)]) as on:
        query_id = await on.ask("look", "s1")
        owner = await on.owner(query_id)

        async def runs() -> bool:
            return bool(await on.effects())

        await eventually(runs)
        owner.kill()
        await on.cancel(query_id)

        async def stopped() -> bool:
            return bool(await on.bus.link.call("HGET", "ended", "look"))

        await eventually(stopped, 1.0)
        assert (await on.ended(query_id)).type is EntryType.CANCELLED
        await on.idle()
        assert await on.turns("s1") == []


async def test_a_stopped_process_leaves_no_consumer_with_work_behind(redis_url: str, tmp_path: Path) -> None:
    async with scene(redis_url, tmp_path, [asking(), stalling(3, times=1), ANSWERING], heartbeat=5.0) as on:
        query_id = await on.ask("look", "s1")
        owner = await on.owner(query_id)
        await on.spoken(3)
        owner.send(signal.SIGTERM)
        await eventually(lambda: not owner.alive)
        assert owner.process.returncode == 0
        # handed over: the other replica's next sweep takes it, long before the claim would time out
        await on.consistent(query_id, "s1")


def test_the_journal_of_a_dead_query_expires(redis_url: str) -> None:
    """A journal that nobody finishes goes away by itself: its time to live is set with its first entry."""

    async def claim() -> int:
        from shared.records.journal import JournalWriter

        async with Bus(redis_url, "test/1") as bus:
            await JournalWriter.claim(bus, journal_key("1-1", "A"), event_of("claimed", {}), 60)
            return int(await bus.link.call("TTL", journal_key("1-1", "A")))

    assert 0 < asyncio.run(claim()) <= 60
    with redis.Redis.from_url(redis_url) as client:
        assert client.xlen(journal_key("1-1", "A")) == 1
