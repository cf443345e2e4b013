"""Deltas on their way into the journal: the first at once, then one write per interval, every byte in order."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.entries import data_of

from services.generator.deltas import INTERVAL, DeltaPump, FlushTimer, Kind
from shared.errors import Fenced
from shared.records.events import AnswerPiece, EntryType, ThinkingPiece
from shared.records.journal import Events, Sent


class Journal:
    """`writes` are (time, entries); a write is answered after `seconds`."""

    def __init__(self, seconds: float = 0.0, reply: object = b"1-1") -> None:
        self.seconds = seconds
        self.reply = reply
        self.writes: list[tuple[float, list[tuple[EntryType, dict[str, Any]]]]] = []

    def send(self, events: Events) -> Sent:
        loop = asyncio.get_running_loop()
        self.writes.append((loop.time(), [data_of(event) for event in events]))
        replies: asyncio.Future[list[Any]] = loop.create_future()
        loop.call_later(self.seconds, replies.set_result, [self.reply] * len(events))
        return Sent(events, [], replies)

    async def confirm(self, sent: Sent) -> None:
        await sent.replies
        if self.reply is None:
            raise Fenced("somebody else's")

    async def finish(self, pump: DeltaPump) -> None:
        """Writes the rest, as whoever adds does."""
        await pump.settle()
        if rest := pump.drain():
            await self.confirm(self.send(rest))

    def text(self, kind: EntryType) -> str:
        return "".join(data["text"] for _, items in self.writes for what, data in items if what is kind)


async def test_the_first_delta_is_written_at_once_and_the_next_after_the_interval() -> None:
    journal = Journal()
    pump = DeltaPump(journal, {}, FlushTimer())
    loop = asyncio.get_running_loop()
    await asyncio.sleep(0.05)
    began = loop.time()
    for number in range(60):
        pump.add(AnswerPiece, f"{number} ")
        await asyncio.sleep(0.002)
    await journal.finish(pump)
    times = [at for at, _ in journal.writes]
    assert times[0] - began < INTERVAL * 0.9
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert all(gap >= INTERVAL * 0.95 for gap in gaps[:-1])
    assert len(gaps) >= 2
    assert journal.text(EntryType.ANSWER) == "".join(f"{number} " for number in range(60))


async def test_the_end_does_not_wait_for_the_interval() -> None:
    journal = Journal()
    pump = DeltaPump(journal, {}, FlushTimer())
    pump.add(AnswerPiece, "a")
    assert journal.text(EntryType.ANSWER) == "a"
    pump.add(AnswerPiece, "b")
    before = asyncio.get_running_loop().time()
    await journal.finish(pump)
    assert asyncio.get_running_loop().time() - before < INTERVAL * 0.9
    assert journal.text(EntryType.ANSWER) == "ab"


async def test_what_arrives_while_a_write_is_under_way_is_written_next() -> None:
    journal = Journal(seconds=0.03)
    pump = DeltaPump(journal, {"persona": "p"}, FlushTimer())
    pump.add(ThinkingPiece, "t")
    await asyncio.sleep(0.01)
    pump.add(ThinkingPiece, "u")
    pump.add(AnswerPiece, "a")
    pump.add(AnswerPiece, "b")
    await journal.finish(pump)
    assert [items for _, items in journal.writes] == [
        [(EntryType.THINKING, {"text": "t", "persona": "p"})],
        [(EntryType.THINKING, {"text": "u", "persona": "p"}), (EntryType.ANSWER, {"text": "ab", "persona": "p"})],
    ]


async def test_nothing_is_written_for_empty_text() -> None:
    journal = Journal()
    pump = DeltaPump(journal, {}, FlushTimer())
    pump.add(AnswerPiece, "")
    await journal.finish(pump)
    assert journal.writes == []


async def test_a_refused_write_is_known_to_whoever_adds_and_raised() -> None:
    journal = Journal(reply=None)
    pump = DeltaPump(journal, {}, FlushTimer())
    pump.add(AnswerPiece, "a")
    assert not pump.refused
    await asyncio.sleep(2 * INTERVAL)
    pump.add(AnswerPiece, "b")
    assert pump.refused
    with pytest.raises(Fenced):
        await journal.finish(pump)
    assert len(journal.writes) == 1


async def test_what_was_refused_because_it_is_there_already_is_no_end() -> None:
    journal = Journal(reply=ValueError("its id is too small"))
    pump = DeltaPump(journal, {}, FlushTimer())
    pump.add(AnswerPiece, "a")
    await asyncio.sleep(2 * INTERVAL)
    pump.add(AnswerPiece, "b")
    assert pump.refused
    journal.reply = b"1-1"
    await journal.finish(pump)
    assert not pump.refused
    assert journal.text(EntryType.ANSWER) == "ab"


async def test_what_nobody_wants_any_more_is_not_written() -> None:
    journal, timer = Journal(), FlushTimer()
    pump = DeltaPump(journal, {}, timer)
    pump.add(AnswerPiece, "a")
    await asyncio.sleep(0.001)
    pump.add(AnswerPiece, "b")
    pump.drain()
    await asyncio.sleep(2 * INTERVAL)
    assert journal.text(EntryType.ANSWER) == "a"


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([ThinkingPiece, AnswerPiece]), st.text(max_size=6), st.sampled_from([0, 0, 0.004])),
        max_size=25,
    )
)
def test_every_byte_arrives_in_order(pieces: list[tuple[Kind, str, float]]) -> None:
    journal = Journal()

    async def play() -> None:
        pump = DeltaPump(journal, {}, FlushTimer())
        for kind, text, pause in pieces:
            pump.add(kind, text)
            await asyncio.sleep(pause)
        await journal.finish(pump)

    asyncio.run(play())
    wanted: list[tuple[EntryType, str]] = []
    for kind, text, _ in pieces:
        wanted.extend((kind.type, char) for char in text)
    assert [(kind, char) for _, items in journal.writes for kind, data in items for char in data["text"]] == wanted


async def test_answers_of_a_replica_write_together_and_each_begins_at_once() -> None:
    journals, timer = [Journal() for _ in range(4)], FlushTimer()
    pumps = [DeltaPump(journal, {}, timer) for journal in journals]
    for pump in pumps[:3]:
        pump.add(AnswerPiece, "a")
        await asyncio.sleep(0.001)
    assert [len(journal.writes) for journal in journals] == [1, 1, 1, 0]
    # one after the other, and told in one write
    for pump in pumps[:2]:
        pump.add(AnswerPiece, "b")
        await asyncio.sleep(0.001)
    assert [len(journal.writes) for journal in journals] == [1, 1, 1, 0]
    until = asyncio.get_running_loop().time() + 10
    while len(journals[0].writes) < 2 and asyncio.get_running_loop().time() < until:
        await asyncio.sleep(0)
    first, second = (journal.writes[1][0] for journal in journals[:2])
    assert abs(first - second) < 0.001
    assert first - journals[2].writes[0][0] >= INTERVAL * 0.95
    # a newcomer waits for nobody, and nobody's text goes before it or later for it
    pumps[0].add(AnswerPiece, "c")
    pumps[3].add(AnswerPiece, "a")
    assert [len(journal.writes) for journal in journals] == [2, 2, 1, 1]
    while len(journals[0].writes) < 3 and asyncio.get_running_loop().time() < until:
        await asyncio.sleep(0)
    assert journals[0].writes[2][0] - first >= INTERVAL * 0.95
    assert journals[0].writes[2][0] > journals[3].writes[0][0]
    for journal, pump in zip(journals, pumps, strict=True):
        await journal.finish(pump)
    assert [journal.text(EntryType.ANSWER) for journal in journals] == ["abc", "ab", "a", "a"]
