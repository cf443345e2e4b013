"""What a consumer reads, what it does with what it has read, and how it goes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest
from support.asked import Asked

from shared.bus import Bus, BusFull, Command, ConnectionLost, Consumer, Delivery, Reply, ReplyError, Route
from shared.bus.claims import Found
from shared.bus.letters import burying
from shared.bus.settling import EffectRefused
from shared.bus.streams import grouping
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


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────

OTHER = "local2:tool.request.other"


def asking(server: Asked, routes: dict[str, Route], **options: Any) -> Consumer:
    """A consumer whose every connection is the test's."""
    bus: Any = server.bus()
    bus.reader = server
    given: dict[str, Any] = {"concurrency": 8, "heartbeat": 3_600.0, "max_deliveries": 3, "drain": 1, **options}
    made = Consumer(bus, "g", "r1", routes, **given)
    made._loop = asyncio.get_running_loop()
    return made


def reads(streams: Sequence[str], count: int, block: int | None = 2_000) -> Command:
    waiting = () if block is None else ("BLOCK", block)
    return ("XREADGROUP", "GROUP", "g", "r1", "COUNT", count, *waiting, "STREAMS", *streams, *">" * len(streams))


async def test_what_is_added_is_read_and_kept_like_the_rest() -> None:
    server = Asked([b"OK", b"OK"])
    reader = asking(server, {STREAM: Route(nothing)}, heartbeat=1.0)
    seen: list[Delivery] = []

    async def handler(one: Delivery) -> list[Command]:
        seen.append(one)
        return []

    await reader.add({OTHER: Route(handler, limit=2)})
    assert server.heard() == [[grouping(name, "g") for name in (STREAM, OTHER)]]
    server.replies = [[[OTHER.encode(), [[b"1-1", [b"a", b"b"]]]]]]
    await reader._read(8)
    assert server.heard() == [reads((STREAM, OTHER), 2)]
    assert reader.slots.room_of(OTHER) == 1
    server.replies = [[0, 0, 0, []], [0, 0, 0, []]]
    assert await reader._claims.beat(reader.slots) == []
    assert [command[3] for command in server.heard()] == [STREAM, OTHER]
    server.replies = [[1]]
    await asyncio.gather(*(one.task for one in reader.held.values() if one.task is not None))
    assert [(one.stream, one.entry_id, one.fields, one.deliveries) for one in seen] == [
        (OTHER, "1-1", [b"a", b"b"], 1)
    ]  # fmt: skip


@pytest.mark.parametrize("error", [TransientError("away"), ReplyError("ERR x"), BusFull("OOM x")], ids=repr)
async def test_a_group_that_cannot_be_made_just_now_keeps_nothing_from_being_added(error: Exception) -> None:
    server = Asked(error)
    reader = asking(server, {STREAM: Route(nothing)})
    await reader.add({OTHER: Route(nothing)})
    server.heard()
    server.replies = [None]
    await reader._read(8)
    assert server.heard() == [reads((STREAM, OTHER), 4)]


@pytest.mark.parametrize(
    ("limits", "room", "asked"),
    [
        ({STREAM: None}, 8, reads((STREAM,), 8)),
        ({STREAM: None, OTHER: None}, 5, reads((STREAM, OTHER), 2)),
        ({STREAM: None, OTHER: None}, 2, reads((STREAM, OTHER), 1)),
        # redis knows one count for all of them
        ({STREAM: 3, OTHER: 2}, 8, reads((STREAM, OTHER), 2)),
        ({STREAM: None, OTHER: 9}, 8, reads((STREAM, OTHER), 4)),
        # a stream that has all it may have must not wait for the others
        ({STREAM: 0, OTHER: None}, 8, reads((OTHER,), 8, 50)),
        ({STREAM: None, OTHER: 0}, 1, reads((STREAM,), 1, 50)),
    ],
)
async def test_a_read_asks_for_no_more_than_there_is_room_for_and_for_all_that_may_be_read(
    limits: dict[str, int | None], room: int, asked: Command
) -> None:
    server = Asked(None)
    reader = asking(server, {stream: Route(nothing, limit=limit) for stream, limit in limits.items()})
    await reader._read(room)
    assert server.heard() == [asked]


async def test_with_one_slot_every_stream_has_its_turn() -> None:
    names = [STREAM, OTHER, "local2:tool.request.third"]
    server = Asked()
    reader = asking(server, {one: Route(nothing) for one in names})
    for place in (0, 1, 2, 0):
        server.replies = [[[names[place].encode(), []]]]
        await reader._read(1)
        assert server.heard() == [reads([names[place]], 1, None)]
    server.replies = [None] * 4
    await reader._read(1)
    # behind the turns of all of them the first that has something is waited for
    assert [command[command.index("STREAMS") + 1 : command.index(">")] for command in server.heard()] == [
        (names[1],), (names[2],), (names[0],), (names[1], names[2], names[0])
    ]  # fmt: skip


async def test_what_is_no_stream_is_not_read_and_the_others_are_waited_for_as_ever() -> None:
    server = Asked(None)
    reader = asking(server, {STREAM: Route(nothing), OTHER: Route(nothing)})
    reader._claims.broken.add(STREAM)
    await reader._read(8)
    assert server.heard() == [reads((OTHER,), 8)]


async def test_where_nothing_may_be_read_it_is_looked_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    server, waited = Asked(), list[float]()

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr("shared.bus.consumer.asyncio.sleep", sleep)
    await asking(server, {STREAM: Route(nothing, limit=0)})._read(8)
    assert (server.heard(), waited) == ([], [0.05])


@pytest.mark.parametrize(
    ("count", "streams", "block", "promised"), [(3, 2, 1.5, 6), (5, 2, None, 8), (8, 1, 2.0, 8), (1, 1, None, 1)]
)
async def test_a_read_is_promised_what_it_may_bring_and_is_not_sent_again(
    count: int, streams: int, block: float | None, promised: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Asked()
    reader = asking(server, {STREAM: Route(nothing)})
    reader.slots.changed.clear()
    seen: list[Any] = []

    async def call(*command: Any, **options: Any) -> Reply:
        seen.append((command, options, reader.slots.promised))
        raise ConnectionLost("x")

    monkeypatch.setattr(server, "call", call)
    names = [STREAM, OTHER][:streams]
    with pytest.raises(ConnectionLost):
        await reader._take(names, count, block)
    milliseconds = None if block is None else int(block * 1_000)
    assert seen == [(reads(names, count, milliseconds), {"retry": False, "block": block or 0.0, "now": True}, promised)]
    # whoever waits for a slot is told
    assert (reader.slots.promised, reader.slots.changed.is_set()) == (0, True)


async def test_a_read_without_room_is_promised_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Asked(None)
    reader = asking(server, {STREAM: Route(nothing)}, concurrency=1)
    for number in range(2):
        reader.slots.take(Delivery(OTHER, f"{number}-1", [], 1, reader.slots))
    reader.slots.wanted = 1
    assert reader.slots.room() == -1
    told: list[int] = []
    reply = server.call

    async def call(*command: Any, **options: Any) -> Reply:
        told.append(reader.slots.promised)
        return await reply(*command, **options)

    monkeypatch.setattr(server, "call", call)
    assert not await reader._take([STREAM], 1, None)
    assert told == [0]


class Connection:
    """Of a reader: whether it is there, and how often it was made."""

    def __init__(self) -> None:
        self.generation = 1
        self.connected = asyncio.Event()
        self.connected.set()


async def test_what_got_lost_comes_before_what_is_to_be_taken_over_and_that_before_what_is_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, connection, did = consumer(), Connection(), list[str]()
    errors: list[Exception] = []

    def does(what: str, *then: Any) -> Any:
        steps = iter(then)

        async def do(*given: Any) -> int:
            did.append(" ".join([what, *map(str, given)]))
            if (step := next(steps, None)) is not None:
                step()
            return 5

        return do

    def orphan() -> None:
        reader._claims.orphaned = {STREAM: True}

    def adopted() -> None:
        reader._claims.orphaned = {}

    def reconnect() -> None:
        connection.generation += 1

    def fail(error: Exception) -> Any:
        def failing() -> None:
            errors.append(error)
            raise error

        return failing

    def stop() -> None:
        reader._stopping = True

    monkeypatch.setattr(reader._bus, "reader", connection)
    monkeypatch.setattr(reader, "_recover", does("recover"))
    monkeypatch.setattr(reader, "_adopt", does("adopt", adopted))
    # waiting for room something may come up
    monkeypatch.setattr(reader, "_room", does("room", None, orphan, None, reconnect, None, None, None, stop))
    lost, refused, away = ConnectionLost("x"), ReplyError("ERR x"), TransientError("x")
    monkeypatch.setattr(reader, "_read", does("read", None, None, fail(lost), fail(refused), fail(away)))
    monkeypatch.setattr(reader, "_repair", does("repair"))
    await asyncio.wait_for(reader._read_forever(), 5)
    assert did == [
        "recover", "room", "read 5",
        "room",
        "adopt", "room", "read 5",
        "room",
        "recover", "room", "read 5",
        "room", "read 5", "repair ERR x",
        "room", "read 5", "repair x",
        "room",
    ]  # fmt: skip
    assert errors == [lost, refused, away]


async def test_nothing_is_read_while_there_is_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, connection, did = consumer(), Connection(), list[int]()
    connection.generation = 0
    connection.connected.clear()

    async def recover() -> None:
        did.append(connection.generation)
        reader._stopping = True

    monkeypatch.setattr(reader._bus, "reader", connection)
    monkeypatch.setattr(reader, "_recover", recover)
    task = asyncio.create_task(reader._read_forever())
    for _ in range(3):
        await asyncio.sleep(0)
    assert (did, task.done()) == ([], False)
    connection.generation = 7
    connection.connected.set()
    await asyncio.wait_for(task, 5)
    assert did == [7]


async def test_room_is_waited_for_and_a_stream_to_read_until_it_is_to_stop() -> None:
    reader = consumer()
    held = delivery(reader)
    assert reader.slots.take(held)
    waiting = asyncio.create_task(reader._room())
    await asyncio.sleep(0)
    # something has changed, and there is no room yet
    reader.slots.changed.set()
    await asyncio.sleep(0)
    assert not waiting.done()
    reader.slots.give_back(held)
    assert await asyncio.wait_for(waiting, 5) == 1
    reader._turn.clear()
    waiting = asyncio.create_task(reader._room())
    await asyncio.sleep(0)
    assert not waiting.done()
    reader._stopping = True
    reader.slots.changed.set()
    assert await asyncio.wait_for(waiting, 5) == 1


async def test_everything_that_got_lost_is_taken_up_as_there_is_room_page_by_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = "local2:broken"
    reader = asking(Asked(), {one: Route(waits) for one in (STREAM, OTHER, broken)}, concurrency=2)
    reader._claims.broken.add(broken)
    reader._claims.certain_until = math.inf
    asked: list[tuple[str, str, int]] = []
    pages = {
        (STREAM, "-"): (["1-1"], "(1-1"),
        (STREAM, "(1-1"): (["2-1"], "(2-1"),
        (STREAM, "(2-1"): ([], None),
        (OTHER, "-"): ([], None),
    }

    async def unseen(stream: str, after: str, count: int, slots: object) -> tuple[list[Found], str | None]:
        assert slots is reader.slots
        asked.append((stream, after, count))
        ids, then = pages[stream, after]
        return [Found(stream, (entry_id, []), 2) for entry_id in ids], then

    async def room() -> int:
        # whoever is to stop is given none
        return 2 - len(reader.held)

    monkeypatch.setattr(reader._claims, "unseen", unseen)
    monkeypatch.setattr(reader, "_room", room)
    await reader._recover()
    assert [one for one in asked if one[0] == STREAM] == [(STREAM, "-", 2), (STREAM, "(1-1", 1), (STREAM, "(2-1", 1)]
    assert [one[:2] for one in asked if one[0] != STREAM] == [(OTHER, "-")]
    started = list(reader.held.values())
    assert [(one.stream, one.entry_id, one.deliveries) for one in started] == [(STREAM, "1-1", 2), (STREAM, "2-1", 2)]
    asked.clear()
    reader._stopping = True
    await reader._recover()
    assert asked == []
    await reader._interrupt(started)


@pytest.mark.parametrize(
    ("concurrency", "limit", "held", "count"),
    [
        (4, None, [], 4),
        (4, 3, [], 3),
        (2, 3, [], 2),
        (4, 2, [(STREAM, 1)], 1),
        (4, 1, [(STREAM, 1)], None),
        (1, None, [(OTHER, 1)], None),
        # what is to be given up needs no room
        (4, 1, [(STREAM, 3)], 1),
        (4, None, [(OTHER, 3)], 1),
    ],
)
async def test_what_nobody_keeps_is_taken_over_as_far_as_there_is_room_for_its_stream(
    concurrency: int, limit: int | None, held: list[tuple[str, int]], count: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    reader = asking(
        Asked(), {STREAM: Route(nothing, limit=limit), OTHER: Route(nothing)}, concurrency=concurrency
    )  # fmt: skip
    for stream, deliveries in held:
        assert reader.slots.take(Delivery(stream, "1-1", [], deliveries, reader.slots))
    asked: list[tuple[str, bool, int]] = []

    async def orphans(stream: str, watched: bool, most: int, slots: object) -> list[Found]:
        assert slots is reader.slots
        asked.append((stream, watched, most))
        return []

    monkeypatch.setattr(reader._claims, "orphans", orphans)
    reader._claims.orphaned = {STREAM: True}
    await reader._adopt()
    assert asked == ([] if count is None else [(STREAM, True, count)])
    assert reader._claims.orphaned == {}


async def test_nothing_is_begun_twice_or_by_who_is_about_to_leave() -> None:
    reader = asking(Asked(), {STREAM: Route(waits)})
    reader._claims.certain_until = math.inf
    found = Found(STREAM, ("1-1", [b"a", b"b"]), 2)
    (one,) = reader._hold([found, found])
    reader._work_on([one])
    assert list(reader.held.items()) == [((STREAM, "1-1"), one)]
    assert (one.fields, one.deliveries, one.task is not None) == ([b"a", b"b"], 2, True)
    assert reader._hold([found]) == []
    reader._stopping = True
    assert reader._hold([Found(STREAM, ("2-1", []), 1)]) == []
    assert list(reader.held.values()) == [one]
    await reader._interrupt([one])


@pytest.mark.parametrize(("entries", "order"), [(1, ["read", "1-1", "read"]), (2, ["read", "read", "1-1", "2-1"])])
async def test_the_next_read_is_under_way_while_several_are_worked_on_and_comes_behind_the_work_on_one(
    entries: int, order: list[str]
) -> None:
    happened: list[str] = []

    async def handler(one: Delivery) -> list[Command]:
        happened.append(one.entry_id)
        return await waits(one)

    class Reads(Asked):
        async def call(self, *command: Any, **options: Any) -> Reply:
            happened.append("read")
            assert options == {"retry": False, "block": 2.0, "now": True}
            if not self.replies:
                await asyncio.Event().wait()
            return self._reply(command)

    server = Reads([[STREAM.encode(), [[b"%d-1" % (number + 1), []] for number in range(entries)]]])
    reader = asking(server, {STREAM: Route(handler)})
    reader._claims.certain_until = math.inf

    async def twice() -> None:
        await reader._read(8)
        await reader._read(8)

    reading = asyncio.create_task(twice())
    for _ in range(4):
        await asyncio.sleep(0)
    assert happened == order
    reading.cancel()
    await reader._interrupt(list(reader.held.values()))


@pytest.mark.parametrize(
    ("error", "begin", "waited"),
    [
        (ReplyError("NOGROUP x"), None, 0),
        (ReplyError("WRONGTYPE x"), None, 0),
        (ReplyError("ERR x"), None, 1),
        (TransientError("x"), None, 1),
        (ReplyError("NOGROUP x"), ReplyError("ERR x"), 1),
        (ReplyError("ERR x"), TransientError("x"), 2),
    ],
    ids=repr,
)
async def test_a_read_that_failed_is_not_repeated_before_something_may_have_changed(
    error: TransientError | ReplyError, begin: Exception | None, waited: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, slept, begun = consumer(heartbeat=7.0), list[float](), list[bool]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def beginning() -> None:
        begun.append(True)
        if begin is not None:
            raise begin

    monkeypatch.setattr("shared.bus.consumer.asyncio.sleep", sleep)
    monkeypatch.setattr(reader._claims, "begin", beginning)
    await reader._repair(error)
    assert (slept, begun) == ([7.0] * waited, [True])


async def test_the_groups_are_asked_for_until_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, slept = consumer(heartbeat=7.0), list[float]()
    outcomes = [TransientError("away"), ReplyError("ERR x"), BusFull("OOM"), None]

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def begin() -> None:
        if (outcome := outcomes.pop(0)) is not None:
            raise outcome

    monkeypatch.setattr("shared.bus.consumer.asyncio.sleep", sleep)
    monkeypatch.setattr(reader._claims, "begin", begin)
    await reader._begin()
    assert (slept, outcomes) == ([7.0] * 3, [])


async def test_a_read_that_cannot_be_ended_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = consumer()
    for outcome, ended in ((True, True), (False, False), (TransientError("x"), False), (ReplyError("ERR x"), False)):

        async def unblock() -> bool:
            if isinstance(outcome, Exception):  # noqa: B023
                raise outcome  # noqa: B023
            return outcome  # noqa: B023

        monkeypatch.setattr(reader._bus, "unblock", unblock)
        assert await reader._unblock() is ended


# ── handling ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def handling(monkeypatch: pytest.MonkeyPatch, handler: Any, certain: float = math.inf) -> tuple[Consumer, list[Any]]:
    """A consumer, and what it hands in to be written."""
    reader = consumer()
    reader._routes[STREAM] = Route(handler)
    reader._loop = asyncio.get_running_loop()
    handed_in: list[Any] = []

    def settle(one: Delivery, effects: Sequence[Command], until: float) -> None:
        handed_in.append((one, list(effects), until))

    async def ask(_one: Delivery) -> float:
        return 77.0

    reader._claims.certain_until = certain
    monkeypatch.setattr(reader._claims, "ask", ask)
    monkeypatch.setattr(reader._settling, "settle", settle)
    return reader, handed_in


@pytest.mark.parametrize(("certain", "until"), [(math.inf, math.inf), (0.0, 77.0)])
async def test_what_a_handler_returns_is_handed_in_for_as_long_as_its_entry_is_certainly_ours(
    certain: float, until: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def handler(_one: Delivery) -> list[Command]:
        return [("SET", "a", "b")]

    reader, handed_in = handling(monkeypatch, handler, certain)
    one = delivery(reader)
    reader.slots.take(one)
    await reader._handle(one)
    assert handed_in == [(one, [("SET", "a", "b")], until)]
    # it is held until the outcome is known
    assert (list(reader.held.values()), reader.handled) == ([one], 0)
    reader._settled(one, [], None)
    assert (list(reader.held.values()), reader.handled) == ([], 1)


async def test_what_was_taken_over_while_its_handler_ran_is_not_handed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    async def handler(one: Delivery) -> list[Command]:
        one.lost = True
        return []

    reader, handed_in = handling(monkeypatch, handler)
    one = delivery(reader)
    reader.slots.take(one)
    await reader._handle(one)
    assert (handed_in, list(reader.held)) == ([], [])


async def test_what_came_before_a_pause_is_not_begun_before_it_is_known_to_be_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[str] = []

    async def handler(one: Delivery) -> list[Command]:
        begun.append(one.entry_id)
        return []

    reader, handed_in = handling(monkeypatch, handler, 0.0)

    async def ask(_one: Delivery) -> float:
        raise Fenced("somebody has it")

    monkeypatch.setattr(reader._claims, "ask", ask)
    one = delivery(reader)
    reader.slots.take(one)
    await reader._handle(one)
    assert (begun, handed_in, list(reader.held)) == ([], [], [])


async def test_effects_that_could_not_be_written_are_offered_again_and_not_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def handler(_one: Delivery) -> list[Command]:
        raise AssertionError("it is not asked again")

    reader, handed_in = handling(monkeypatch, handler)
    buried: list[str] = []

    async def bury(_one: Delivery, refused: Sequence[Command], reason: str) -> list[Command]:
        assert refused == [("SET", "a", "b")]
        buried.append(reason)
        return [("LETTER",)]

    monkeypatch.setattr(reader, "_bury", bury)
    one = delivery(reader)
    reader.slots.take(one)
    reader._settled(one, [("SET", "a", "b")], ConnectionLost("x", broken=1))
    assert one.task is not None
    await one.task
    assert handed_in == [(one, [("SET", "a", "b")], math.inf)]
    assert (list(reader.held.values()), reader.handled, one.broken) == ([one], 0, 1)
    # unless they are refused
    reader._settled(one, [("SET", "a", "b")], ReplyError("WRONGTYPE x"))
    await one.task
    assert handed_in[1:] == [(one, [("LETTER",)], math.inf)]
    assert buried == ["its effects were refused: WRONGTYPE x"]


@pytest.mark.parametrize(
    ("deliveries", "raised", "kind", "says"),
    [
        (3, None, None, ""),
        (4, None, PermanentError, "gave up after 3 deliveries"),
        (2, ReplyError("WRONGTYPE x"), TransientError, "Redis refused a command: WRONGTYPE x"),
        (3, ReplyError("WRONGTYPE x"), PermanentError, "gave up after 3 deliveries: WRONGTYPE x"),
        (2, RuntimeError("a bug"), RuntimeError, "a bug"),
        (3, RuntimeError("a bug"), PermanentError, "gave up after 3 deliveries: a bug"),
        # whoever says what it is knows it
        (3, TransientError("away"), TransientError, "away"),
        (3, Fenced("taken"), Fenced, "taken"),
        (1, PermanentError("bad"), PermanentError, "bad"),
    ],
    ids=repr,
)
async def test_an_attempt_ends_with_what_is_to_be_done_about_it(
    deliveries: int, raised: Exception | None, kind: type[Exception] | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    async def handler(one: Delivery) -> list[Command]:
        tried.append(one.deliveries)
        if raised is not None:
            raise raised
        return [("SET", "a", "b")]

    reader, _ = handling(monkeypatch, handler)
    one = Delivery(STREAM, "1-1", [], deliveries, reader.slots)
    reader.slots.take(one)
    if kind is None:
        assert await reader._attempt(one) == [("SET", "a", "b")]
    else:
        with pytest.raises(kind) as told:
            await reader._attempt(one)
        assert (type(told.value), str(told.value)) == (kind, says)
    assert tried == ([] if deliveries > 3 else [deliveries])


async def test_a_handler_to_whom_redis_was_full_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[BusFull | None] = [BusFull("OOM x"), BusFull("OOM y"), None]
    waited: list[tuple[Delivery, str]] = []

    async def handler(_one: Delivery) -> list[Command]:
        if (outcome := outcomes.pop(0)) is not None:
            raise outcome
        return [("SET", "a", "b")]

    async def wait(one: Delivery, exc: BusFull) -> None:
        waited.append((one, str(exc)))

    reader, _ = handling(monkeypatch, handler)
    monkeypatch.setattr(reader, "_wait_for_space", wait)
    one = delivery(reader)
    reader.slots.take(one)
    assert await reader._attempt(one) == [("SET", "a", "b")]
    assert waited == [(one, "OOM x"), (one, "OOM y")]


async def test_a_letter_is_offered_until_it_is_written_and_then_its_entry_is_handled(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def undertaker(_one: Delivery, _reason: str) -> list[Command]:
        return [("TELL",)]

    reader, handed_in = handling(monkeypatch, nothing)
    reader._routes[STREAM] = Route(nothing, undertaker)
    one = delivery(reader)
    reader.slots.take(one)
    for error, count in (
        (ReplyError("WRONGTYPE x"), 2),
        (ConnectionLost("x"), 2),
        # who waits cannot be told
        (ReplyError("WRONGTYPE y"), 1),
        (ConnectionLost("y"), 1),
    ):
        before = handed_in[-1][1] if handed_in else [("SET", "a", "b")]
        reader._settled(one, before, error)
        assert one.task is not None
        await one.task
        assert (len(handed_in[-1][1]), handed_in[-1][1][-1]) == (count, one.letter)
    assert len(handed_in) == 4
    reader._settled(one, handed_in[-1][1], None)
    assert (reader.handled, list(reader.held)) == (1, [])
    # what cannot be set aside is left to the next who takes it over
    reader.slots.take(one)
    reader._settled(one, [one.letter], ReplyError("WRONGTYPE z"))
    await one.task
    assert (reader.handled, list(reader.held), len(handed_in)) == (1, [], 4)
    assert "bus.handler_failed" in capfd.readouterr().err


async def test_an_entry_with_an_effect_that_was_refused_is_noted_and_set_aside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, handed_in = handling(monkeypatch, nothing)
    noted: list[str] = []

    async def note(_one: Delivery, reason: str) -> list[Command]:
        noted.append(reason)
        return [("LETTER",)]

    monkeypatch.setattr(reader, "_note", note)
    one = delivery(reader)
    reader.slots.take(one)
    reader._settled(one, [("SET", "a", "b")], EffectRefused("WRONGTYPE x"))
    assert one.task is not None
    await one.task
    assert (noted, handed_in, reader.handled) == (["WRONGTYPE x"], [(one, [("LETTER",)], math.inf)], 0)


async def test_an_entry_is_set_aside_although_not_everybody_could_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, handed_in = handling(monkeypatch, nothing)
    one = delivery(reader)
    reader.slots.take(one)
    one.letter = ("LETTER",)
    reader._settled(one, [("TELL",), one.letter], EffectRefused("WRONGTYPE x"))
    assert (reader.handled, list(reader.held), handed_in) == (1, [], [])


async def test_effects_for_which_there_is_no_room_wait_for_some(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, waited = consumer(), list[Any]()

    async def wait(one: Delivery, exc: BusFull) -> None:
        waited.append((one, exc))

    monkeypatch.setattr(reader, "_wait_for_space", wait)
    one, full = delivery(reader), BusFull("OOM x")
    await reader._reconsider(one, full)
    assert (waited, one.broken) == ([(one, full)], 0)


async def test_while_nothing_can_be_written_it_is_tried_with_each_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, _ = handling(monkeypatch, nothing, 0.0)
    slept: list[float] = []
    outcomes = [BusFull("MISCONF x"), BusFull("MISCONF x"), None]

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def ask(_one: Delivery) -> float:
        if (outcome := outcomes.pop(0)) is not None:
            raise outcome
        return 7.0

    monkeypatch.setattr("shared.bus.consumer.asyncio.sleep", sleep)
    monkeypatch.setattr(reader._claims, "ask", ask)
    await reader._wait_for_space(delivery(reader), BusFull("OOM x"))
    assert (slept, outcomes) == ([3_600.0] * 3, [])


async def test_an_entry_for_which_nobody_waits_is_set_aside_without_an_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reader = consumer()
    assert len(await reader._bury(delivery(reader), [], "why")) == 1
    assert "bus.undertaker_failed" not in capfd.readouterr().err


async def test_a_claim_is_asked_for_where_it_is_not_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, _ = handling(monkeypatch, nothing)
    one = delivery(reader)
    assert await reader._check_claim(one) == math.inf
    reader._claims.certain_until = 0.0
    assert await reader._check_claim(one) == 77.0
    one.lost = True
    with pytest.raises(Fenced, match="1-1 was taken over"):
        await reader._check_claim(one)


async def test_a_letter_says_of_its_entry_what_it_was_and_why_it_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    async def undertaker(one: Delivery, reason: str) -> list[Command]:
        told.append((one, reason))
        return [("TELL",)]

    reader = consumer()
    reader._routes[STREAM] = Route(nothing, undertaker)
    one = Delivery(STREAM, "1-1", [b"a", b"b"], 2, reader.slots)
    effects = await reader._bury(one, [], "why")
    assert told == [(one, "why")]
    # but for the moment of writing
    at = effects[1].index("time") + 1
    # its stream is cut by the first of a process
    reader._bus._uncut.clear()
    letter = list(burying(reader._bus, STREAM, "g", "1-1", [b"a", b"b"], 2, "why"))
    assert effects[0] == ("TELL",)
    assert [*effects[1][:at], *effects[1][at + 1 :]] == [*letter[:at], *letter[at + 1 :]]


# ── heartbeat and leaving ────────────────────────────────────────────────────────────────────────────────────────────


class Ended(BaseException):
    """Ends what goes on for ever."""


async def forever() -> None:
    await asyncio.Event().wait()


async def beaten(reader: Consumer, beats: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many heartbeats later."""
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) > beats:
            raise Ended

    with monkeypatch.context() as patch:
        patch.setattr("shared.bus.consumer.asyncio.sleep", sleep)
        with pytest.raises(Ended):
            await reader._beat_forever()
    assert waited == [3_600.0] * (beats + 1)


async def test_the_work_on_what_is_lost_is_ended_and_what_fails_is_tried_with_the_next_heartbeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = consumer()
    lost, waiting = delivery(reader), delivery(reader)
    lost.task = asyncio.create_task(forever())
    outcomes: list[Any] = [TransientError("away"), ReplyError("ERR x"), [waiting, lost], []]

    async def beat(slots: object) -> list[Delivery]:
        assert slots is reader.slots
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return list(outcome)

    monkeypatch.setattr(reader._claims, "beat", beat)
    await beaten(reader, 4, monkeypatch)
    await asyncio.wait([lost.task], timeout=5)
    assert (lost.task.cancelled(), outcomes) == (True, [])


async def test_what_is_beyond_a_limit_is_interrupted_and_given_back_when_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = consumer()
    ended, stubborn, unbegun = (Delivery(STREAM, f"{n}-1", [], 1, reader.slots) for n in range(3))
    ended.task, stubborn.task = asyncio.create_task(asyncio.sleep(0)), asyncio.create_task(forever())
    await ended.task
    said: list[Any] = []

    async def beat(_slots: object) -> list[Delivery]:
        return []

    async def interrupt(some: Sequence[Delivery], seconds: float) -> None:
        said.append((list(some), seconds))

    async def hand_back(some: Sequence[Delivery]) -> None:
        said.append(list(some))

    found = [[ended, stubborn, unbegun], []]
    monkeypatch.setattr(reader._claims, "beat", beat)
    monkeypatch.setattr(reader.slots, "beyond", lambda: found.pop(0))
    monkeypatch.setattr(reader, "_interrupt", interrupt)
    monkeypatch.setattr(reader._claims, "hand_back", hand_back)
    await beaten(reader, 2, monkeypatch)
    assert said == [([ended, stubborn, unbegun], 1_800.0), [ended]]
    stubborn.task.cancel()


@pytest.mark.parametrize(
    ("orphaned", "promised", "stopping", "ends"),
    [(True, 1, False, 1), (False, 1, False, 0), (True, 0, False, 0), (True, 1, True, 0)],
)
async def test_a_read_ends_for_what_is_to_be_taken_over(
    orphaned: bool, promised: int, stopping: bool, ends: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, ended = consumer(), list[bool]()

    async def beat(_slots: object) -> list[Delivery]:
        return []

    async def unblock() -> bool:
        ended.append(True)
        return True

    monkeypatch.setattr(reader._claims, "beat", beat)
    monkeypatch.setattr(reader._bus, "unblock", unblock)
    reader._claims.orphaned = {STREAM: True} if orphaned else {}
    reader.slots.promised, reader._stopping = promised, stopping
    await beaten(reader, 1, monkeypatch)
    assert len(ended) == ends


class Run:
    """A consumer's run, of which the test says when its parts end."""

    def __init__(self, reader: Consumer, monkeypatch: pytest.MonkeyPatch, *, ends: bool) -> None:
        self.did: list[str] = []
        self.stop = asyncio.Event()
        self.waits: list[float | None] = []
        self._ends = ends
        self._unblocked = asyncio.Event()
        self._reader = reader
        self._wait = asyncio.wait
        for name, part in (
            ("_begin", self.begin), ("_beat_forever", self.beat), ("_read_forever", self.read),
            ("_unblock", self.unblock), ("_leave", self.leave),
        ):  # fmt: skip
            monkeypatch.setattr(reader, name, part)
        monkeypatch.setattr("shared.bus.consumer.asyncio.wait", self.wait)

    async def wait(self, tasks: Any, *, timeout: float | None = None, return_when: str = asyncio.ALL_COMPLETED) -> Any:
        self.waits.append(timeout)
        # what does not end is not waited for that long here
        seconds = timeout if self._ends or timeout is None else 0.0
        return await self._wait(tasks, timeout=seconds, return_when=return_when)

    async def begin(self) -> None:
        self.did.append("begun")

    async def beat(self) -> None:
        try:
            await forever()
        finally:
            self.did.append("no heartbeat any more")

    async def read(self) -> None:
        try:
            # a full replica waits for room
            while not self._reader._stopping:
                self._reader.slots.changed.clear()
                await self._reader.slots.changed.wait()
            await self._unblocked.wait()
            for _ in range(5):
                await asyncio.sleep(0)
            self.did.append("the read has ended")
        except asyncio.CancelledError:
            self.did.append("the read is given up")
            raise

    async def unblock(self) -> bool:
        if not self._ends:
            await forever()
        self._unblocked.set()
        return True

    async def leave(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        self.did.append("left")


@pytest.mark.parametrize("ends", [True, False])
async def test_whoever_is_told_to_stop_reads_to_the_end_and_keeps_its_claims_until_it_has_left(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = consumer()
    run = Run(reader, monkeypatch, ends=ends)
    running = asyncio.create_task(reader.run(run.stop))
    for _ in range(10):
        await asyncio.sleep(0)
    assert (run.did, reader._stopping, running.done()) == (["begun"], False, False)
    run.stop.set()
    await asyncio.wait_for(running, 30)
    ended = "the read has ended" if ends else "the read is given up"
    assert run.did == ["begun", ended, "left", "no heartbeat any more"]
    # a read ends by itself after two seconds
    assert run.waits == [None, 2.5]


async def test_whoever_leaves_waits_for_what_is_worked_on_and_not_for_what_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = asking(Asked(), {STREAM: Route(nothing)}, drain=60)
    working, waiting = (Delivery(STREAM, f"{n}-1", [], 1, reader.slots) for n in range(2))
    left: list[str] = []

    async def work(one: Delivery) -> None:
        try:
            if one is waiting:
                await forever()
            for _ in range(5):
                await asyncio.sleep(0)
            left.append("done")
        except asyncio.CancelledError:
            left.append("ended")
            raise
        finally:
            reader.slots.give_back(one)

    async def hand_over() -> None:
        left.append("handed over")
        raise TransientError("the claims time out by themselves")

    for one in (working, waiting):
        reader.slots.take(one)
        one.task = asyncio.create_task(work(one))
    reader.slots.working.discard(waiting)
    monkeypatch.setattr(reader._claims, "hand_over", hand_over)
    await asyncio.sleep(0)
    await asyncio.wait_for(reader._leave(), 30)
    assert left == ["ended", "done", "handed over"]


async def test_nobody_who_leaves_waits_for_a_server_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = consumer()
    monkeypatch.setattr("shared.bus.consumer._HAND_OVER_SECONDS", 0.01)
    monkeypatch.setattr(reader._claims, "hand_over", forever)
    await asyncio.wait_for(reader._leave(), 30)


async def test_work_that_does_not_end_when_it_is_told_is_waited_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, go = consumer(), asyncio.Event()

    async def stubborn() -> None:
        while not go.is_set():
            try:
                await go.wait()
            except asyncio.CancelledError:
                continue

    one, unbegun = delivery(reader), delivery(reader)
    one.task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await reader._interrupt([unbegun])
    await reader._interrupt([unbegun, one], 0.01)
    assert not one.task.done()
    go.set()
    await reader._interrupt([one])
    assert one.task.done()
