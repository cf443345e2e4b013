"""What entries have caused is written with their acknowledgements: together where it can be, and told to each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from structlog.contextvars import get_contextvars
from support.slots import uncounted

from shared.bus import TOGETHER, BusFull, Command, ConnectionLost, Delivery, Reply, ReplyError
from shared.bus.keys import nothing_key
from shared.bus.settling import EffectRefused, Settling
from shared.bus.slots import Slots
from shared.errors import PermanentError
from shared.telemetry.logging import bind_ids

STREAM = "local2:tool.request.probe"


async def _nothing_to_unblock() -> bool:
    return False


def delivery(entry_id: str = "1-1", stream: str = STREAM, broken: int = 0) -> Delivery:
    return Delivery(stream, entry_id, [], 1, Slots(1, {stream: None}, 3, _nothing_to_unblock, uncounted), broken=broken)


class Writing:
    """The connection, as settling sees it: each commit is answered by the test."""

    one_server = True

    def __init__(self) -> None:
        self.commits: list[tuple[list[Command], asyncio.Future[list[Reply]]]] = []
        self.untils: list[float | None] = []

    def commit(
        self, commands: Sequence[Command], *, until: float | None = None, retry: bool = True
    ) -> asyncio.Future[list[Reply]]:
        future: asyncio.Future[list[Reply]] = asyncio.get_running_loop().create_future()
        self.commits.append((list(commands), future))
        self.untils.append(until)
        return future


class OneBus:
    def __init__(self) -> None:
        self.link = Writing()


async def test_an_entry_is_being_settled_from_the_moment_it_is_handed_in_until_the_outcome_is_known() -> None:
    """Meanwhile it may not be pending any more: whoever renews claims must not take it for lost."""
    bus = OneBus()
    one, told = delivery(), list[Any]()
    settling = Settling(bus, "g", lambda *what: told.append(what))  # type: ignore[arg-type]
    settling.settle(one, [("SET", "a", "b")], 1.0)
    assert one.settling
    await asyncio.sleep(0)
    ((commands, future),) = bus.link.commits
    assert commands == [("SET", "a", "b"), ("XACK", STREAM, "g", "1-1")]
    assert one.settling
    future.set_result([b"OK", 1])
    await asyncio.sleep(0)
    assert not one.settling
    assert told == [(one, [("SET", "a", "b")], None)]


class Settler:
    """Entries that are settled; what became of each by its id."""

    def __init__(self) -> None:
        self.bus = OneBus()
        self.told: dict[str, BaseException | None] = {}
        self._settling = Settling(self.bus, "g", lambda what, _, outcome: self.told.update({what.entry_id: outcome}))  # type: ignore[arg-type]

    def settles(
        self, entry_id: str, *effects: Command, until: float = 1.0, stream: str = STREAM, broken: int = 0
    ) -> None:
        self._settling.settle(delivery(entry_id, stream, broken), effects, until)

    async def commits(self) -> list[list[Command]]:
        """What was written since, and is still to be answered."""
        await asyncio.sleep(0)
        return [commands for commands, future in self.bus.link.commits if not future.done()]

    async def answer(self, outcome: list[Reply] | BaseException | None) -> None:
        """Of the first write that waits; None: it was given up."""
        future = next(future for _, future in self.bus.link.commits if not future.done())
        if outcome is None:
            future.cancel()
        elif isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
        await asyncio.sleep(0)


A, B, C = (("SET", name, "x") for name in "abc")


async def test_what_one_tick_settles_is_one_write_with_the_acknowledgements_last() -> None:
    on = Settler()
    on.settles("1-1", A, B, until=5.0)
    on.settles("2-1", until=3.0)
    on.settles("1-2", C, until=4.0, stream="other")
    acknowledged = [("XACK", STREAM, "g", "1-1", "2-1"), ("XACK", "other", "g", "1-2")]
    assert await on.commits() == [[A, B, C, *acknowledged]]
    # nothing may be written when the first of them may not be any more
    assert on.bus.link.untils == [3.0]
    on.settles("3-1")
    assert (await on.commits())[1:] == [[("XACK", STREAM, "g", "3-1")]]
    await on.answer([b"OK", b"OK", b"OK", 2, 1])
    assert on.told == {"1-1": None, "2-1": None, "1-2": None}


async def test_what_a_tick_brings_is_settled_so_many_at_a_time_each_entry_once() -> None:
    """Redis begins on the first of them while the next ones are being worked on."""
    on = Settler()
    for number in range(2 * TOGETHER + 3):
        on.settles(f"{number}-1", A)
    assert len(on.bus.link.commits) == 2
    sizes = [TOGETHER, TOGETHER, 3]
    written = await on.commits()
    assert [len(commands) - 1 for commands in written] == sizes
    everything = [f"{number}-1" for number in range(2 * TOGETHER + 3)]
    assert [entry_id for commands in written for entry_id in commands[-1][3:]] == everything
    for size in sizes:
        await on.answer([b"OK"] * size + [size])
    assert on.told == dict.fromkeys(everything)
    assert len(on.bus.link.commits) == 3


async def test_an_effect_that_is_refused_is_told_to_its_entry_alone() -> None:
    on = Settler()
    on.settles("1-1", A)
    on.settles("2-1", B, C)
    on.settles("3-1", A, B)
    on.settles("4-1")
    await on.commits()
    await on.answer([b"OK", b"OK", ReplyError("WRONGTYPE no"), ReplyError("ERR first"), ReplyError("ERR later"), 4])
    assert on.told["1-1"] is on.told["4-1"] is None
    assert [type(on.told[name]) for name in ("2-1", "3-1")] == [EffectRefused, EffectRefused]
    # the first of them says why
    assert [str(on.told[name]) for name in ("2-1", "3-1")] == ["WRONGTYPE no", "ERR first"]


async def test_of_what_is_refused_together_each_is_tried_alone() -> None:
    for refusal in (BusFull("OOM"), ReplyError("WRONGTYPE"), PermanentError("too large")):
        on = Settler()
        on.settles("1-1", A)
        on.settles("2-1", B)
        await on.commits()
        await on.answer(refusal)
        assert await on.commits() == [[A, ("XACK", STREAM, "g", "1-1")], [B, ("XACK", STREAM, "g", "2-1")]]
        assert on.told == {}
        await on.answer(refusal)
        await on.answer([b"OK", 1])
        assert on.told == {"1-1": refusal, "2-1": None}


async def test_what_became_of_a_write_that_was_cut_off_is_not_known_of_any() -> None:
    for cut, kind in ((None, ConnectionLost), (ConnectionLost("gone"), ConnectionLost)):
        on = Settler()
        on.settles("1-1", A)
        on.settles("2-1", B)
        await on.commits()
        await on.answer(cut)
        assert [type(outcome) for outcome in on.told.values()] == [kind, kind]
        assert await on.commits() == []


@pytest.mark.parametrize("one_server", [True, False])
async def test_what_has_broken_a_connection_takes_nothing_else_along(one_server: bool) -> None:
    on = Settler()
    on.bus.link.one_server = one_server
    on.settles("1-1", A)
    on.settles("2-1", B, broken=1)
    on.settles("3-1", C)
    alone = [[command, ("XACK", STREAM, "g", name)] for name, command in (("1-1", A), ("2-1", B), ("3-1", C))]
    together = [alone[1], [A, C, ("XACK", STREAM, "g", "1-1", "3-1")]]
    assert await on.commits() == (together if one_server else alone)


async def test_a_full_redis_refuses_a_script_with_all_that_it_stands_in() -> None:
    on = Settler()
    script = ("EVALSHA", "sha", 1, "key")
    on.settles("1-1", A)
    on.settles("2-1", script)
    nothing = ("SET", nothing_key(STREAM), "", "XX")
    alone = Settler()
    alone.settles("1-1", script)
    assert await alone.commits() == [[script, nothing, ("XACK", STREAM, "g", "1-1")]]
    assert await on.commits() == [[A, script, nothing, ("XACK", STREAM, "g", "1-1", "2-1")]]


@pytest.mark.parametrize("entries", [1, TOGETHER])
async def test_what_one_entry_says_of_itself_in_what_it_logs_is_said_of_no_other(entries: int) -> None:
    bus, ids = OneBus(), list[Any]()
    settling = Settling(bus, "g", lambda *_: ids.append(get_contextvars()))  # type: ignore[arg-type]

    async def settles() -> None:
        bind_ids({"query_id": "7-0"})
        for number in range(entries):
            settling.settle(delivery(f"{number}-1"), [], 1.0)

    await asyncio.create_task(settles())
    await asyncio.sleep(0)
    bus.link.commits[0][1].set_result([entries])
    await asyncio.sleep(0)
    assert ids == [{}] * entries
