"""The record of a query: its journal as its session stores it, and its messages on the bus."""

from __future__ import annotations

import asyncio
from typing import Any

from services.gateway.http.gateway import Gateway
from services.gateway.queries.records import load
from shared.bus import Bus, order
from shared.bus.keys import journal_key, stream_key
from shared.records.compaction import compacted
from shared.records.event_log import messages_of
from shared.records.journal import read_journal
from shared.records.response_state import replay
from shared.records.sessions import SessionInfo
from shared.records.steps import read_steps


async def read_event_log(bus: Bus, query_id: str) -> list[dict[str, Any]]:
    """Return the messages of a query that are on the bus, as clients get them. The caller checks the query's owner."""
    accepted, _ = order(query_id)
    return [
        {
            "subject": subject,
            "t": max(0, order(entry_id)[0] - accepted) / 1000,
            "stream": stream_key(subject),
            "id": entry_id,
        }
        for subject, entry_id in await messages_of(bus, query_id)
    ]


async def happened(gateway: Gateway, info: SessionInfo, query_id: str) -> dict[str, Any] | None:
    """Return the record of a turn or another query of the session; None if nothing is stored."""
    turn, record = await asyncio.gather(gateway.sessions.turn(info.session_id, "A", query_id), load(gateway, query_id))
    events = await read_steps(gateway.bus, info.session_id, turn, query_id)
    there = record is not None and (record.session_id, record.user_id) == (info.session_id, info.user_id)
    if events is None and there:
        # Its record is stored at its end.
        journal = await read_journal(gateway.bus, journal_key(query_id, "A"))
        events = compacted(replay(entry.typed() for entry in journal))
    if events is None and turn is None:
        return None
    return {
        "query_id": query_id,
        "session_id": info.session_id,
        "open_to_votes": there,
        "journal": [{"id": entry_id, "event": kind, "data": data} for entry_id, kind, data in events or ()],
    }
