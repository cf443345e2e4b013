"""Deltas on their way into the journal: the first at once, then one write per interval, every byte in order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.generator.deltas import INTERVAL, Beat, DeltaPump
from shared.errors import Fenced
from shared.records.journal import EntryType

Items = Sequence[tuple[EntryType, dict[str, Any]]]


class Journal:
    """`writes` are (time, items); a write takes `seconds`."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.writes: list[tuple[float, list[tuple[EntryType, dict[str, Any]]]]] = []

    async def write(self, items: Items) -> None:
        self.writes.append((asyncio.get_running_loop().time(), list(items)))
        await asyncio.sleep(self.seconds)

    def text(self, kind: EntryType) -> str:
        return "".join(data["text"] for _, items in self.writes for what, data in items if what is kind)


async def test_the_first_delta_is_written_at_once_and_the_next_after_the_interval() -> None:
    journal = Journal()
    pump = DeltaPump(journal.write, {}, Beat())
    loop = asyncio.get_running_loop()
    running = asyncio.create_task(pump.run())
    await asyncio.sleep(0.05)
    began = loop.time()
    for number in range(60):
        pump.add(EntryType.ANSWER, f"{number} ")
        await asyncio.sleep(0.002)
    pump.finish()
    await running
    times = [at for at, _ in journal.writes]
    assert times[0] - began < INTERVAL * 0.9
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert all(gap >= INTERVAL * 0.95 for gap in gaps[:-1])
    assert len(gaps) >= 2
    assert journal.text(EntryType.ANSWER) == "".join(f"{number} " for number in range(60))


async def test_the_end_does_not_wait_for_the_interval() -> None:
    journal = Journal()
    pump = DeltaPump(journal.write, {}, Beat())
    running = asyncio.create_task(pump.run())
    pump.add(EntryType.ANSWER, "a")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert journal.text(EntryType.ANSWER) == "a"
    pump.add(EntryType.ANSWER, "b")
    pump.finish()
    before = asyncio.get_running_loop().time()
    await running
    assert asyncio.get_running_loop().time() - before < INTERVAL * 0.9
    assert journal.text(EntryType.ANSWER) == "ab"


async def test_what_arrives_while_a_write_is_under_way_is_written_next() -> None:
    journal = Journal(seconds=0.03)
    pump = DeltaPump(journal.write, {"persona": "p"}, Beat())
    running = asyncio.create_task(pump.run())
    pump.add(EntryType.THINKING, "t")
    await asyncio.sleep(0.01)
    pump.add(EntryType.THINKING, "u")
    pump.add(EntryType.ANSWER, "a")
    pump.add(EntryType.ANSWER, "b")
    pump.finish()
    await running
    assert [items for _, items in journal.writes] == [
        [(EntryType.THINKING, {"text": "t", "persona": "p"})],
        [(EntryType.THINKING, {"text": "u", "persona": "p"}), (EntryType.ANSWER, {"text": "ab", "persona": "p"})],
    ]


async def test_nothing_is_written_for_empty_text() -> None:
    journal = Journal()
    pump = DeltaPump(journal.write, {}, Beat())
    pump.add(EntryType.ANSWER, "")
    pump.finish()
    await pump.run()
    assert journal.writes == []


async def test_a_refused_write_is_raised() -> None:
    async def refuse(items: Items) -> None:
        raise Fenced("somebody else's")

    pump = DeltaPump(refuse, {}, Beat())
    pump.add(EntryType.ANSWER, "a")
    with pytest.raises(Fenced):
        await pump.run()


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([EntryType.THINKING, EntryType.ANSWER]), st.text(max_size=6), st.sampled_from([0, 0, 0.004])
        ),
        max_size=25,
    )
)
def test_every_byte_arrives_in_order(pieces: list[tuple[EntryType, str, float]]) -> None:
    journal = Journal()

    async def play() -> None:
        pump = DeltaPump(journal.write, {}, Beat())
        running = asyncio.create_task(pump.run())
        for kind, text, pause in pieces:
            pump.add(kind, text)
            await asyncio.sleep(pause)
        pump.finish()
        await running

    asyncio.run(play())
    wanted: list[tuple[EntryType, str]] = []
    for kind, text, _ in pieces:
        wanted.extend((kind, char) for char in text)
    assert [(kind, char) for _, items in journal.writes for kind, data in items for char in data["text"]] == wanted


async def test_answers_of_a_replica_write_together_and_each_begins_at_once() -> None:
    journals, beat = [Journal() for _ in range(4)], Beat()
    pumps = [DeltaPump(journal.write, {}, beat) for journal in journals]
    running = [asyncio.create_task(pump.run()) for pump in pumps]
    for pump in pumps[:3]:
        pump.add(EntryType.ANSWER, "a")
        await asyncio.sleep(0.001)
    assert [len(journal.writes) for journal in journals] == [1, 1, 1, 0]
    # one after the other, and told in one write
    for pump in pumps[:2]:
        pump.add(EntryType.ANSWER, "b")
        await asyncio.sleep(0.001)
    assert [len(journal.writes) for journal in journals] == [1, 1, 1, 0]
    until = asyncio.get_running_loop().time() + 10
    while len(journals[0].writes) < 2 and asyncio.get_running_loop().time() < until:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    first, second = (journal.writes[1][0] for journal in journals[:2])
    assert abs(first - second) < 0.001
    assert first - journals[2].writes[0][0] >= INTERVAL * 0.95
    # a newcomer waits for nobody, and nobody's text goes before it or later for it
    pumps[0].add(EntryType.ANSWER, "c")
    pumps[3].add(EntryType.ANSWER, "a")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [len(journal.writes) for journal in journals] == [2, 2, 1, 1]
    while len(journals[0].writes) < 3 and asyncio.get_running_loop().time() < until:
        await asyncio.sleep(0)
    assert journals[0].writes[2][0] - first >= INTERVAL * 0.95
    assert journals[0].writes[2][0] > journals[3].writes[0][0]
    for pump in pumps:
        pump.finish()
    await asyncio.gather(*running)
    assert [journal.text(EntryType.ANSWER) for journal in journals] == ["abc", "ab", "a", "a"]
