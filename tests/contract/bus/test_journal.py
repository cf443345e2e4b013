"""The journal of a response: one writer, each entry once and in order, readers that resume by id, expiry."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import redis
from contract.bus.servers import Network, Server, network
from contract.bus.surface import (
    Bus,
    EntryType,
    Fenced,
    JournalEnded,
    JournalEntry,
    JournalWriter,
    TransientError,
    append_after,
    call,
    closing,
    follow_journals,
    journal_key,
    open_bus,
    read_journal,
    read_result,
)
from support.entries import event_of, whole
from support.waiting import eventually

KEY = journal_key("1-1", "A")
LIFE = 60


async def claim(bus: Bus, owner: str) -> tuple[JournalWriter, list[JournalEntry]]:
    return await JournalWriter.claim(bus, KEY, event_of("claimed", {"replica": owner}), LIFE)


async def claimed(bus: Bus, owner: str) -> JournalWriter | None:
    """A writer; None if another one claimed the journal at the same time."""
    try:
        return (await claim(bus, owner))[0]
    except Fenced:
        return None


async def answer(writer: JournalWriter, *texts: Any) -> None:
    await writer.append_all([event_of(EntryType.ANSWER, {"text": str(text)}) for text in texts])


def texts(entries: Sequence[JournalEntry]) -> list[str]:
    return [entry.value()["text"] for entry in entries if entry.type is EntryType.ANSWER]


@asynccontextmanager
async def far_bus(server: Server) -> AsyncIterator[tuple[Network, Bus]]:
    """A connected bus behind a network, and the network."""
    async with network(server) as net, open_bus(net, "test/far", timeout=0.2) as far:
        await call(far, "GET", KEY)
        yield net, far


# ── the writer ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_journal_ids_are_epoch_and_number_and_increase(bus: Bus) -> None:
    writer, _ = await claim(bus, "r1")
    await writer.append(event_of(EntryType.STATE, {"to": "A"}))
    await answer(writer, *range(10))
    writer, _ = await claim(bus, "r2")
    await writer.append(event_of(EntryType.STATE, {"to": "B"}))
    assert [entry.id for entry in await read_journal(bus, KEY)] == [f"1-{n}" for n in range(1, 13)] + ["2-1", "2-2"]


async def test_journal_writer_after_takeover_is_fenced(bus: Bus) -> None:
    first, _ = await claim(bus, "r1")
    await answer(first, "one")
    second, _ = await claim(bus, "r2")
    with pytest.raises(Fenced):
        await first.append(event_of(EntryType.ANSWER, {"text": "late"}))
    with pytest.raises(Fenced):
        await first.append_all([event_of(EntryType.ANSWER, {"text": "late"}), event_of(EntryType.COMPLETED, {})])
    await answer(second, "two")
    assert texts(await read_journal(bus, KEY)) == ["one", "two"]


async def test_journal_write_on_its_way_at_takeover_is_refused(server: Server, bus: Bus) -> None:
    async with far_bus(server) as (net, far):
        first, _ = await claim(far, "r1")
        net.freeze()
        late = asyncio.create_task(answer(first, "late"))
        second, _ = await claim(bus, "r2")
        net.thaw()
        with pytest.raises(Fenced):
            await late
        await answer(second, "two")
    assert texts(await read_journal(bus, KEY)) == ["two"]


@pytest.mark.parametrize("existing", [False, True], ids=["new", "existing"])
async def test_journal_racing_claims_leave_one_writer(existing: bool, bus: Bus, client: redis.Redis) -> None:
    for _ in range(20):
        client.delete(KEY)
        if existing:
            await claim(bus, "r0")
        racing = await asyncio.gather(*(claimed(bus, f"r{n}") for n in range(1, 9)))
        written = []
        for writer in racing:
            if writer is not None:
                with suppress(Fenced):
                    written.append(await writer.append(event_of(EntryType.ANSWER, {"text": "x"})))
        assert len(written) == 1
        epochs = [entry.id.partition("-")[0] for entry in await read_journal(bus, KEY) if entry.type == "claimed"]
        assert len(set(epochs)) == len(epochs)


@pytest.mark.parametrize("seed", range(4))
async def test_journal_any_takeovers_last_claim_alone_writes(seed: int, bus: Bus) -> None:
    rng, writers, owner, expected = random.Random(seed), dict[int, JournalWriter](), -1, list[int]()
    for number in range(60):
        who = rng.randrange(3)
        if rng.random() < 0.3 or not writers:
            writers[who], before = await claim(bus, f"r{who}")
            assert texts(before) == expected
            owner = who
        elif who == owner:
            await answer(writers[who], number)
            expected.append(str(number))
        elif who in writers:
            with pytest.raises(Fenced):
                await answer(writers[who], number)
    assert texts(await read_journal(bus, KEY)) == expected


async def test_journal_takeover_returns_recorded_steps_once(server: Server, bus: Bus) -> None:
    async with far_bus(server) as (net, far):
        first, before = await claim(far, "r1")
        assert before == []
        for step in range(3):
            request = {"call_id": f"c{step}", "tool": "probe", "args": {}, "step": step}
            await first.append_all([event_of(EntryType.TOOL_REQUEST, request)], [f"token {step}"])
            net.lose_next_reply()
            await first.append(event_of(EntryType.TOOL_RESULT, {"call_id": f"c{step}", "result": f"said {step}"}))
    _, before = await claim(bus, "r2")
    recorded = [(entry.value()["call_id"], entry.token) for entry in before if entry.type == "tool.request"]
    results = [entry.value()["result"] for entry in before if entry.type == "tool.result"]
    assert recorded == [(f"c{n}", f"token {n}") for n in range(3)]
    assert results == ["said 0", "said 1", "said 2"]


async def test_journal_entries_sent_twice_appear_once(server: Server, bus: Bus) -> None:
    async with far_bus(server) as (net, far):
        writer, _ = await claim(far, "r1")
        for number in range(4):
            net.lose_next_reply()
            await answer(writer, number)
        net.lose_next_reply()
        await answer(writer, *range(4, 9))
        assert net.dropped >= 5
    assert texts(await read_journal(bus, KEY)) == [str(number) for number in range(9)]


async def test_journal_claim_sent_twice_is_made_once(server: Server, bus: Bus) -> None:
    async with far_bus(server) as (net, far):
        net.lose_next_reply()
        writer = await JournalWriter.begin(far, KEY, event_of("claimed", {"replica": "r1"}), LIFE)
        assert writer is not None
        await answer(writer, "x")
        assert net.dropped >= 1
    assert [entry.id for entry in await read_journal(bus, KEY)] == ["1-1", "1-2"]


async def test_journal_start_writes_all_first_entries_or_none(bus: Bus, client: redis.Redis) -> None:
    first = [event_of(EntryType.STATE, {"to": state}) for state in "AB"]
    assert await JournalWriter.begin(bus, KEY, event_of("claimed", {"replica": "r1"}), LIFE, first) is not None
    assert await JournalWriter.begin(bus, KEY, event_of("claimed", {"replica": "r2"}), LIFE, first) is None
    assert [entry.id for entry in await read_journal(bus, KEY)] == ["1-1", "1-2", "1-3"]


async def test_journal_after_its_end_cannot_be_claimed(bus: Bus) -> None:
    writer, _ = await claim(bus, "r1")
    await writer.append(event_of(EntryType.COMPLETED, {}))
    with pytest.raises(JournalEnded):
        await claim(bus, "r2")
    assert [entry.type for entry in await read_journal(bus, KEY)] == ["claimed", "completed"]


async def test_journal_write_to_full_redis_is_not_fenced(bus: Bus, server: Server) -> None:
    writer, _ = await claim(bus, "r1")
    server.everywhere("CONFIG", "SET", "maxmemory", 1)
    try:
        with pytest.raises(TransientError):
            await writer.append(event_of(EntryType.ANSWER, {"text": "x"}))
    finally:
        server.everywhere("CONFIG", "SET", "maxmemory", 0)


async def test_journal_written_over_redis_restart_is_complete(own_server: Server) -> None:
    async with open_bus(own_server) as bus:
        writer, _ = await claim(bus, "r1")

        async def write() -> None:
            for number in range(400):
                await answer(writer, number)

        writing = asyncio.create_task(write())
        for part in (100, 200):
            await eventually(lambda part=part: int(writer.position.partition("-")[2]) > part)
            await asyncio.to_thread(own_server.kill)
            await asyncio.to_thread(own_server.start)
        await writing
        assert texts(await read_journal(bus, KEY)) == [str(number) for number in range(400)]


# ── behind the end ───────────────────────────────────────────────────────────────────────────────────────────


async def test_journal_late_entry_is_added_once_behind_the_end(bus: Bus) -> None:
    writer, _ = await claim(bus, "r1")
    await writer.append(event_of(EntryType.COMPLETED, {}))
    added = await append_after(bus, KEY, event_of(EntryType.CRITIQUE, {"score": 5}), once="critique")
    assert await append_after(bus, KEY, event_of(EntryType.CRITIQUE, {"score": 5}), once="critique") == added
    await append_after(bus, KEY, event_of(EntryType.REWARD, {"reward": 1}), once="reward")
    kinds = [entry.type for entry in await read_journal(bus, KEY)]
    assert kinds == ["claimed", "completed", "critique", "reward"]
    # nothing more of the writer comes behind it
    with pytest.raises(Fenced):
        await answer(writer, "late")


async def test_journal_late_entry_waits_for_the_end(bus: Bus) -> None:
    writer, _ = await claim(bus, "r1")
    early = append_after(bus, KEY, event_of(EntryType.CRITIQUE, {"score": 5}), once="critique")
    waiting = asyncio.create_task(early)
    for number in range(50):
        await answer(writer, number)
    assert not waiting.done()
    await writer.append(event_of(EntryType.COMPLETED, {}))
    assert await waiting is not None
    assert [entry.type for entry in await read_journal(bus, KEY)][-2:] == ["completed", "critique"]


# ── readers ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(3))
async def test_journal_readers_resume_by_id_without_loss(seed: int, bus: Bus) -> None:
    """Readers come at any time, leave and come back; some are slow. The journal changes its writer twice."""
    rng, written = random.Random(seed), list[str]()

    async def write() -> None:
        for owner in range(3):
            writer, _ = await claim(bus, f"r{owner}")
            written.append(writer.position)
            for number in range(60):
                written.append(await writer.append(event_of(EntryType.ANSWER, {"text": str(number)})))
                if rng.random() < 0.3:
                    await asyncio.sleep(rng.choice((0, 0.001, 0.005)))
        written.append(await writer.append(event_of(EntryType.COMPLETED, {})))

    async with follow_journals(bus) as journals, asyncio.timeout(60):

        async def read() -> list[str]:
            await asyncio.sleep(rng.random() * 0.3)
            got: list[str] = []
            kinds: list[bytes] = []
            while b"completed" not in kinds:
                follower = journals.follow(KEY, got[-1] if got else "0-0")
                for _ in range(rng.randrange(1, 20)):
                    found = await follower.next()
                    got += [entry_id for entry_id, _ in found]
                    kinds += [fields[1] for _, fields in found]
                    if b"completed" in kinds:
                        break
                    await asyncio.sleep(rng.choice((0, 0, 0.002, 0.02)))
                follower.close()
            return got

        readers = [asyncio.create_task(read()) for _ in range(12)]
        await write()
        assert [await reader for reader in readers] == [written] * 12


async def test_journal_two_hundred_readers_all_get_everything(bus: Bus) -> None:
    async with follow_journals(bus) as journals, asyncio.timeout(60):

        async def read() -> list[str]:
            follower = journals.follow(KEY)
            got: list[str] = []
            while not got or got[-1] != "1-101":
                got += [entry_id for entry_id, _ in await follower.next()]
            follower.close()
            return got

        readers = [asyncio.create_task(read()) for _ in range(200)]
        writer, _ = await claim(bus, "r1")
        for number in range(100):
            await answer(writer, number)
        assert await asyncio.gather(*readers) == [[f"1-{n}" for n in range(1, 102)]] * 200


async def test_journal_large_entry_reaches_its_followers(bus: Bus) -> None:
    text = "x" * 1_000_000
    async with follow_journals(bus) as journals, asyncio.timeout(60):
        follower = journals.follow(KEY)
        writer, _ = await claim(bus, "r1")
        assert [entry_id for entry_id, _ in await follower.next()] == ["1-1"]
        waiting = asyncio.create_task(follower.next())
        await writer.append(event_of(EntryType.TOOL_RESULT, {"call_id": "c", "result": text}))
        (entry,) = await waiting
        assert JournalEntry.parse(entry).value()["result"] == text
        follower.close()


async def test_journal_result_is_read_from_its_end(bus: Bus) -> None:
    writer, _ = await claim(bus, "r1")
    large = whole("tool.result", {"call_id": "large", "result": "y" * 100_000})
    await writer.append(event_of(EntryType.TOOL_RESULT, large))
    await answer(writer, *["x"] * 500)
    await writer.append(event_of(EntryType.NOTICE, {"code": "a", "message": "b"}))
    writer, _ = await claim(bus, "r2")
    await writer.append(event_of(EntryType.COMPLETED, {"answer": "so"}))
    found = [entry for page in [page async for page in read_result(bus, KEY)] for entry in page]
    assert [(entry.type, entry.value()) for entry in found] == [
        ("tool.result", large), ("notice", {"code": "a", "message": "b"}), ("completed", {"answer": "so"}),
    ]  # fmt: skip


async def test_journal_entry_of_unknown_type_is_passed_on(bus: Bus, client: redis.Redis) -> None:
    await claim(bus, "r1")
    client.xadd(KEY, {"type": "newer", "time": 1, "data": '{"a":1}', "more": "x"}, id="1-2")
    _, before = await claim(bus, "r2")
    assert [(entry.id, entry.type, entry.value()) for entry in before[1:]] == [("1-2", "newer", {"a": 1})]


# ── expiry ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_journal_expires_when_abandoned_or_completed(bus: Bus, client: redis.Redis) -> None:
    writer, _ = await claim(bus, "r1")
    await answer(writer, "x")
    assert LIFE - 20 < client.ttl(KEY) <= LIFE
    await writer.append(event_of(EntryType.COMPLETED, {}))
    await call(bus, *closing(KEY, 1_000))
    assert 900 < client.ttl(KEY) <= 1_000


async def test_journal_takeover_renews_the_time_to_live(bus: Bus, client: redis.Redis) -> None:
    await claim(bus, "r1")
    client.expire(KEY, 5)
    await claim(bus, "r2")
    assert client.ttl(KEY) > 5


async def test_journal_expired_is_not_made_again_by_writer(bus: Bus, client: redis.Redis) -> None:
    writer, _ = await claim(bus, "r1")
    client.delete(KEY)
    with pytest.raises(Fenced):
        await answer(writer, "x")
    assert await append_after(bus, KEY, event_of(EntryType.CRITIQUE, {}), once="c", patience=0) is None
    assert not client.exists(KEY)
