"""What a replica holds, and the room that is left."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from support.slots import uncounted

from shared.bus.slots import Delivery, Slots

FREE, BOUND = "free", "bound"


async def nothing_to_unblock() -> bool:
    return False


def slots(size: int = 4, last: int = 5) -> Slots:
    return Slots(size, {FREE: None, BOUND: 2}, last, nothing_to_unblock, uncounted)


def taken(of: Slots, entry_id: str, deliveries: int = 1, stream: str = FREE) -> Delivery:
    delivery = Delivery(stream, entry_id, [], deliveries, of)
    assert of.take(delivery)
    return delivery


async def test_an_entry_is_held_once_and_takes_a_slot_until_it_is_given_back() -> None:
    have = slots()
    first = taken(have, "1-1")
    assert not have.take(Delivery(FREE, "1-1", [], 2, have))
    taken(have, "1-1", stream=BOUND)
    assert have.room() == 2
    have.changed.clear()
    have.give_back(first)
    assert have.room() == 3
    assert have.changed.is_set()
    taken(have, "1-1")


async def test_a_stream_with_a_limit_leaves_room_for_the_others_parked_entries_included() -> None:
    have = slots(size=10)
    assert (have.room_of(FREE), have.room_of(BOUND)) == (None, 2)
    have.limits |= {"asked": lambda: 3, "asked without": lambda: None}
    assert (have.room_of("asked"), have.room_of("asked without")) == (3, None)
    parked = taken(have, "1-1", stream=BOUND)
    taken(have, "1-1", stream=FREE)
    assert have.room_of(BOUND) == 1
    async with parked.parked():
        assert have.room_of(BOUND) == 1
        taken(have, "2-1", stream=BOUND)
        taken(have, "3-1", stream=BOUND)
        # one too many, as after a takeover, is not less than none
        assert have.room_of(BOUND) == 0


async def test_what_waits_beyond_a_limit_that_became_lower_is_told_of_the_old_and_the_new() -> None:
    most = 10
    have = Slots(10, {FREE: None, BOUND: lambda: most}, 5, nothing_to_unblock, uncounted)
    taken(have, "0-1", stream=FREE)
    parked = [taken(have, f"{number}-1", stream=BOUND) for number in range(6)]
    async with contextlib.AsyncExitStack() as stack:
        for one in parked[:4]:
            await stack.enter_async_context(one.parked())
        assert have.waiting() == parked[:4]
        assert have.beyond() == []
        most = 4
        assert have.beyond() == [parked[0], parked[2]]
        # what is being worked on is not taken out of its hands
        most = 0
        assert have.beyond() == parked[:4]


async def test_an_entry_at_its_last_attempt_leaves_no_room_beside_it() -> None:
    have = slots(last=3)
    before = taken(have, "1-1", deliveries=2)
    assert not have.last_chance
    assert have.room() == 3
    last = taken(have, "2-1", deliveries=3)
    assert have.last_chance
    assert have.room() == 0
    have.give_back(last)
    assert (have.last_chance, have.room()) == (False, 3)
    have.give_back(before)
    twice = slots(last=2)
    taken(twice, "1-1", deliveries=2)
    assert twice.last_chance
    # where an entry is tried once only, every attempt is the last
    once = slots(last=1)
    taken(once, "1-1", deliveries=1)
    assert not once.last_chance
    assert once.room() == 3


async def test_a_limit_that_is_just_reached_leaves_nothing_beyond_it() -> None:
    for limit in (2, lambda: 2):
        have = Slots(10, {FREE: None, BOUND: limit}, 5, nothing_to_unblock, uncounted)
        other, first = taken(have, "1-1"), taken(have, "1-1", stream=BOUND)
        async with other.parked(), first.parked():
            taken(have, "2-1", stream=BOUND)
            assert have.beyond() == []
            taken(have, "3-1", stream=BOUND)
            assert have.beyond() == [first]


async def test_who_has_a_slot_keeps_it_and_who_has_none_waits_for_one() -> None:
    have = slots(size=1)
    working, waiting = taken(have, "1-1"), taken(have, "2-1")
    have.changed.clear()
    await working.slot()
    assert (have.working, have.changed.is_set()) == ({working}, False)
    going_on = asyncio.create_task(waiting.slot())
    while not have.wanted:
        await asyncio.sleep(0)
    assert have.working == {working}
    have.give_back(working)
    await asyncio.wait_for(going_on, 5)
    assert have.working == {waiting}


async def test_what_is_parked_gives_its_slot_away_and_waits_for_one_to_go_on() -> None:
    have = slots(size=1)
    parked = taken(have, "1-1")
    back = asyncio.Event()

    async def wait() -> None:
        have.changed.clear()
        async with parked.parked():
            # while it waits its slot is somebody else's, who is told of it
            assert have.changed.is_set()
            assert have.room() == 1
            taken(have, "2-1")
        back.set()

    waiting = asyncio.create_task(wait())
    while not have.wanted:
        await asyncio.sleep(0)
    assert not back.is_set()
    # it comes before new entries
    other = have.held[FREE, "2-1"]
    assert have.room() == -1
    have.give_back(other)
    await asyncio.wait_for(waiting, 5)
    assert (have.room(), have.wanted, have.working) == (0, 0, {parked})


async def test_a_read_that_waits_gives_back_the_slots_that_it_was_promised() -> None:
    asked = 0

    async def unblock() -> bool:
        nonlocal asked
        asked += 1
        # it has ended with nothing
        have.promised = 0
        have.changed.set()
        return True

    have = Slots(2, {FREE: None}, 5, unblock, uncounted)
    parked = taken(have, "1-1")
    async with asyncio.timeout(5), parked.parked():
        have.promised = 2
    assert asked == 1
    assert have.working == {parked}


async def test_a_read_that_does_not_wait_in_redis_ends_by_itself_and_is_waited_for() -> None:
    asked = 0

    async def unblock() -> bool:
        nonlocal asked
        asked += 1
        assert asked < 100, "it is asked without end, and can never end"
        asyncio.get_running_loop().call_soon(ended)
        return False

    def ended() -> None:
        have.promised = 0

    have = Slots(1, {FREE: None}, 5, unblock, uncounted)
    parked = taken(have, "1-1")
    async with asyncio.timeout(5), parked.parked():
        have.promised = 1
    assert (asked, have.working) == (1, {parked})


async def test_a_read_that_was_begun_meanwhile_gives_back_what_it_was_promised_too() -> None:
    asked = 0

    async def unblock() -> bool:
        nonlocal asked
        asked += 1
        if asked == 2:
            have.promised = 0
            have.changed.set()
        return True

    have = Slots(1, {FREE: None}, 5, unblock, uncounted)
    parked = taken(have, "1-1")
    async with asyncio.timeout(5), parked.parked():
        have.promised = 1
    assert (asked, have.working) == (2, {parked})


async def test_an_entry_whose_waiting_fails_is_worked_on_again() -> None:
    have = slots(size=1)
    parked = taken(have, "1-1")
    with pytest.raises(RuntimeError, match="no"):
        async with parked.parked():
            raise RuntimeError("no")
    assert have.working == {parked}
    assert have.wanted == 0


async def test_a_read_that_ends_as_it_is_ended_keeps_nobody_waiting() -> None:
    async def unblock() -> bool:
        # its reader has had its answer first, and found no room
        slots.promised = 0
        slots.changed.set()
        slots.changed.clear()
        return True

    slots = Slots(1, {}, 3, unblock, uncounted)
    slots.promised = 1
    await asyncio.wait_for(slots.free_one(), 10)
    assert (slots.wanted, slots.promised) == (0, 0)
