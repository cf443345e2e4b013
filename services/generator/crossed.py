"""Which entries of the bus are a response's: its calls and their results, its cancellation, and what an earlier owner
published without having noted it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from shared.bus import Bus, Command, ReplyError, order
from shared.bus.keys import stream_key
from shared.bus.scripts import FIND_BY_TEXT
from shared.contracts import AGENT_TRANSITION, QUERY_CANCEL, TOOL_REQUEST, TOOL_RESULT, canonical_tool
from shared.envelope import Envelope
from shared.errors import DecodeError
from shared.participant.tool_client import Caller, Trail
from shared.records.journal import EntryType, Expected, JournalEntry, JournalWriter
from shared.telemetry.logging import get_logger

log = get_logger()

# A worker answers its asker and tells observers in one write: the result is among the next entries of its stream.
_NEAR = 20
# What is not there is looked for in pages, and given up after so many of them.
_PAGE, _PAGES = 200, 50
# By so much the clocks of a cluster's nodes may differ (ms).
_SKEW = 2_000
_END = f"{2**64 - 1}-0"


@dataclass(frozen=True, slots=True)
class _Sought:
    """A result whose entry is not known yet. since: it is not older than this id."""

    place: Expected
    text: str
    since: str
    looking: asyncio.Future[list[Any]]


class Crossed:
    """Notes in its journal which messages of a response are on the bus."""

    def __init__(self, bus: Bus, writer: JournalWriter, caller: Caller) -> None:
        self._bus = bus
        self._writer = writer
        self._caller = caller
        self._sought: list[_Sought] = []

    def call(self, tool: str, call_id: str, trail: Trail, request_id: str) -> None:
        """A call that has ended. request_id: which request its result says that it answers.

        Nobody waits for it: where the result stands among the messages is kept, and under which id is known later.
        """
        asked = [request_id, *trail.requests] if request_id else trail.requests
        for entry_id in asked:
            self._writer.note(f"{TOOL_REQUEST.name}.{tool}", entry_id)
        if trail.answer is None:
            return
        place = self._writer.expect(f"{TOOL_RESULT.name}.{tool}")
        text = f'"{call_id}"'
        if trail.answer:
            ms, _ = order(trail.answer)
            since, near = f"{max(0, ms - _SKEW)}-0", f"{ms}-0"
        else:
            since = near = self._caller.query_id
        look = (*_mentioning(place.subject, near, text, _NEAR), "FIRST")
        looking = asyncio.ensure_future(self._bus.link.submit([look], True))
        looking.add_done_callback(partial(self._looked, place))
        self._sought.append(_Sought(place, text, since, looking))

    def _looked(self, place: Expected, looking: asyncio.Future[list[Any]]) -> None:
        if looking.cancelled() or looking.exception() is not None:
            return
        (reply,) = looking.result()
        if not isinstance(reply, ReplyError) and len(reply) > 1:
            self._writer.fill(place, reply[1].decode())

    async def settle(self) -> None:
        """Looks once more for every result whose entry was not found at once. To be called before the end is written;
        what is nowhere is left out."""
        for sought in self._sought:
            if not sought.looking.done():
                await asyncio.wait([sought.looking])
            if not sought.place.entry_id:
                async for entry_id in self._mentions(sought.place.subject, sought.since, sought.text):
                    self._writer.fill(sought.place, entry_id)
                    break
        self._sought.clear()

    async def cancelled(self) -> None:
        """Notes by which message the query was cancelled."""
        query_id = self._caller.query_id
        async for entry_id in self._mentions(QUERY_CANCEL.name, query_id, f'"{query_id}"'):
            self._writer.note(QUERY_CANCEL.name, entry_id)

    async def found(self, before: Sequence[JournalEntry]) -> None:
        """Notes what an earlier owner published and died before it could note it. before: what is in the journal."""
        known = self._writer.crossed
        states = sum(entry.type is EntryType.STATE for entry in before)
        steps = [crossing.entry_id for crossing in known if crossing.subject == AGENT_TRANSITION.name]
        if len(steps) < states:
            await self._find(AGENT_TRANSITION.name, steps[-1] if steps else self._caller.query_id)
        for tool in dict.fromkeys(_asked(entry) for entry in before if entry.type is EntryType.TOOL_REQUEST):
            for subject in (f"{TOOL_REQUEST.name}.{tool}", f"{TOOL_RESULT.name}.{tool}"):
                await self._find(subject, self._caller.query_id)

    async def _find(self, subject: str, since: str) -> None:
        stream = stream_key(subject)
        async for entry_id in self._mentions(subject, since, self._caller.query_id):
            for entry in await self._bus.range(stream, entry_id, entry_id):
                if self._ours(subject, entry):
                    self._writer.note(subject, entry_id)

    def _ours(self, subject: str, entry: tuple[str, list[bytes]]) -> bool:
        try:
            envelope = Envelope.parse(subject, *entry)
        except DecodeError:
            return False
        asked = (envelope.correlation_id, envelope.respondent_id)
        return asked == (self._caller.query_id, self._caller.respondent_id)

    async def _mentions(self, subject: str, since: str, text: str) -> AsyncIterator[str]:
        """The entries of a subject from an id on in which a text occurs, oldest first."""
        after = since
        for _ in range(_PAGES):
            try:
                found = await self._bus.link.call(*_mentioning(subject, after, text, _PAGE))
            except ReplyError as exc:
                # whatever stands in the stream's place, an answer does not fail by it
                log.warning("bus.not_looked_up", subject=subject, reason=str(exc))
                return
            for entry_id in found[1:]:
                yield entry_id.decode()
            if not (after := found[0].decode()):
                return


def _mentioning(subject: str, since: str, text: str, count: int) -> Command:
    return FIND_BY_TEXT((stream_key(subject),), since, _END, text, count)


def _asked(entry: JournalEntry) -> str:
    """The tool that a request of a journal went to."""
    value = entry.value()
    args = value.get("args")
    return canonical_tool(str(value.get("tool")), args if isinstance(args, dict) else {})
