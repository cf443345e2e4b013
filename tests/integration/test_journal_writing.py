"""The journal has one writer at a time; Redis itself refuses the late one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support.proxy import Proxy
from support.waiting import eventually

from shared.bus import Bus, order
from shared.bus.keys import journal_key
from shared.errors import Fenced, TransientError
from shared.records.journal import (
    LARGE_RESULT,
    Crossing,
    EntryType,
    JournalEnded,
    JournalWriter,
    append_after,
    closing,
    read_journal,
    read_result,
)

KEY = journal_key("1-1", "A")
SAID = Crossing("critique.result", "9-0")


async def claim(bus: Bus, owner: str, *, fresh: bool = False) -> tuple[JournalWriter, list[Any]]:
    return await JournalWriter.claim(bus, KEY, {"owner": owner}, 60, fresh=fresh)


def answers(entries: list[Any]) -> list[Any]:
    return [entry.value()["text"] for entry in entries if entry.type is EntryType.ANSWER]


async def test_ids_are_explicit_and_strictly_increasing(bus: Bus) -> None:
    writer, before = await claim(bus, "r1", fresh=True)
    assert before == []
    for n in range(12):
        assert await writer.append(EntryType.ANSWER, {"text": n}) == f"1-{n + 2}" == writer.position
    await writer.append_all([(EntryType.THINKING, {"text": n}) for n in range(3)])
    ids = [entry.id for entry in await read_journal(bus, KEY)]
    assert ids == [f"1-{n}" for n in range(1, 17)]


async def test_a_second_claim_sees_what_was_written_and_shuts_the_first_out(bus: Bus) -> None:
    first, _ = await claim(bus, "r1", fresh=True)
    await first.append(EntryType.ANSWER, {"text": "one"})
    second, before = await claim(bus, "r2")
    assert [entry.type for entry in before] == [EntryType.CLAIMED, EntryType.ANSWER]
    with pytest.raises(Fenced):
        await first.append(EntryType.ANSWER, {"text": "zombie"})
    with pytest.raises(Fenced):
        await first.append_all([(EntryType.ANSWER, {"text": "zombie"}), (EntryType.COMPLETED, {})])
    await second.append(EntryType.ANSWER, {"text": "two"})
    assert answers(await read_journal(bus, KEY)) == ["one", "two"]


async def test_a_new_owner_finds_the_tokens_of_calls_and_no_client_does(bus: Bus) -> None:
    first, _ = await claim(bus, "r1", fresh=True)
    await first.append_all([(EntryType.TOOL_REQUEST, {"call_id": n}) for n in range(2)], ["one", "two"])
    _, before = await claim(bus, "r2")
    assert [entry.token for entry in before] == ["", "one", "two"]
    assert [entry.value() for entry in before[1:]] == [{"call_id": 0}, {"call_id": 1}]


async def test_a_message_that_is_named_already_is_named_once_by_a_new_owner(bus: Bus) -> None:
    asked, answered = Crossing("tool.request.probe", "7-1"), Crossing("tool.result.probe", "8-1")
    first, _ = await claim(bus, "r1", fresh=True)
    first.note(*asked)
    await first.append(EntryType.STATE, {"from": "A", "to": "B"})
    second, _ = await claim(bus, "r2")
    assert second.crossed == [asked]
    second.note(*asked)
    second.note(*answered)
    assert second.crossed == [asked, answered]
    await second.append(EntryType.STATE, {"from": "B", "to": "C"})
    assert [one for entry in await read_journal(bus, KEY) for one in entry.crossings()] == [asked, answered]


@pytest.mark.parametrize("taken_over", [False, True])
async def test_a_large_result_is_kept_in_its_own_entry_and_read_there(taken_over: bool, bus: Bus) -> None:
    writer, _ = await claim(bus, "r1", fresh=True)
    large = {"call_id": "large", "result": "x" * LARGE_RESULT}
    place = await writer.append(EntryType.TOOL_RESULT, large)
    await writer.append(EntryType.TOOL_RESULT, {"call_id": "small", "result": "y" * 100})
    if taken_over:
        writer, _ = await claim(bus, "r2")
    assert writer.large == {"large": place}
    await writer.append(EntryType.COMPLETED, {"answer": "so"})
    end = (await read_journal(bus, KEY))[-1]
    assert len(end.told) < 200
    (shown,) = [entries async for entries in read_result(bus, KEY)]
    assert [(entry.id, entry.value()) for entry in shown] == [(place, large), (end.id, {"answer": "so"})]


async def test_a_large_result_that_is_not_there_any_more_hides_nothing_else(bus: Bus, raw: redis.Redis) -> None:
    writer, _ = await claim(bus, "r1", fresh=True)
    place = await writer.append(EntryType.TOOL_RESULT, {"call_id": "large", "result": "x" * LARGE_RESULT})
    await writer.append(EntryType.COMPLETED, {"answer": "so"})
    (end,) = raw.xrevrange(KEY, count=1)
    raw.xdel(KEY, place)
    (shown,) = [entries async for entries in read_result(bus, KEY)]
    assert [(entry.id, entry.value()) for entry in shown] == [(place, {}), (end[0].decode(), {"answer": "so"})]
    # whatever somebody writes there
    told = b'[["no id","tool.result",1,null]]'
    raw.xadd(KEY, {"type": "completed", "time": 1, "data": b'{"answer":"other"}', "told": told})
    (shown,) = [entries async for entries in read_result(bus, KEY)]
    assert [entry.value() for entry in shown] == [{}, {"answer": "other"}]


async def test_a_fresh_claim_on_a_journal_that_is_there_continues_it(bus: Bus) -> None:
    first, _ = await claim(bus, "r1", fresh=True)
    await first.append(EntryType.ANSWER, {"text": "one"})
    second, before = await claim(bus, "r2", fresh=True)
    assert answers(before) == ["one"]
    assert order(second.position) > order(first.position)


@pytest.mark.parametrize("existing", [False, True])
async def test_of_racing_claims_exactly_one_wins(existing: bool, redis_url: str, bus: Bus) -> None:
    for _ in range(20):
        await bus.link.call("DEL", KEY)
        if existing:
            await claim(bus, "r0", fresh=True)
        async with asyncio.TaskGroup() as group:
            racing = [group.create_task(attempt(bus, f"r{n}")) for n in range(1, 9)]
        winners = [task.result() for task in racing if task.result() is not None]
        assert len(winners) >= 1
        # whoever claimed last owns it; nobody else can write
        written = 0
        for writer in winners:
            try:
                await writer.append(EntryType.ANSWER, {"text": "x"})
                written += 1
            except Fenced:
                pass
        assert written == 1
        claims = [e.id for e in await read_journal(bus, KEY) if e.type is EntryType.CLAIMED]
        assert len({order(i)[0] for i in claims}) == len(claims), "two owners of one epoch"


async def test_claims_of_one_replica_at_the_same_moment_are_told_apart(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.records.journal.now_ms", lambda: 5)
    racing = await asyncio.gather(*(attempt(bus, "r1") for _ in range(8)))
    winners = [writer for writer in racing if writer is not None]
    epochs = [writer.position for writer in winners]
    assert len(set(epochs)) == len(epochs)


async def attempt(bus: Bus, owner: str) -> JournalWriter | None:
    try:
        return (await claim(bus, owner))[0]
    except Fenced:
        return None


async def test_a_write_repeated_after_a_lost_reply_is_recognised_as_our_own(redis_url: str, bus: Bus) -> None:
    async with Proxy(redis_url) as proxy, Bus(proxy.url, "test/far", timeout=0.2) as far:
        writer, _ = await claim(far, "r1", fresh=True)
        for n in range(5):
            proxy.drop_every = 1
            writing = asyncio.create_task(writer.append(EntryType.ANSWER, {"text": n}))
            await eventually(lambda: proxy.dropped > 0)
            proxy.drop_every = proxy.dropped = 0
            await writing
        proxy.drop_every = 1
        several = asyncio.create_task(writer.append_all([(EntryType.ANSWER, {"text": n}) for n in range(5, 9)]))
        await eventually(lambda: proxy.dropped > 0)
        proxy.drop_every = 0
        await several
        assert answers(await read_journal(bus, KEY)) == list(range(9))


async def test_a_claim_repeated_after_a_lost_reply_is_made_once(redis_url: str, bus: Bus) -> None:
    async with Proxy(redis_url) as proxy, Bus(proxy.url, "test/far", timeout=0.2) as far:
        await far.link.call("PING")
        proxy.drop_every = 1
        claiming = asyncio.create_task(claim(far, "r1", fresh=True))
        await eventually(lambda: proxy.dropped > 0)
        proxy.drop_every = 0
        writer, before = await claiming
        assert before == []
        await writer.append(EntryType.ANSWER, {"text": "x"})
        assert [entry.id for entry in await read_journal(bus, KEY)] == ["1-1", "1-2"]


async def test_an_expired_journal_is_not_made_again_by_its_writer(bus: Bus, raw: redis.Redis) -> None:
    writer, _ = await claim(bus, "r1", fresh=True)
    raw.delete(KEY)
    with pytest.raises(Fenced):
        await writer.append(EntryType.ANSWER, {"text": "x"})
    assert await append_after(bus, KEY, EntryType.CRITIQUE, {"score": 5}, message=SAID, once="critique") is None
    assert not raw.exists(KEY)


async def test_an_abandoned_journal_expires_and_a_completed_one_as_told(bus: Bus, raw: redis.Redis) -> None:
    writer, _ = await claim(bus, "r1", fresh=True)
    assert 50 < raw.ttl(KEY) <= 60
    await writer.append(EntryType.COMPLETED, {})
    await bus.link.call(*closing(KEY, 1000))
    assert 900 < raw.ttl(KEY) <= 1000


async def test_who_appends_early_waits_and_does_not_shut_the_writer_out(bus: Bus) -> None:
    writer, _ = await claim(bus, "r1", fresh=True)
    assert await append_after(bus, KEY, EntryType.CRITIQUE, {"score": 5}, message=SAID, once="c", patience=0.1) is None
    early = asyncio.create_task(append_after(bus, KEY, EntryType.CRITIQUE, {"score": 5}, message=SAID, once="c"))
    await asyncio.sleep(0.05)
    await writer.append(EntryType.ANSWER, {"text": "x"})
    await writer.append(EntryType.COMPLETED, {})
    assert await early is not None
    kinds = [entry.type for entry in await read_journal(bus, KEY)]
    assert kinds[-2:] == [EntryType.COMPLETED, EntryType.CRITIQUE]


async def test_what_others_append_after_completion_comes_behind_and_nobody_claims_it_again(bus: Bus) -> None:
    writer, _ = await claim(bus, "r1", fresh=True)
    await writer.append(EntryType.COMPLETED, {})
    added = await append_after(bus, KEY, EntryType.CRITIQUE, {"score": 5}, message=SAID, once="critique")
    assert await append_after(bus, KEY, EntryType.CRITIQUE, {"score": 5}, message=SAID, once="critique") == added
    await append_after(bus, KEY, EntryType.REWARD, {"reward": 1}, message=SAID, once="reward")
    entries = await read_journal(bus, KEY)
    assert [e.type for e in entries] == [
        EntryType.CLAIMED,
        EntryType.COMPLETED,
        EntryType.CRITIQUE,
        EntryType.REWARD,
    ]
    with pytest.raises(Fenced):
        await writer.append(EntryType.ANSWER, {"text": "late"})
    for fresh in (False, True):
        with pytest.raises(JournalEnded):
            await claim(bus, "r2", fresh=fresh)
    assert await read_journal(bus, KEY) == entries


async def test_a_redis_without_memory_is_no_reason_to_think_that_somebody_else_writes(
    bus: Bus, raw: redis.Redis
) -> None:
    writer, _ = await claim(bus, "r1", fresh=True)
    raw.config_set("maxmemory", 1)
    try:
        with pytest.raises(TransientError):
            await writer.append(EntryType.ANSWER, {"text": "x"})
    finally:
        raw.config_set("maxmemory", 0)


@hypothesis_settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["claim", "write"])), max_size=25))
def test_whoever_claimed_last_is_the_only_one_who_writes(steps: list[tuple[int, str]], redis_url: str) -> None:
    async def play() -> None:
        async with Bus(redis_url, "test/1") as bus:
            await bus.link.call("DEL", KEY)
            writers: dict[int, JournalWriter] = {}
            owner, expected = None, []
            for n, (who, what) in enumerate(steps):
                if what == "claim":
                    writers[who], before = await claim(bus, f"r{who}", fresh=n % 2 == 0)
                    assert answers(before) == expected
                    owner = who
                elif who in writers:
                    if who == owner:
                        await writers[who].append(EntryType.ANSWER, {"text": n})
                        expected.append(n)
                    else:
                        with pytest.raises(Fenced):
                            await writers[who].append(EntryType.ANSWER, {"text": n})
            assert answers(await read_journal(bus, KEY)) == expected

    asyncio.run(play())
