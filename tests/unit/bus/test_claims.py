"""What keeping and taking over asks of the server, and what it makes of the replies."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.asked import Asked
from support.slots import uncounted

from shared.bus import Command, Delivery, Reply, ReplyError
from shared.bus.claims import Claims, Found
from shared.bus.scripts import HAND_OVER, KEEP
from shared.bus.slots import Slots
from shared.errors import Fenced

ONE, TWO = "local2:one", "local2:two"
# milliseconds after which nobody keeps an entry, with a heartbeat of ten seconds
IDLE = 30_000


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Asked:
    server = Asked()
    monkeypatch.setattr("shared.bus.claims.asyncio.get_running_loop", lambda: server)
    return server


def claims(server: Asked, streams: Sequence[str] = (ONE,)) -> Claims:
    return Claims(server.bus(), "g", "r1", streams, 10.0)


async def nothing_to_unblock() -> bool:
    return False


def slots(last: int = 3, size: int = 4) -> Slots:
    return Slots(size, {ONE: None, TWO: None}, last, nothing_to_unblock, uncounted)


def held(of: Slots, stream: str, entry_id: str, deliveries: int = 1) -> Delivery:
    delivery = Delivery(stream, entry_id, [], deliveries, of)
    assert of.take(delivery)
    return delivery


def keeping(stream: str, *ids: str) -> Command:
    return KEEP((stream,), "g", "r1", "handover", IDLE, *ids)


def rows(*pending: tuple[str, int]) -> Reply:
    """What XPENDING says of entries with their deliveries."""
    return [[entry_id.encode(), b"somebody", 5, deliveries] for entry_id, deliveries in pending]


def claimed(*ids: str) -> Reply:
    return [[entry_id.encode(), [b"payload", b"x"]] for entry_id in ids]


def found(entry_id: str, deliveries: int) -> Found:
    return Found(ONE, (entry_id, [b"payload", b"x"]), deliveries)


# ── keeping ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_heartbeat_renews_what_is_held_of_each_stream_and_tells_what_is_lost(server: Asked) -> None:
    mine, have = claims(server, (ONE, TWO)), slots()
    kept, lost, written = (held(have, *entry) for entry in ((ONE, "1-1"), (ONE, "2-1"), (TWO, "1-1")))
    written.settling = True
    # what is told of an entry that was given back meanwhile is nothing
    server.replies = [[0, 0, 0, [b"2-1", b"9-1"]], [0, 0, 0, [b"1-1"]]]
    assert await mine.beat(have) == [lost]
    assert server.heard() == [keeping(ONE, "1-1", "2-1"), keeping(TWO, "1-1")]
    assert [one.lost for one in (kept, lost, written)] == [False, True, False]
    assert mine.certain_until == 120.0
    server.now, server.replies = 107.0, [[0, 0, 0, []], [0, 0, 0, []]]
    assert await mine.beat(have) == []
    assert mine.certain_until == 127.0


async def test_what_is_held_of_what_is_no_stream_is_lost_and_the_others_are_kept(server: Asked) -> None:
    mine, have = claims(server, (ONE, TWO)), slots()
    lost, _ = held(have, ONE, "1-1"), held(have, TWO, "1-1")
    mine.broken.add(ONE)
    making = [("XGROUP", "CREATE", name, "g", "0", "MKSTREAM") for name in (ONE, TWO)]
    server.replies = [[ReplyError("WRONGTYPE x"), b"OK"], [0, 0, 0, []]]
    assert await mine.beat(have) == [lost]
    assert server.heard() == [making, keeping(TWO, "1-1")]
    # it is one again
    server.replies = [[b"OK", b"OK"], [0, 0, 0, [b"1-1"]], [0, 0, 0, []]]
    assert await mine.beat(have) == [lost]
    assert server.heard() == [making, keeping(ONE, "1-1"), keeping(TWO, "1-1")]
    assert mine.broken == set()


@pytest.mark.parametrize(
    ("watched", "left", "silent", "orphaned"),
    [
        (IDLE, 0, 0, {}),
        (IDLE - 1, 1, 0, {ONE: False}),
        (IDLE, 1, 0, {ONE: True}),
        (IDLE - 1, 0, 1, {}),
        (IDLE, 0, 1, {ONE: True}),
    ],
)
async def test_what_looks_silent_is_taken_over_by_whoever_has_watched_for_as_long(
    watched: int, left: int, silent: int, orphaned: dict[str, bool], server: Asked
) -> None:
    mine, have = claims(server), slots()
    for now in (1_000, 21_000):
        server.replies = [[now, 0, 1, []]]
        await mine.beat(have)
        assert mine.orphaned == {}
    server.replies = [[1_000 + watched, left, silent, []]]
    await mine.beat(have)
    assert mine.orphaned == orphaned


async def test_whoever_looks_less_often_than_every_two_heartbeats_has_not_watched(server: Asked) -> None:
    mine, have = claims(server), slots()
    for now in (1_000, 21_001, 31_001):
        server.replies = [[now, 0, 1, []]]
        await mine.beat(have)
        assert mine.orphaned == {}


async def test_after_a_pause_an_entry_is_ours_for_two_heartbeats_when_nobody_has_it(server: Asked) -> None:
    mine, have = claims(server), slots()
    one = held(have, ONE, "1-1")
    server.takes, server.replies = 3.0, [[0, 0, 0, []]]
    # counted from before it was asked
    assert await mine.ask(one) == 120.0
    assert server.heard() == [keeping(ONE, "1-1")]
    # what else is held is not renewed by that
    assert mine.certain_until == 0.0
    server.replies = [[0, 0, 0, [b"1-1"]]]
    with pytest.raises(Fenced, match="1-1 was taken over"):
        await mine.ask(one)


# ── taking over ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_what_got_lost_on_its_way_is_taken_up_with_the_deliveries_that_it_had(server: Asked) -> None:
    mine, have = claims(server), slots()
    held(have, ONE, "2-1")
    held(have, TWO, "3-1")
    server.replies = [rows(("1-1", 1), ("2-1", 1), ("3-1", 2), ("4-1", 1)), claimed("1-1", "4-1"), claimed("3-1")]
    assert await mine.unseen(ONE, "-", 7, have) == ([found("1-1", 1), found("4-1", 1), found("3-1", 2)], "(4-1")
    assert server.heard() == [
        ("XPENDING", ONE, "g", "-", "+", 7, "r1"),
        ("XCLAIM", ONE, "g", "r1", 0, b"1-1", b"4-1", "RETRYCOUNT", 1),
        ("XCLAIM", ONE, "g", "r1", 0, b"3-1", "RETRYCOUNT", 2),
    ]
    # somebody has taken it meanwhile
    server.replies = [rows(("5-1", 1)), []]
    assert await mine.unseen(ONE, "(4-1", 1, have) == ([], "(5-1")
    assert server.heard()[0] == ("XPENDING", ONE, "g", "(4-1", "+", 1, "r1")
    server.replies = [[]]
    assert await mine.unseen(ONE, "(5-1", 1, have) == ([], None)
    assert len(server.heard()) == 1


LEFT = ("XPENDING", ONE, "g", "-", "+", 3, "handover")
SILENT = ("XPENDING", ONE, "g", "IDLE", IDLE, "-", "+")


async def test_what_those_who_left_have_held_comes_first_and_then_what_nobody_keeps(server: Asked) -> None:
    mine, have = claims(server), slots(last=5)
    for now in (0, 15_000):
        server.replies = [[now, 0, 0, []]]
        await mine.beat(have)
    server.heard()
    server.replies = [rows(("3-1", 0)), claimed("3-1"), rows(("1-1", 1), ("2-1", 2)), [IDLE, 0, 1, []], claimed("2-1")]
    assert await mine.orphans(ONE, True, 3, have) == [found("3-1", 1), found("2-1", 3)]
    assert server.heard() == [
        LEFT,
        ("XCLAIM", ONE, "g", "r1", 0, b"3-1"),
        (*SILENT, 2),
        keeping(ONE),
        ("XCLAIM", ONE, "g", "r1", IDLE, b"1-1", b"2-1"),
    ]
    # as it turns out there was a pause, perhaps of everybody
    server.replies = [[], rows(("1-1", 1)), [3 * IDLE, 0, 1, []]]
    assert await mine.orphans(ONE, True, 3, have) == []
    assert server.heard() == [LEFT, (*SILENT, 3), keeping(ONE)]


@pytest.mark.parametrize(("watched", "left"), [(False, ["1-1"]), (True, ["1-1", "2-1", "3-1"])])
async def test_what_is_silent_is_not_looked_for_without_having_watched_or_without_room(
    watched: bool, left: list[str], server: Asked
) -> None:
    mine = claims(server)
    server.replies = [rows(*((entry_id, 0) for entry_id in left)), claimed(*left)]
    assert await mine.orphans(ONE, watched, 3, slots()) == [found(entry_id, 1) for entry_id in left]
    assert len(server.heard()) == 2


@pytest.mark.parametrize(
    ("last", "working", "pending", "taken"),
    [
        # the second comes to its last attempt: beside it only what is to be given up
        (3, None, [1, 2, 1, 2, 3, 4], [1, 2, 5, 6]),
        (3, None, [2, 2], [1]),
        (3, None, [2, 3, 1], [1, 2]),
        (2, None, [1, 0, 1, 2], [1, 4]),
        (3, 2, [1, 1], [1, 2]),
        (3, 3, [0, 2, 3, 5], [3, 4]),
        # where an entry is tried once only every attempt is the last, and none is tried alone
        (1, None, [0, 0, 1], [1, 2, 3]),
    ],
)
async def test_beside_what_is_at_its_last_attempt_only_what_is_to_be_given_up_is_taken(
    last: int, working: int | None, pending: list[int], taken: list[int], server: Asked
) -> None:
    mine, have = claims(server), slots(last)
    if working is not None:
        held(have, TWO, "1-1", working)
    # this is held already
    held(have, ONE, "9-1", 1)
    all_ = [(f"{place}-1", deliveries) for place, deliveries in enumerate(pending, 1)]
    expected = [(f"{place}-1", pending[place - 1] + 1) for place in taken]
    server.replies = [rows(("9-1", last), *all_), claimed(*(entry_id for entry_id, _ in expected))]
    assert await mine.orphans(ONE, False, 3, have) == [found(*one) for one in expected]
    assert server.heard()[1] == ("XCLAIM", ONE, "g", "r1", 0, *(entry_id.encode() for entry_id, _ in expected))


async def test_what_is_handed_back_is_anybodys_and_was_not_tried_for_that(server: Asked) -> None:
    mine, have = claims(server), slots()
    first, lost, second = held(have, ONE, "1-1", 1), held(have, ONE, "2-1", 2), held(have, TWO, "3-1", 3)
    lost.lost = True
    server.replies = [[]]
    await mine.hand_back([first, lost, second])
    assert server.heard() == [
        [
            ("XCLAIM", ONE, "g", "handover", 0, "1-1", "RETRYCOUNT", 0, "JUSTID"),
            ("XCLAIM", TWO, "g", "handover", 0, "3-1", "RETRYCOUNT", 2, "JUSTID"),
        ]
    ]


async def test_whoever_leaves_hands_over_until_nothing_is_left(server: Asked) -> None:
    mine = claims(server, (ONE, TWO))
    server.replies = [[500, 0], [3], [0]]
    await mine.hand_over()
    handing = [HAND_OVER((name,), "g", "r1", "handover") for name in (ONE, TWO)]
    assert server.heard() == [handing, handing[:1], handing[:1]]
    # a stream whose group has gone, or that is none, has nothing to hand over
    server.replies = [[ReplyError("NOGROUP it has gone"), 0]]
    await mine.hand_over()
    assert len(server.heard()) == 1
