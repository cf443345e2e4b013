"""The conversations of all users."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from services.gateway.backup.section import KeptHere, Tally
from services.gateway.queries.deletion import delete_sessions
from shared.participant.backup import Record
from shared.records.session_records import (
    SessionRecord,
    read_sessions,
    session_ids,
    write_sessions,
)

# Sessions are read so many at a time: most are small, a few may have megabytes.
_PAGE = 16
# Sessions per batch of a deletion: each batch reads all streams once.
_BATCH = 32


class SessionsSection(KeptHere):
    """A record is one session with turns of both respondents; of a long session there are several, with the next turns
    each."""

    name = "sessions"
    version = 1

    async def export(self) -> AsyncIterator[Sequence[Record]]:
        bus = self._gateway.bus
        async for ids in session_ids(bus):
            for start in range(0, len(ids), _PAGE):
                async for records in read_sessions(bus, ids[start : start + _PAGE]):
                    yield records

    def check(self, record: Record) -> None:
        SessionRecord.model_validate(record)

    async def empty(self) -> bool:
        async for ids in session_ids(self._gateway.bus):
            if ids:
                return False
        return True

    async def clear(self) -> AsyncIterator[int]:
        gateway = self._gateway
        async for ids in session_ids(gateway.bus):
            for start in range(0, len(ids), _BATCH):
                infos = [await gateway.sessions.info(one) for one in ids[start : start + _BATCH]]
                there = [info for info in infos if info is not None]
                if there:
                    await delete_sessions(gateway, there)
                yield len(there)

    async def write(self, records: Sequence[Record], tally: Tally) -> None:
        sessions = [SessionRecord.model_validate(record) for record in records]
        for session, added in zip(sessions, await write_sessions(self._gateway.bus, sessions), strict=True):
            if added < 0:
                tally.skip(f"session {session.session_id} belongs to another user here")
            elif added or not any(session.turns.values()):
                tally.written += 1
            else:
                tally.kept += 1
