"""What a consumer does when something goes wrong, without a server."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest

from shared.bus import Bus, BusFull, Command, ConnectionLost, Consumer, Delivery, Reply, ReplyError, Route
from shared.bus.claims import Found
from shared.bus.link import MOST_TRIES
from shared.bus.settling import EffectRefused
from shared.errors import Fenced, PermanentError, TransientError

STREAM = "local2:tool.request.probe"


async def nothing(_delivery: Delivery) -> list[Command]:
    return []


async def waits(_delivery: Delivery) -> list[Command]:
    await asyncio.Event().wait()
    return []


def consumer(heartbeat: float = 3_600.0) -> Consumer:
    bus = Bus("redis://127.0.0.1:1", "test/1")
    options: dict[str, Any] = {"concurrency": 1, "heartbeat": heartbeat, "max_deliveries": 3, "drain": 1}
    return Consumer(bus, "g", "r1", {STREAM: Route(nothing)}, **options)


def delivery(of: Consumer) -> Delivery:
    return Delivery(STREAM, "1-1", [], 1, of.slots)


async def test_effects_that_break_the_connection_again_and_again_are_given_up_at_the_last_try() -> None:
    reader = consumer()
    one = delivery(reader)
    for _ in range(MOST_TRIES - 1):
        await reader._reconsider(one, ConnectionLost("x", broken=1))
    # one that was lost over something else is no fault of theirs
    await reader._reconsider(one, ConnectionLost("x"))
    with pytest.raises(PermanentError, match=f"broke the connection to Redis {MOST_TRIES} times"):
        await reader._reconsider(one, ConnectionLost("x", broken=1))


async def test_what_was_refused_for_good_is_not_offered_again() -> None:
    reader = consumer()
    with pytest.raises(PermanentError, match="its effects were refused: WRONGTYPE"):
        await reader._reconsider(delivery(reader), ReplyError("WRONGTYPE it is"))
    with pytest.raises(EffectRefused):
        await reader._reconsider(delivery(reader), EffectRefused("x"))


async def test_an_entry_that_was_taken_over_while_it_waited_for_space_is_left_alone() -> None:
    reader = consumer(heartbeat=0.0)
    one = delivery(reader)
    one.lost = True
    with pytest.raises(Fenced):
        await reader._wait_for_space(one, TransientError("full"))  # type: ignore[arg-type]


async def test_what_was_done_is_kept_while_nobody_can_renew_a_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk refuses every write, those of heartbeats too, for everybody: it may last for any time."""
    reader = consumer(heartbeat=0.0)
    reader._loop = asyncio.get_running_loop()
    asked: list[str] = []

    async def ask(one: Delivery) -> float:
        asked.append(one.entry_id)
        if len(asked) < 20:
            raise BusFull("MISCONF no space is left")
        return 7.0

    monkeypatch.setattr(reader._claims, "ask", ask)
    one = delivery(reader)
    await reader._wait_for_space(one, BusFull("MISCONF no space is left"))
    assert await reader._check_claim(one) == 7.0
    assert len(asked) == 21


async def test_groups_that_are_made_again_renew_no_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = consumer(heartbeat=1.0)
    loop = asyncio.get_running_loop()
    now = loop.time()
    monkeypatch.setattr("shared.bus.claims.asyncio.get_running_loop", lambda: loop)
    monkeypatch.setattr(loop, "time", lambda: now, raising=False)

    async def refused(_commands: Any) -> list[Reply]:
        return [ReplyError("BUSYGROUP it is there")]

    monkeypatch.setattr(reader._bus.pulse, "pipe_raw", refused)
    await reader._claims.begin()
    assert (first := reader._claims.certain_until) > now
    now += 60
    await reader._claims.begin()
    assert reader._claims.certain_until == first


async def test_what_is_lost_knows_it_before_the_heartbeat_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handler may end at any moment, and what is held counts as ours for two heartbeats more."""
    reader, known = consumer(heartbeat=1.0), list[bool]()
    one = delivery(reader)
    assert reader.slots.take(one)
    reader._claims.add(["local2:other"])

    async def call(*command: Any) -> Reply:
        if command[3] == STREAM:
            return [1_000, 0, 0, [b"1-1"]]
        known.append(one.lost)
        return [1_000, 0, 0, []]

    monkeypatch.setattr(reader._bus.pulse, "call", call)
    assert await reader._claims.beat(reader.slots) == [one]
    assert known == [True]


async def test_a_handler_that_does_not_end_in_time_is_ended_by_who_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = consumer()
    reading._drain = 0.0
    held = delivery(reading)
    reading.slots.take(held)
    held.task = asyncio.create_task(asyncio.sleep(3_600))
    handed_over: list[bool] = []

    async def hand_over() -> None:
        assert held.task is not None
        # nothing is handed over that is still being worked on
        handed_over.append(held.task.done())

    monkeypatch.setattr(reading._claims, "hand_over", hand_over)
    await reading._leave()
    assert handed_over == [True]
    assert held.task.cancelled()


async def test_another_number_of_slots_counts_at_once() -> None:
    reader = consumer()
    reader.slots.changed.clear()
    reader.resize(7)
    assert reader.concurrency == reader.slots.room() == 7
    assert reader.slots.changed.is_set()


@pytest.mark.parametrize("waits", [True, False])
async def test_streams_that_are_added_are_read_at_once_also_by_who_waits_for_the_others(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, ended = consumer(), list[bool]()

    async def pipe_raw(_commands: Any) -> list[Reply]:
        return [b"OK", b"OK"]

    async def unblock() -> bool:
        ended.append(True)
        return True

    monkeypatch.setattr(reader._bus.pulse, "pipe_raw", pipe_raw)
    monkeypatch.setattr(reader._bus, "unblock", unblock)
    reader.slots.promised = int(waits)
    reader.slots.changed.clear()
    await reader.add({"local2:tool.request.other": Route(nothing)})
    assert ended == [True] * waits
    assert reader.slots.changed.is_set()


async def test_whoever_waits_for_a_group_ends_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, stop, tried = consumer(), asyncio.Event(), 0

    async def begin() -> None:
        nonlocal tried
        tried += 1
        asyncio.get_running_loop().call_soon(stop.set)
        raise TransientError("full")

    monkeypatch.setattr(reader._claims, "begin", begin)
    await asyncio.wait_for(reader.run(stop), 60)
    assert tried == 1


async def test_a_read_that_found_no_group_is_not_repeated_at_once_where_somebody_else_makes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = consumer()
    waited: list[float] = []

    async def begin() -> None:
        raise TransientError("somebody else makes it")

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(reader._claims, "begin", begin)
    monkeypatch.setattr("shared.bus.consumer.asyncio.sleep", sleep)
    await reader._repair(ReplyError("NOGROUP no such group"))
    assert waited == [3_600.0]


class Reads:
    """The reader's connection: each read is answered with what the test has put there."""

    def __init__(self, *replies: dict[str, list[str]]) -> None:
        self.replies = list(replies)
        self.asked: list[tuple[list[str], int, int | None]] = []

    async def call(self, *command: Any, **_options: Any) -> Reply:
        words = list(command)
        streams = words[words.index("STREAMS") + 1 :]
        block = words[words.index("BLOCK") + 1] if "BLOCK" in words else None
        self.asked.append((streams[: len(streams) // 2], words[words.index("COUNT") + 1], block))
        found = self.replies.pop(0)
        return [[name.encode(), [[one.encode(), []] for one in ids]] for name, ids in found.items()] or None


def reading(
    monkeypatch: pytest.MonkeyPatch, reads: Reads, routes: dict[str, Route], concurrency: int
) -> tuple[Consumer, Bus]:
    bus = Bus("redis://127.0.0.1:1", "test/1")
    options: dict[str, Any] = {"concurrency": concurrency, "heartbeat": 3_600.0, "max_deliveries": 3, "drain": 1}
    made = Consumer(bus, "g", "r1", routes, **options)
    made._loop = asyncio.get_running_loop()

    async def surely_ours(_delivery: Delivery) -> float:
        return 0.0

    def settled(delivery: Delivery, _effects: object, _until: float) -> None:
        made._settled(delivery, [], None)

    monkeypatch.setattr(bus.reader, "call", reads.call)
    monkeypatch.setattr(made, "_check_claim", surely_ours)
    monkeypatch.setattr(made._settling, "settle", settled)
    return made, bus


async def test_with_fewer_slots_than_streams_none_is_waited_for_while_another_has_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second, third = "local2:first", "local2:second", "local2:third"
    reads = Reads({}, {third: ["3-1"]}, {}, {}, {}, {second: ["2-1"]})
    reader, bus = reading(monkeypatch, reads, {one: Route(nothing) for one in (first, second, third)}, 2)
    await reader._read(2)
    # in turn and without waiting, until one has something
    assert reads.asked == [([first, second], 1, None), ([third], 1, None)]
    reads.asked.clear()
    await reader._read(1)
    # none has: the next entry of any is waited for
    (*looks, waited) = reads.asked
    assert sorted(one for streams, *_ in looks for one in streams) == [first, second, third]
    assert {block for *_, block in looks} == {None}
    assert (sorted(waited[0]), *waited[1:]) == ([first, second, third], 1, int(bus.block * 1000))
    await asyncio.gather(*(one.task for one in reader.held.values() if one.task is not None))
    assert reader.handled == 2


async def test_what_comes_beside_the_one_that_was_waited_for_waits_for_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = "local2:first", "local2:second"
    working, most, gate = 0, 0, asyncio.Event()

    async def handler(_delivery: Delivery) -> list[Command]:
        nonlocal working, most
        working += 1
        most = max(most, working)
        await gate.wait()
        working -= 1
        return []

    reads = Reads({}, {}, {first: ["1-1"], second: ["2-1"]})
    reader, _ = reading(monkeypatch, reads, {first: Route(handler, limit=5), second: Route(handler)}, 2)
    held = Delivery(first, "0-1", [], 1, reader.slots)
    reader.slots.take(held)
    await reader._read(reader.slots.room())
    for _ in range(5):
        await asyncio.sleep(0)
    tasks = [one.task for one in reader.held.values() if one.task is not None]
    assert (working, len(reader.held), reader.slots.room()) == (1, 3, -1)
    gate.set()
    await asyncio.gather(*tasks)
    assert (reader.handled, most, list(reader.held.values()), reader.slots.room()) == (2, 1, [held], 1)


async def test_a_read_of_more_streams_than_there_is_room_for_keeps_nobody_who_was_parked_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    promised: list[int] = []

    class Promised(Reads):
        async def call(self, *command: Any, **options: Any) -> Reply:
            promised.append(reader.slots.promised)
            if len(promised) == 3:
                # it waits for the next entry of any stream; the last slot is for who goes on, without another read
                reader.slots.give_back(held)
                async with asyncio.timeout(5):
                    await reader.slots.free_one()
            return await super().call(*command, **options)

    first, second = "local2:first", "local2:second"
    reader, _ = reading(monkeypatch, Promised({}, {}, {}), {one: Route(nothing) for one in (first, second)}, 2)
    monkeypatch.setattr(reader.slots, "_unblock", unblocked_never)
    held = Delivery(first, "0-1", [], 1, reader.slots)
    reader.slots.take(held)
    await reader._read(reader.slots.room())
    assert promised == [1, 1, 1]


async def unblocked_never() -> bool:
    raise AssertionError("nobody has to ask for the slot that is free")


async def test_what_waits_for_a_slot_and_is_taken_over_gives_nothing_away() -> None:
    reader = consumer()
    reader._loop = asyncio.get_running_loop()
    held, waiting = delivery(reader), Delivery(STREAM, "2-1", [], 1, reader.slots)
    assert reader.slots.take(held)
    assert reader.slots.take(waiting)
    waiting.task = asyncio.create_task(reader._handle(waiting))
    await asyncio.sleep(0)
    assert reader.slots.waiting() == [waiting]
    waiting.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting.task
    assert (list(reader.held.values()), reader.slots.room()) == ([held], 0)


@pytest.mark.parametrize(
    "error",
    [Fenced("x"), TransientError("x"), RuntimeError("a bug"), PermanentError("x"), EffectRefused("x")],
    ids=repr,
)
async def test_whatever_a_handler_ends_with_ends_there_and_its_slot_is_free_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def handler(_delivery: Delivery) -> list[Command]:
        raise error

    reader, _ = reading(monkeypatch, Reads(), {STREAM: Route(handler)}, 1)
    noted: list[str] = []
    handed_in: list[Any] = []

    async def note(_delivery: Delivery, reason: str) -> list[Command]:
        noted.append(reason)
        return [("LETTER",)]

    async def bury(one: Delivery, refused: Sequence[Command], reason: str) -> list[Command]:
        assert list(refused) == []
        return await note(one, reason)

    async def check(_one: Delivery) -> float:
        return 7.0

    monkeypatch.setattr(reader, "_note", note)
    monkeypatch.setattr(reader, "_bury", bury)
    monkeypatch.setattr(reader._settling, "settle", lambda *given: handed_in.append(given))
    one = delivery(reader)
    assert reader.slots.take(one)
    if isinstance(error, PermanentError | EffectRefused):
        # how long the machine has been up must not say whether it is asked for
        reader._claims.certain_until = float("-inf")
        monkeypatch.setattr(reader, "_check_claim", check)
        monkeypatch.setattr(reader, "_attempt", handler)
        await reader._handle(one)
        # what sets it aside is written like any effects
        assert handed_in == [(one, [("LETTER",)], 7.0)]
        assert (noted, list(reader.held.values())) == (["x"], [one])
        reader._settled(one, [("LETTER",)], None)
    else:
        await reader._handle(one)
        assert (noted, handed_in) == ([], [])
    assert (reader.slots.room(), list(reader.held)) == (1, [])


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (None, True),
        (PermanentError("x"), False),
        (ValueError("x"), False),
        (Fenced("x"), None),
        (TransientError("x"), None),
    ],
    ids=repr,
)
async def test_what_keeps_somebody_from_being_told_keeps_no_bad_entry_from_being_set_aside(
    error: Exception | None, told: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def undertaker(_delivery: Delivery, _reason: str) -> list[Command]:
        if error is not None:
            raise error
        return [("TELL",)]

    reader, _ = reading(monkeypatch, Reads(), {STREAM: Route(nothing, undertaker)}, 1)
    one = delivery(reader)
    if told is None:
        with pytest.raises(type(error)):  # type: ignore[arg-type]
            await reader._bury(one, [], "bad")
        assert one.letter is None
        return
    *before, letter = await reader._bury(one, [], "bad")
    assert ([command[0] for command in before], letter[0]) == (["TELL"] if told else [], "EVALSHA")
    assert letter is one.letter


@pytest.mark.parametrize("tells", [False, True])
async def test_a_letter_that_is_refused_with_what_tells_of_it_is_written_alone_and_then_fails(
    tells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def undertaker(_delivery: Delivery, _reason: str) -> list[Command]:
        return [("TELL",)]

    reader, _ = reading(monkeypatch, Reads(), {STREAM: Route(nothing, undertaker if tells else None)}, 1)
    one = delivery(reader)
    offered = await reader._bury(one, [("SET",)], "bad")
    assert offered == ([("TELL",), one.letter] if tells else [one.letter])
    if tells:
        offered = await reader._bury(one, offered, "refused")
        assert offered == [one.letter]
    with pytest.raises(PermanentError, match="refused"):
        await reader._bury(one, offered, "refused")


@pytest.mark.parametrize(
    ("reply", "there", "error"),
    [
        (b"OK", False, None),
        (ReplyError("BUSYGROUP x"), False, None),
        (ReplyError("NOPERM x"), True, None),
        (ReplyError("NOPERM x"), False, TransientError),
        (ReplyError("ERR x"), True, ReplyError),
    ],
    ids=repr,
)
async def test_a_group_is_made_or_there_or_waited_for(
    reply: Reply, there: bool, error: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = consumer()

    async def pipe_raw(_commands: Any) -> list[Reply]:
        return [reply]

    async def groups(stream: str) -> dict[str, Any]:
        assert stream == STREAM
        return {"other": {}, **({"g": {}} if there else {})}

    monkeypatch.setattr(reader._bus.pulse, "pipe_raw", pipe_raw)
    monkeypatch.setattr(reader._bus, "groups", groups)
    if error is None:
        await reader._claims.begin()
    else:
        with pytest.raises(error):
            await reader._claims.begin()
    assert not reader._claims.broken


async def test_what_is_no_stream_is_noted_until_it_is_one_again_and_said_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reader = consumer()
    replies: list[Reply] = [ReplyError("WRONGTYPE x"), ReplyError("WRONGTYPE x"), ReplyError("BUSYGROUP x")]

    async def pipe_raw(_commands: Any) -> list[Reply]:
        return [replies.pop(0)]

    monkeypatch.setattr(reader._bus.pulse, "pipe_raw", pipe_raw)
    for broken in ({STREAM}, {STREAM}, set()):
        await reader._claims.begin()
        assert reader._claims.broken == broken
    assert capfd.readouterr().err.count("bus.not_a_stream") == 1


async def test_a_group_that_has_gone_is_made_again_and_what_was_held_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, begun = consumer(), list[bool]()
    said = "NOGROUP it has gone"

    async def call(*_command: Any) -> Reply:
        raise ReplyError(said)

    async def begin() -> None:
        begun.append(True)

    monkeypatch.setattr(reader._bus.pulse, "call", call)
    monkeypatch.setattr(reader._claims, "begin", begin)
    assert await reader._claims._keep(STREAM, ["1-1", "2-1"]) == ["1-1", "2-1"]
    said = "WRONGTYPE it is"
    assert await reader._claims._keep(STREAM, ["1-1"]) == ["1-1"]
    assert begun == [True, True]
    said = "ERR it is"
    with pytest.raises(ReplyError, match="ERR"):
        await reader._claims._keep(STREAM, ["1-1"])
    assert begun == [True, True]


async def test_a_full_redis_is_tried_again_with_the_next_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, waited = consumer(), list[float]()

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr("shared.bus.consumer.asyncio.sleep", sleep)
    await reader._pause(delivery(reader), BusFull("OOM no memory is left"))
    assert waited == [3_600.0]


async def test_what_is_noted_is_pending_again_before_it_is_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, said = consumer(), list[Any]()

    async def pipe_raw(commands: Sequence[Command]) -> None:
        said.extend(commands)

    monkeypatch.setattr(reader._bus.link, "pipe_raw", pipe_raw)
    one = delivery(reader)
    assert await reader._note(one, "refused") == [one.letter]
    # whoever finds it finds one that was tried too often, however short it has been there
    assert said[0] == ("XCLAIM", STREAM, "g", "r1", 0, "1-1", "RETRYCOUNT", 4, "FORCE", "JUSTID")
    assert len(said) == 1
    assert one.settling


async def test_a_stream_without_room_keeps_no_other_from_being_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    full, free = "local2:full", "local2:free"
    reader, _ = reading(monkeypatch, Reads(), {full: Route(waits, limit=1), free: Route(waits)}, 3)
    reader._claims.certain_until = math.inf
    assert reader.slots.take(Delivery(full, "1-1", [], 1, reader.slots))
    asked: list[tuple[str, int]] = []

    async def orphans(stream: str, _watched: int, count: int, _slots: object) -> list[Found]:
        asked.append((stream, count))
        return [Found(stream, ("2-1", []), 2)]

    monkeypatch.setattr(reader._claims, "orphans", orphans)
    reader._claims.orphaned = {full: 5, free: 5}
    await reader._adopt()
    assert asked == [(free, 2)]
    assert [one.stream for one in reader.held.values()] == [full, free]
    await reader._interrupt(list(reader.held.values()))
    # what was looked at is found again by the next heartbeat
    assert reader._claims.orphaned == {}
