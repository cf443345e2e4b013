"""The summary of a session rests on its turns: it goes with them, and comes of nothing that is gone."""

from __future__ import annotations

import pytest

from shared.bus import Bus
from shared.bus.keys import summary_key
from shared.records.sessions import SessionInfo, Sessions, Turn
from shared.records.summaries import Summaries, Summary


def turn(n: int) -> Turn:
    return Turn(f"{1000 + n}-0", f"q{n}", f"a{n}", n)


TURNS = [turn(n) for n in range(6)]


@pytest.fixture
async def sessions(bus: Bus) -> Sessions:
    """One session `s` of user `u` with six turns, four of which are summarised."""
    found = Sessions(bus)
    await found.open("s", "u", "title")
    for one in TURNS:
        await bus.link.pipe(found.appending("s", "A", one))
    assert await Summaries(bus).keep("s", "u", None, TURNS[:2], "first")
    before = await Summaries(bus).read("s")
    assert before == Summary("1001-0", 2, "first")
    assert await Summaries(bus).keep("s", "u", before, TURNS[2:4], "second")
    return found


async def test_a_summary_takes_the_place_of_the_one_that_it_was_made_from(bus: Bus, sessions: Sessions) -> None:
    now = await Summaries(bus).read("s")
    assert now == Summary("1003-0", 4, "second")
    # the same again, by somebody who has taken it over
    assert not await Summaries(bus).keep("s", "u", Summary("1001-0", 2, "first"), TURNS[2:4], "other words")
    assert not await Summaries(bus).keep("s", "u", None, TURNS[:4], "other words")
    assert await Summaries(bus).read("s") == now
    # the turns are all there
    assert await sessions.turns("s", "A") == TURNS


async def test_summary_names_the_files_of_its_turns(bus: Bus) -> None:
    sessions = Sessions(bus)
    await sessions.open("f", "u", "title")
    one, two = {"id": "f1", "name": "a.png"}, {"id": "f2"}
    turns = [
        Turn(f"{1000 + n}-0", f"q{n}", f"a{n}", n, attachments=files)
        for n, files in enumerate([(one,), (), (two, one), (two,)])
    ]
    for one_turn in turns:
        await bus.link.pipe(sessions.appending("f", "A", one_turn))
    assert await Summaries(bus).keep("f", "u", None, turns[:2], "first")
    before = await Summaries(bus).read("f")
    assert before == Summary("1001-0", 2, "first", (one,))
    assert await Summaries(bus).keep("f", "u", before, turns[2:3], "second")
    # Each file once, at its last place.
    assert await Summaries(bus).read("f") == Summary("1002-0", 3, "second", (two, one))
    # A summary of another conversation of the session.
    assert await Summaries(bus).keep("f", "u", None, turns[:2], "again", await Summaries(bus).read("f"))
    assert await Summaries(bus).read("f") == Summary("1001-0", 2, "again", (one,))


async def test_nothing_comes_of_turns_or_sessions_that_are_gone(bus: Bus, sessions: Sessions) -> None:
    now = await Summaries(bus).read("s")
    assert not await Summaries(bus).keep("s", "u", now, [TURNS[4], turn(9)], "of a turn that is not there")
    assert not await Summaries(bus).keep("s", "eve", now, TURNS[4:], "of another user")
    assert not await Summaries(bus).keep("t", "u", None, TURNS[4:], "of a session that is not there")
    assert await bus.link.call("EXISTS", summary_key("t")) == 0


@pytest.mark.parametrize(
    ("gone", "added", "stays"),
    [
        (["1000-0"], [], False),
        (["1003-0"], [], False),
        (["1005-0"], [], True),
        ([], [Turn("1001-5", "between", "them", 1)], False),
        ([], [Turn("1004-5", "after", "it", 1)], True),
        (["1004-0"], [Turn("1004-1", "1000-0", "an id as a text", 1)], True),
    ],
)
async def test_a_turn_that_is_edited_away_takes_the_summary_with_it(
    gone: list[str], added: list[Turn], stays: bool, bus: Bus, sessions: Sessions
) -> None:
    await sessions.bring("s", gone, added)
    assert (await Summaries(bus).read("s") is not None) == stays


async def test_a_deleted_session_has_no_summary(bus: Bus, sessions: Sessions) -> None:
    info = await sessions.info("s")
    assert isinstance(info, SessionInfo)
    await sessions.delete(info)
    assert await bus.link.call("EXISTS", summary_key("s")) == 0


async def test_a_summary_that_cannot_be_read_is_none(bus: Bus, sessions: Sessions) -> None:
    await bus.link.call("HSET", summary_key("s"), "until", "yesterday")
    assert await Summaries(bus).read("s") is None
