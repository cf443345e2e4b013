"""What happened in a query, from its session, or from its journal as long as that is there."""

from __future__ import annotations

import asyncio
from typing import Any

from services.gateway.http.gateway import Gateway
from services.gateway.queries.records import load
from services.gateway.queries.view import event_log
from shared.bus.keys import journal_key
from shared.records.folding import Folding
from shared.records.journal import read_journal
from shared.records.sessions import SessionInfo
from shared.records.steps import Told, read_steps


async def happened(gateway: Gateway, info: SessionInfo, query_id: str) -> dict[str, Any] | None:
    """Of a turn of the session, or of another query of it of which something is kept; None of any other."""
    turn, record = await asyncio.gather(gateway.sessions.turn(info.session_id, "A", query_id), load(gateway, query_id))
    told = await read_steps(gateway.bus, info.session_id, turn, query_id)
    there = record is not None and (record.session_id, record.user_id) == (info.session_id, info.user_id)
    if told is None and there:
        # it is not over
        journal = await read_journal(gateway.bus, journal_key(query_id, "A"))
        told = Told(Folding(journal).events(), [crossing for entry in journal for crossing in entry.crossings()])
    if told is None and turn is None:
        return None
    told = told or Told()
    return {
        "query_id": query_id,
        "session_id": info.session_id,
        "open_to_votes": there,
        "journal": [{"id": entry_id, "event": kind, "data": data} for entry_id, kind, data in told.events],
        "event_log": event_log(query_id, dict.fromkeys(told.crossed)),
    }
