"""The slots of a consumer: limits, suspended entries, entries at their last attempt."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from support.slots import nothing_to_end, uncounted

from shared.bus.slots import Delivery, Limit, Slots

FREE, BOUND = "free", "bound"


def slots(size: int = 4, max_deliveries: int = 5, limit: Limit = 2) -> Slots:
    return Slots(size, {FREE: None, BOUND: limit}, max_deliveries, nothing_to_end, uncounted)


def held(of: Slots, entry_id: str, deliveries: int = 1, stream: str = FREE) -> Delivery:
    delivery = Delivery(stream, entry_id, [], deliveries, of)
    assert of.add(delivery)
    return delivery


async def test_entry_occupies_one_slot_until_it_is_removed() -> None:
    have = slots()
    first = held(have, "1-1")
    assert not have.add(Delivery(FREE, "1-1", [], 2, have))
    held(have, "1-1", stream=BOUND)
    assert have.free() == 2
    have.remove(first)
    assert have.free() == 3
    held(have, "1-1")


@pytest.mark.parametrize(("limit", "free"), [(None, None), (3, 1), (lambda: 3, 1), (lambda: None, None), (1, 0)])
async def test_stream_limit_counts_suspended_entries(limit: Limit, free: int | None) -> None:
    have = slots(limit=limit)
    suspended = held(have, "1-1", stream=BOUND)
    held(have, "1-1")
    async with suspended.suspended():
        held(have, "2-1", stream=BOUND)
        assert have.free_of(BOUND) == free


async def test_lowered_limit_selects_old_and_new_suspended_entries() -> None:
    limit = 10
    have = slots(size=10, limit=lambda: limit)
    held(have, "0-1")
    entries = [held(have, f"{number}-1", stream=BOUND) for number in range(6)]
    async with contextlib.AsyncExitStack() as stack:
        for one in entries[:4]:
            await stack.enter_async_context(one.suspended())
        assert have.over_limit() == []
        limit = 4
        assert have.over_limit() == [entries[0], entries[2]]
        # Entries with a slot are never selected.
        limit = 0
        assert have.over_limit() == entries[:4]


@pytest.mark.parametrize(
    ("max_deliveries", "deliveries", "free"), [(3, 2, 3), (3, 3, 0), (2, 2, 0), (1, 1, 3), (3, 4, 3)]
)
async def test_final_attempt_leaves_no_slot_free(max_deliveries: int, deliveries: int, free: int) -> None:
    have = slots(max_deliveries=max_deliveries)
    one = held(have, "1-1", deliveries)
    assert have.free() == free
    have.remove(one)
    assert have.free() == 4


async def test_entry_without_slot_waits_and_comes_before_new_entries() -> None:
    have = slots(size=1)
    working, waiting = held(have, "1-1"), held(have, "2-1")
    await working.acquire_slot()
    acquiring = asyncio.create_task(waiting.acquire_slot())
    await asyncio.sleep(0)
    assert (acquiring.done(), have.free()) == (False, -1)
    have.remove(working)
    await asyncio.wait_for(acquiring, 5)
    assert have.free() == 0


async def test_failing_wait_gives_the_slot_back() -> None:
    have = slots(size=1)
    one = held(have, "1-1")
    with pytest.raises(RuntimeError, match="no"):
        async with one.suspended():
            raise RuntimeError("no")
    assert have.free() == 0
