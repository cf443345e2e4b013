"""The journal has one writer at a time; Redis itself refuses the late one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
import redis
from support.entries import event_of, whole

from shared.bus import Bus, ReplyError, order
from shared.bus.keys import journal_key
from shared.contracts import QUERY_CANCEL, QUERY_RECEIVED, Outgoing, QueryCancel, Subject
from shared.envelope import Envelope, now_ms
from shared.errors import Fenced
from shared.records.events import Entry
from shared.records.journal import (
    LARGE_RESULT,
    EntryType,
    JournalEnded,
    JournalWriter,
    append_after,
    read_end,
    read_journal,
    read_result,
)
from shared.telemetry import metrics
from shared.telemetry.meter import Meter

KEY = journal_key("1-1", "A")


async def claim(bus: Bus, owner: str, *, fresh: bool = False) -> tuple[JournalWriter, list[Any]]:
    """fresh: as who expects nothing there."""
    if (
        fresh
        and (writer := await JournalWriter.begin(bus, KEY, event_of("claimed", {"replica": owner}), 60)) is not None
    ):
        return writer, []
    return await JournalWriter.claim(bus, KEY, event_of("claimed", {"replica": owner}), 60)


def answers(entries: list[Any]) -> list[Any]:
    return [entry.value()["text"] for entry in entries if entry.type is EntryType.ANSWER]


async def test_a_new_journal_begins_with_everything_or_nothing(bus: Bus, raw: redis.Redis) -> None:
    begins = [event_of(EntryType.STATE, whole("state", {"to": state})) for state in "AB"]
    said = QUERY_CANCEL.of(QueryCancel(query_id="1-1"))
    claimed = whole("claimed", {"replica": "r1"})
    writer = await JournalWriter.begin(bus, KEY, event_of("claimed", claimed), 60, begins, [said])
    assert writer is not None
    assert writer.position == "1-3"
    found = await read_journal(bus, KEY)
    assert [(entry.id, entry.type, entry.value()) for entry in found] == [
        ("1-1", "claimed", claimed), ("1-2", "state", whole("state", {"to": "A"})),
        ("1-3", "state", whole("state", {"to": "B"})),
    ]  # fmt: skip
    assert [part.id for part in writer.state.parts if isinstance(part, Entry)] == ["1-1", "1-2", "1-3"]
    assert 0 < raw.ttl(KEY) <= 60
    assert raw.xlen(QUERY_CANCEL.stream) == 1
    # somebody who expects nothing there finds the journal, and adds to it its claim alone
    assert await JournalWriter.begin(bus, KEY, event_of("claimed", {"replica": "r2"}), 60, begins) is None
    other, before = await JournalWriter.claim(bus, KEY, event_of("claimed", {"replica": "r2"}), 60)
    assert ([entry.id for entry in before], other.position) == (["1-1", "1-2", "1-3"], "2-1")
    assert [part.id for part in other.state.parts if isinstance(part, Entry)] == ["1-1", "1-2", "1-3", "2-1"]
    assert [entry.id for entry in await read_journal(bus, KEY)] == ["1-1", "1-2", "1-3", "2-1"]
    with pytest.raises(Fenced):
        await writer.append(event_of(EntryType.ANSWER, {"text": "late"}))


@pytest.mark.parametrize("taken_over", [False, True])
async def test_a_large_result_is_kept_in_its_own_entry_and_read_there(taken_over: bool, bus: Bus) -> None:
    writer, _ = await claim(bus, "r1", fresh=True)
    large = whole("tool.result", {"call_id": "large", "result": "x" * LARGE_RESULT})
    place = await writer.append(event_of(EntryType.TOOL_RESULT, large))
    await writer.append(event_of(EntryType.TOOL_RESULT, {"call_id": "small", "result": "y" * 100}))
    if taken_over:
        writer, _ = await claim(bus, "r2")
    assert writer.large == {"large": place}
    await writer.append(event_of(EntryType.COMPLETED, {"answer": "so"}))
    end = (await read_journal(bus, KEY))[-1]
    assert len(end.told) < 200
    (shown,) = [entries async for entries in read_result(bus, KEY)]
    assert [(entry.id, entry.value()) for entry in shown] == [(place, large), (end.id, {"answer": "so"})]


async def test_a_large_result_that_is_not_there_any_more_hides_nothing_else(bus: Bus, raw: redis.Redis) -> None:
    writer, _ = await claim(bus, "r1", fresh=True)
    place = await writer.append(event_of(EntryType.TOOL_RESULT, {"call_id": "large", "result": "x" * LARGE_RESULT}))
    await writer.append(event_of(EntryType.COMPLETED, {"answer": "so"}))
    (end,) = raw.xrevrange(KEY, count=1)
    raw.xdel(KEY, place)
    (shown,) = [entries async for entries in read_result(bus, KEY)]
    assert [(entry.id, entry.value()) for entry in shown] == [(place, {}), (end[0].decode(), {"answer": "so"})]
    # A list of earlier entries with a malformed id is not used: the whole journal is read.
    told = b'[["no id","tool.result",1,null]]'
    raw.xadd(KEY, {"type": "completed", "time": 1, "data": b'{"answer":"other"}', "told": told})
    (shown,) = [entries async for entries in read_result(bus, KEY)]
    assert [entry.value() for entry in shown] == [{"replica": "r1"}, {"answer": "so"}, {"answer": "other"}]


async def test_a_fresh_claim_on_a_journal_that_is_there_continues_it(bus: Bus) -> None:
    first, _ = await claim(bus, "r1", fresh=True)
    await first.append(event_of(EntryType.ANSWER, {"text": "one"}))
    second, before = await claim(bus, "r2", fresh=True)
    assert answers(before) == ["one"]
    assert order(second.position) > order(first.position)


async def test_journal_claims_of_one_replica_at_once_differ(bus: Bus) -> None:
    racing = await asyncio.gather(*(attempt(bus, "r1") for _ in range(8)))
    winners = [writer for writer in racing if writer is not None]
    epochs = [writer.position for writer in winners]
    assert len(set(epochs)) == len(epochs)


async def attempt(bus: Bus, owner: str) -> JournalWriter | None:
    try:
        return (await claim(bus, owner))[0]
    except Fenced:
        return None


def fields(raw: redis.Redis, key: str = KEY) -> list[tuple[str, dict[str, Any]]]:
    """A journal as it stands in Redis, with 5 for each time of this minute."""

    def value_of(name: str, value: str) -> str:
        recent = name == "time" and abs(now_ms() - int(value)) < 60_000
        return "5" if recent else re.sub(r'("notice",)\d{13},', r"\g<1>5,", value)

    return [
        (entry_id.decode(), {name.decode(): value_of(name.decode(), value.decode()) for name, value in words.items()})
        for entry_id, words in raw.xrange(key)
    ]


@pytest.fixture
def meter() -> Iterator[Meter]:
    yield metrics.start("probe")
    metrics.stop()


async def test_an_entry_is_written_with_its_fields_and_the_end_with_notices(
    bus: Bus, raw: redis.Redis, meter: Meter
) -> None:
    writer, _ = await claim(bus, "r1", fresh=True)
    assert (writer.position, writer.next_position) == ("1-1", "1-2")
    await writer.append(event_of(EntryType.ANSWER, {"text": "a"}))
    await writer.append(event_of(EntryType.STATE, {"to": "B"}))
    await writer.append(event_of(EntryType.NOTICE, {"code": "n"}))
    await writer.append_all([])
    await writer.append_all([event_of(EntryType.TOOL_REQUEST, {"step": number}) for number in (0, 1)], ["one", "two"])
    end = await writer.append(event_of(EntryType.COMPLETED, {"answer": "a"}))
    plain = {"time": "5", "data": '{"step":0}'}
    written = fields(raw)
    assert len(written[0][1].pop("claim")) == 32
    assert written == [
        ("1-1", {"type": "claimed", "time": "5", "data": '{"replica":"r1"}'}),
        ("1-2", {"type": "answer", "time": "5", "data": '{"text":"a"}'}),
        ("1-3", {"type": "state", "time": "5", "data": '{"to":"B"}'}),
        ("1-4", {"type": "notice", "time": "5", "data": '{"code":"n"}'}),
        ("1-5", {"type": "tool.request", **plain, "token": "one"}),
        ("1-6", {"type": "tool.request", **plain, "data": '{"step":1}', "token": "two"}),
        ("1-7", {"type": "completed", "time": "5", "data": '{"answer":"a"}',
                 "told": '[["1-4","notice",5,{"code":"n"}]]'}),
    ]  # fmt: skip
    assert end == writer.position == "1-7"
    assert (writer.state.last, writer.state.answer, [call.token for call in writer.state.calls]) == (
        "1-7", "a", ["one", "two"]
    )  # fmt: skip
    assert re.search(r'local2_journal\w*{type="tool.request"} 2', meter.text().decode())


@pytest.mark.parametrize("kind", [EntryType.FAILED, EntryType.CANCELLED])
async def test_an_end_that_is_no_answer_tells_of_nothing(kind: EntryType, bus: Bus, raw: redis.Redis) -> None:
    writer, _ = await claim(bus, "r1", fresh=True)
    await writer.append(event_of(EntryType.NOTICE, {"code": "n"}))
    await writer.append(event_of(kind, {}))
    assert set(fields(raw)[-1][1]) == {"type", "time", "data"}


def message(subject: Subject[Any] = QUERY_CANCEL, once: str | None = None) -> Outgoing:
    return Outgoing(Envelope(subject.name, b'{"query_id":"1-1"}'), once=once)


async def test_messages_are_published_with_the_entry_that_they_follow(bus: Bus, raw: redis.Redis) -> None:
    writer, _ = await claim(bus, "r1", fresh=True)
    also = [("SET", "one", "1"), ("SET", "two", "2")]
    place = await writer.append(
        event_of(EntryType.STATE, {"to": "B"}), also, messages=[message(), message(QUERY_RECEIVED)]
    )
    assert (place, raw.get("one"), raw.get("two")) == ("1-2", b"1", b"2")
    assert (raw.xlen(QUERY_CANCEL.stream), raw.xlen(QUERY_RECEIVED.stream)) == (1, 1)
    await writer.publish([message()], [("SET", "three", "3")])
    assert raw.get("three") == b"3"
    assert raw.xlen(QUERY_CANCEL.stream) == 2
    # what is published a second time is not there a second time
    for _ in range(2):
        await writer.publish([message(once="name")])
    assert raw.xlen(QUERY_CANCEL.stream) == 3


async def test_an_answer_is_finished_although_those_who_only_watch_see_nothing(bus: Bus, raw: redis.Redis) -> None:
    writer, _ = await claim(bus, "r1", fresh=True)
    raw.set(QUERY_CANCEL.stream, "no stream")
    await writer.publish([message(), message(QUERY_RECEIVED)], [("SET", "one", "1")])
    assert (raw.xlen(QUERY_RECEIVED.stream), raw.get("one")) == (1, b"1")
    # whoever works on it would never hear of it, and what is no message is refused for a reason
    raw.delete(QUERY_RECEIVED.stream)
    raw.set(QUERY_RECEIVED.stream, "no stream")
    with pytest.raises(ReplyError, match="WRONGTYPE"):
        await writer.publish([message(QUERY_RECEIVED)])
    with pytest.raises(ReplyError, match="WRONGTYPE"):
        await writer.publish([message()], [("INCR", KEY)])
    with pytest.raises(ReplyError, match="ERR"):
        await writer.publish([Outgoing(Envelope(QUERY_CANCEL.name, b"{}"))], [("NO", "such command")])


async def test_a_later_owner_goes_on_with_what_the_end_is_to_tell(bus: Bus, raw: redis.Redis) -> None:
    first, _ = await claim(bus, "r1", fresh=True)
    await first.append(event_of(EntryType.NOTICE, {"code": "n", "message": "m"}))
    await first.append(event_of(EntryType.ANSWER, {"text": "a"}))
    await first.append(event_of(EntryType.TOOL_RESULT, {"call_id": "small", "result": "r"}))
    later, before = await claim(bus, "r2")
    assert [entry.id for entry in before] == ["1-1", "1-2", "1-3", "1-4"]
    assert (later.position, later.large) == ("2-1", {})
    await later.append(event_of(EntryType.COMPLETED, {}))
    (notice,) = (await read_journal(bus, KEY))[-1].earlier() or []
    assert (notice.id, notice.type, notice.value()) == ("1-2", EntryType.NOTICE, {"code": "n", "message": "m"})
    assert 0 <= now_ms() - notice.time < 3_600_000


async def test_a_result_of_exactly_the_size_that_is_told_is_told(bus: Bus) -> None:
    writer, _ = await claim(bus, "r1", fresh=True)
    around = len(orjson.dumps({"call_id": "c", "result": ""}))
    for more, large in ((0, {}), (1, {"c": "1-3"})):
        await writer.append(
            event_of(EntryType.TOOL_RESULT, {"call_id": "c", "result": "x" * (LARGE_RESULT - around + more)})
        )
        assert writer.large == large


async def test_the_end_is_found_behind_whatever_came_later(bus: Bus, raw: redis.Redis) -> None:
    writer, _ = await claim(bus, "r1", fresh=True)
    for n in range(6):
        await writer.append(event_of(EntryType.ANSWER, {"text": str(n)}))
    # while it is written, a few of the newest are all there is to see
    assert [entry.id for entry in await read_end(bus, KEY)] == ["1-4", "1-5", "1-6", "1-7"]
    await writer.append(event_of(EntryType.FAILED, {}))
    assert [entry.id for entry in await read_end(bus, KEY)] == ["1-8"]
    later = [raw.xadd(KEY, {"type": "hologram" if n % 3 else "reward", "time": 1}).decode() for n in range(700)]
    assert [entry.id for entry in await read_end(bus, KEY)] == ["1-8", *later]
    with pytest.raises(JournalEnded):
        await claim(bus, "r2")


async def test_a_journal_of_what_nobody_knows_has_no_end_and_a_key_of_another_type_no_entries(
    bus: Bus, raw: redis.Redis
) -> None:
    assert await read_end(bus, KEY) == []
    ids = [raw.xadd(KEY, {"type": "hologram"}).decode() for _ in range(40)]
    assert [entry.id for entry in await read_end(bus, KEY)] == ids
    raw.delete(KEY)
    raw.set(KEY, "no stream")
    assert await read_end(bus, KEY) == await read_journal(bus, KEY) == []
    assert [page async for page in read_result(bus, KEY)] == []


@pytest.mark.parametrize("kind", [EntryType.FAILED, EntryType.CANCELLED, EntryType.ANSWER])
async def test_of_what_is_not_completed_everything_is_read_in_its_order(
    kind: EntryType, bus: Bus, raw: redis.Redis
) -> None:
    await claim(bus, "r1", fresh=True)
    for n in range(700):
        raw.xadd(KEY, {"type": "answer", "time": 1, "data": "{}"}, id=f"1-{n + 2}")
    raw.xadd(KEY, {"type": kind.value, "time": 1, "data": "{}"}, id="1-702")
    pages = [page async for page in read_result(bus, KEY)]
    assert [entry.id for page in pages for entry in page] == [f"1-{n}" for n in range(1, 703)]
    # nobody is kept waiting by a long one
    assert len(pages[0]) < 10
    assert max(map(len, pages)) <= 256


async def test_of_what_is_completed_the_end_tells_enough_and_else_everything_is_read(
    bus: Bus, raw: redis.Redis
) -> None:
    writer, _ = await claim(bus, "r1", fresh=True)
    await writer.append(event_of(EntryType.ANSWER, {"text": "a"}))
    await writer.append(event_of(EntryType.NOTICE, {"code": "n"}))
    await writer.append(event_of(EntryType.COMPLETED, {"answer": "a"}))
    late = await append_after(bus, KEY, event_of(EntryType.REWARD, {"reward": 1}), once="r")
    (shown,) = [page async for page in read_result(bus, KEY)]
    assert [entry.id for entry in shown] == ["1-3", "1-4", late]
    # one whose end tells nothing
    raw.delete(KEY)
    for n, kind in enumerate(("claimed", "answer", "completed")):
        raw.xadd(KEY, {"type": kind, "time": 1, "data": "{}"}, id=f"1-{n + 1}")
    assert [entry.id async for page in read_result(bus, KEY) for entry in page] == ["1-1", "1-2", "1-3"]


async def test_what_others_add_is_added_once(bus: Bus, raw: redis.Redis) -> None:
    for kind in ("failed", "cancelled", "completed"):
        raw.delete(KEY)
        raw.xadd(KEY, {"type": kind, "time": 1, "data": "{}"}, id="1-1")
        added = await append_after(bus, KEY, event_of(EntryType.CRITIQUE, {"score": 5}), once="c", patience=0.0)
        assert fields(raw)[1:] == [
            (added, {"once": "c", "type": "critique", "time": "5", "data": '{"score":5}'}),
        ]  # fmt: skip
    # however much came behind the end, it has ended
    pipe = raw.pipeline()
    for n in range(600):
        pipe.xadd(KEY, {"once": f"other {n}", "type": "reward", "time": "1", "data": "{}"})
    pipe.execute()
    last = await append_after(bus, KEY, event_of(EntryType.PAIRWISE, {}), once="p", patience=0.0)
    assert last == fields(raw)[-1][0]
    assert await append_after(bus, KEY, event_of(EntryType.PAIRWISE, {}), once="p", patience=0.0) == last
    assert raw.xlen(KEY) == 603


@pytest.mark.parametrize(("patience", "most"), [(1.0, 8), (0.0, 1)])
async def test_append_after_waits_for_the_end_with_growing_pauses(
    patience: float, most: int, bus: Bus, raw: redis.Redis
) -> None:
    raw.xadd(KEY, {"type": "answer", "time": 1, "data": "{}"}, id="1-1")
    loop = asyncio.get_running_loop()
    raw.config_resetstat()
    began = loop.time()
    assert await append_after(bus, KEY, event_of(EntryType.REWARD, {}), once="r", patience=patience) is None
    assert loop.time() - began >= patience
    assert raw.info("commandstats")["cmdstat_evalsha"]["calls"] <= most
    assert raw.xlen(KEY) == 1


async def test_whoever_follows_a_journal_is_rung_for_every_entry(bus: Bus, raw: redis.Redis) -> None:
    with raw.pubsub() as ringing:
        ringing.ssubscribe(KEY)
        assert ringing.get_message(timeout=10)
        writer, _ = await claim(bus, "r1", fresh=True)
        await writer.append(event_of(EntryType.COMPLETED, {"answer": "so"}))
        added = await append_after(bus, KEY, event_of(EntryType.REWARD, {"reward": 1}), once="r")
        heard = [ringing.get_message(timeout=10) or {} for _ in range(3)]
    assert [re.sub(r" \d{13} ", " 5 ", one.get("data", b"").decode()) for one in heard] == [
        '1-1 claimed 5 {"replica":"r1"}', '1-2 completed 5 {"answer":"so"}', f'{added} reward 5 {{"reward":1.0}}',
    ]  # fmt: skip
