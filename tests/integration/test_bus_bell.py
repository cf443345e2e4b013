"""Followers of journals get every entry once, in order, rung or not, and cost nothing that grows with their number."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
import redis
from support.entries import event_of
from support.proxy import Proxy
from support.waiting import eventually

from services.gateway.queries.sse import KEEP_ALIVE, Ending, journal_events
from shared.bus import START, Bus, Entry, Follower, JournalSubscriber, open_subscriber
from shared.bus.keys import journal_key
from shared.errors import Fenced
from shared.records.journal import (
    EntryType,
    JournalEntry,
    JournalWriter,
    append_after,
    pages,
    read_journal,
    read_result,
)

KEY = journal_key("1-1", "A")
# Longer than all rounds of looking that a lost ring may take, on a busy machine.
SOON = 10.0


async def claim(bus: Bus, key: str = KEY) -> JournalWriter:
    return (await JournalWriter.claim(bus, key, event_of("claimed", {}), 60))[0]


async def take(follower: Follower, last: str, delay: float = 0.0) -> list[Entry]:
    """What comes up to an id."""
    found: list[Entry] = []
    async with asyncio.timeout(30):
        while not found or found[-1][0] != last:
            found += await follower.next()
            await asyncio.sleep(delay)
    return found


async def collect(bell: JournalSubscriber, key: str, last: str, after: str = START) -> list[str]:
    follower = bell.follow(key, after)
    try:
        return [entry_id for entry_id, _ in await take(follower, last)]
    finally:
        follower.close()


async def listening(bell: JournalSubscriber, key: str) -> None:
    """Returns when a journal's rings come."""
    await eventually(lambda: bell.subscribed(key), what="the rings come")


def calls(raw: redis.Redis, command: str) -> int:
    return int(raw.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"])


# ── every entry once, in order ───────────────────────────────────────────────────────────────────────────────


async def test_an_entry_that_was_not_rung_is_found(bus: Bus) -> None:
    async with open_subscriber(bus) as bell:
        follower = bell.follow(KEY)
        waiting = asyncio.create_task(take(follower, "1-1"))
        await listening(bell, KEY)
        await bus.link.call("XADD", KEY, "1-1", "type", "answer", "time", 1, "data", "{}")
        assert len(await asyncio.wait_for(waiting, SOON)) == 1


async def test_what_comes_after_the_end_is_rung_too(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    # nothing but the ring can tell
    monkeypatch.setattr("shared.bus.subscriber.JournalSubscriber.pause", 3600)
    async with open_subscriber(bus) as bell:
        waiting = asyncio.create_task(collect(bell, KEY, "1-2"))
        await listening(bell, KEY)
        writer = await claim(bus)
        await writer.append(event_of(EntryType.COMPLETED, {"answer": "x"}))
        await waiting
        follower = bell.follow(KEY, "1-2")
        critique = asyncio.create_task(follower.next())
        await listening(bell, KEY)
        await append_after(bus, KEY, event_of(EntryType.CRITIQUE, {"score": 5}), once="critique")
        (entry,) = await asyncio.wait_for(critique, SOON)
        assert JournalEntry.parse(entry).type is EntryType.CRITIQUE


async def test_a_stream_ends_at_its_deadline_though_redis_went_away_over_a_read(redis_url: str) -> None:
    async def never() -> bool:
        return False

    async with Proxy(redis_url) as proxy, Bus(proxy.url, "test/far", timeout=0.3) as far, open_subscriber(far) as bell:
        await asyncio.wait_for(far.link.connected.wait(), SOON)
        proxy.freeze()
        ending = Ending(asyncio.get_running_loop().time() + 0.5, False, 1.0, answered=False)
        try:
            async with asyncio.timeout(2 * SOON):
                events = [event async for event in journal_events(bell.follow(KEY), ending, 0.1, never)]
        finally:
            proxy.thaw()
    assert set(events) == {KEEP_ALIVE}


# ── the stream is the truth ──────────────────────────────────────────────────────────────────────────────────


async def test_what_redis_refused_is_rung_to_nobody(bus: Bus, raw: redis.Redis) -> None:
    with raw.pubsub() as heard:
        heard.ssubscribe(KEY)
        first = await claim(bus)
        second = await claim(bus)
        with pytest.raises(Fenced):
            await first.append(event_of(EntryType.ANSWER, {"text": "zombie"}))
        raw.delete(KEY)
        with pytest.raises(Fenced):
            await second.append(event_of(EntryType.ANSWER, {"text": "expired"}))
        await append_after(bus, KEY, event_of(EntryType.CRITIQUE, {}), once="c", patience=0)
        raw.spublish(KEY, "end")
        messages: list[bytes] = []
        while not messages or messages[-1] != b"end":
            message = heard.get_sharded_message(timeout=SOON)
            assert message is not None
            if message["type"] == "smessage":
                messages.append(message["data"])
    assert [message.split(b" ")[:2] for message in messages] == [[b"1-1", b"claimed"], [b"2-1", b"claimed"], [b"end"]]


@pytest.mark.parametrize(
    "message", ["", "x", "1-", "9-9", "1-2 answer 1 {}", "99999999999999999-1 answer 1 {}", b"\xff \xff", "1-1"]
)
async def test_a_message_that_lies_changes_nothing(message: Any, bus: Bus, raw: redis.Redis) -> None:
    async with open_subscriber(bus) as bell:
        follower = bell.follow(KEY, "1-2")
        waiting = asyncio.create_task(take(follower, "1-4"))
        await listening(bell, KEY)
        for _ in range(3):
            raw.spublish(KEY, message)
        writer = await claim(bus)
        for n in range(3):
            await writer.append(event_of(EntryType.ANSWER, {"text": str(n)}))
        assert [entry_id for entry_id, _ in await waiting] == ["1-3", "1-4"]


@pytest.mark.parametrize("message", ["9-9", "9-9 answer 1 {}", "1_0-9 answer 1 {}", "99999999999999999-1 answer 1 {}"])
async def test_behind_a_message_that_lies_what_was_not_rung_is_found_too(
    message: str, bus: Bus, raw: redis.Redis
) -> None:
    async with open_subscriber(bus) as bell:
        follower = bell.follow(KEY)
        waiting = asyncio.create_task(take(follower, "1-1"))
        await listening(bell, KEY)
        raw.spublish(KEY, message)
        await asyncio.sleep(0.2)
        raw.xadd(KEY, {"type": "answer", "time": 1, "data": "{}"}, id="1-1")
        assert len(await asyncio.wait_for(waiting, SOON)) == 1


async def test_what_is_large_is_announced_and_read_from_the_stream(bus: Bus, raw: redis.Redis) -> None:
    text = "x" * 1_000_000
    with raw.pubsub() as heard:
        heard.ssubscribe(KEY)
        async with open_subscriber(bus) as bell:
            waiting = asyncio.create_task(take(bell.follow(KEY), "1-2"))
            await listening(bell, KEY)
            writer = await claim(bus)
            await writer.append(event_of(EntryType.TOOL_RESULT, {"result": text}))
            found = await waiting
        assert JournalEntry.parse(found[-1]).value() == {"result": text}
        seen: list[int] = []
        while len(seen) < 2:
            message = heard.get_sharded_message(timeout=SOON)
            assert message is not None
            seen += [len(message["data"])] if message["type"] == "smessage" else []
        assert seen[1] < 100


# ── what it costs ────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_event_costs_the_same_however_many_journals_are_followed(
    bus: Bus, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.bus.subscriber.JournalSubscriber.pause", 3600)
    keys = [journal_key(f"{n}-1", "A") for n in range(300)]
    async with open_subscriber(bus) as bell:
        tasks = [asyncio.create_task(collect(bell, key, "1-4")) for key in keys]
        for key in keys:
            await listening(bell, key)
        writers = [await claim(bus, key) for key in keys]
        await asyncio.sleep(0.1)
        connections, before = len(raw.client_list()), {name: calls(raw, name) for name in ("xread", "xrange", "xadd")}
        for writer in writers:
            for n in range(3):
                await writer.append(event_of(EntryType.ANSWER, {"text": str(n)}))
        await asyncio.wait_for(asyncio.gather(*tasks), 30)
        after = {name: calls(raw, name) for name in before}
        assert after == {**before, "xadd": before["xadd"] + 900}
        assert len(raw.client_list()) == connections


async def test_no_connection_is_opened_before_somebody_follows(bus: Bus, raw: redis.Redis) -> None:
    await bus.link.call("PING")

    def bells() -> int:
        return sum(client["name"].endswith(":journals") for client in raw.client_list())

    async with open_subscriber(bus) as bell:
        writer = await claim(bus)
        assert bells() == 0
        assert await collect(bell, KEY, writer.position) == ["1-1"]
        follower = bell.follow(KEY)
        await take(follower, "1-1")
        waiting = asyncio.create_task(follower.next())
        await listening(bell, KEY)
        assert bells() == 1
        waiting.cancel()
        follower.close()
        await eventually(lambda: not raw.execute_command("PUBSUB", "SHARDCHANNELS"), what="nobody listens any more")
    await eventually(lambda: bells() == 0)


async def test_a_slow_follower_keeps_few_bytes(bus: Bus) -> None:
    text = "x" * 7_000
    async with open_subscriber(bus) as bell:
        slow = bell.follow(KEY)
        writer = await claim(bus)
        await take(slow, "1-1")
        waiting = asyncio.create_task(slow.next())
        await listening(bell, KEY)
        fast = asyncio.create_task(collect(bell, KEY, "1-301"))
        for _ in range(300):
            await writer.append(event_of(EntryType.ANSWER, {"text": text}))
        await fast
        got = [entry_id for entry_id, _ in await waiting]
        while got[-1] != "1-301":
            page = await slow.next()
            assert sum(len(b"".join(fields)) for _, fields in page) < 600_000
            got += [entry_id for entry_id, _ in page]
        assert got == [f"1-{n}" for n in range(2, 302)]


# ── whatever a journal holds ─────────────────────────────────────────────────────────────────────────────────

ODD: list[dict[bytes, bytes]] = [
    {b"type": b"citation", b"time": b"1", b"data": b'{"url":"x"}'},
    {b"type": b"\xff", b"time": b"1", b"data": b"{}"},
    {b"odd": b"1"},
    {b"type": b"answer"},
    {b"type": b"answer", b"time": b"soon", b"data": b"no json"},
    {b"type": b"message", b"time": b"1", b"data": b"[1]"},
    {b"type": b"completed", b"time": b"1", b"data": b"null", b"told": b"[[1]]"},
]


@pytest.mark.parametrize("fields", ODD, ids=str)
async def test_an_entry_of_any_form_is_read(fields: dict[bytes, bytes], bus: Bus, raw: redis.Redis) -> None:
    await claim(bus)
    raw.xadd(KEY, fields, id="1-2")
    raw.xadd(KEY, {"type": "answer", "time": 1, "data": b'{"text":"x"}'}, id="1-3")
    entries = await read_journal(bus, KEY)
    assert [entry.id for entry in entries] == ["1-1", "1-2", "1-3"]
    assert all(isinstance(entry.value(), dict) for entry in entries)
    assert entries[-1].value()["text"] == "x"
    if fields[next(iter(fields))] != b"completed":
        # a newer release's journal is taken over by this one
        await claim(bus)


async def test_a_key_that_is_no_journal_is_read_as_none(bus: Bus, raw: redis.Redis) -> None:
    raw.set(KEY, "no stream")
    assert await read_journal(bus, KEY) == []
    assert [entry async for page in read_result(bus, KEY) for entry in page] == []
    other = journal_key("2-1", "A")
    async with open_subscriber(bus) as bell:
        tasks = [asyncio.create_task(collect(bell, key, "1-2")) for key in (KEY, other)]
        writer = await claim(bus, other)
        await writer.append(event_of(EntryType.ANSWER, {"text": "x"}))
        await asyncio.wait_for(tasks[1], SOON)
        raw.delete(KEY)
        writer = await claim(bus)
        await writer.append(event_of(EntryType.ANSWER, {"text": "x"}))
        await asyncio.wait_for(tasks[0], SOON)


# ── long journals ────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_completed_journal_tells_at_its_end_what_a_result_needs(bus: Bus, raw: redis.Redis) -> None:
    first = await claim(bus)
    await first.append(event_of(EntryType.STATE, {"from": "A", "to": "B"}))
    await first.append_all([event_of(EntryType.ANSWER, {"text": "x"})] * 3_000)
    # what an earlier owner wrote is told by the one that completes
    second = await claim(bus)
    await second.append(event_of(EntryType.NOTICE, {"code": "a", "message": "b"}))
    await second.append(event_of(EntryType.COMPLETED, {"answer": "x" * 3_000}))
    await append_after(bus, KEY, event_of(EntryType.CRITIQUE, {"score": 5}), once="critique")
    before = calls(raw, "xrange")
    told = [entry async for page in read_result(bus, KEY) for entry in page]
    assert calls(raw, "xrange") == before
    kinds = ["notice", "completed", "critique"]
    assert [(entry.id, entry.type) for entry in told] == [
        (entry.id, entry.type) for entry in await read_journal(bus, KEY) if entry.type in kinds
    ]
    assert [orjson.loads(entry.data) for entry in told[:1]] == [
        {"code": "a", "message": "b"},
    ]


async def test_what_has_taken_a_journals_place_has_no_pages(bus: Bus) -> None:
    await bus.link.call("SET", KEY, "in the way")
    assert [page async for page in pages(bus, KEY)] == []


async def test_a_journal_is_read_in_pages(bus: Bus) -> None:
    writer = await claim(bus)
    await writer.append_all([event_of(EntryType.ANSWER, {"text": "x"})] * 1_000)
    sizes = [len(page) async for page in pages(bus, KEY)]
    assert sum(sizes) == 1_001
    assert max(sizes) <= 256
    async with open_subscriber(bus) as bell:
        follower = bell.follow(KEY)
        got = 0
        while got < 1_001:
            page = await follower.next()
            assert len(page) <= 512
            got += len(page)


async def test_whoever_leaves_at_once_leaves_no_rings_behind(bus: Bus, raw: redis.Redis) -> None:
    async with open_subscriber(bus) as bell:
        staying = bell.follow(journal_key("1-1", "A"))
        bell.add(staying)
        await listening(bell, staying.stream)
        passing = bell.follow(journal_key("2-1", "A"))
        bell.add(passing)
        passing.close()
        last = bell.follow(journal_key("3-1", "A"))
        bell.add(last)
        await listening(bell, last.stream)
        there = {staying.stream.encode(), last.stream.encode()}
        await eventually(lambda: set(raw.execute_command("PUBSUB", "SHARDCHANNELS")) == there)
        assert (bell.subscribed(staying.stream), bell.subscribed(passing.stream)) == (True, False)
