"""Runs whose client has gone before the answer: stopped after a while, unless the same request comes again.

Programs close the connection when their user says stop, or when their own limit of time is over; then many of them ask
the same once more. The second request joins the run of the first.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Depends, Request

from services.gateway.http.gateway import Gateway
from services.gateway.queries.accept import Ask
from services.gateway.queries.cancel import cancel_all
from services.gateway.queries.records import QueryRecord
from shared.errors import TransientError
from shared.telemetry.logging import get_logger

log = get_logger()


# The user, what was asked, and of which model.
_Key = tuple[str, str, str | None]


class Orphans:
    """Of one gateway process: a request that comes again at another one begins a run of its own."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._waiting: dict[_Key, tuple[QueryRecord, asyncio.TimerHandle]] = {}
        self._stopping: set[asyncio.Task[None]] = set()

    def leave(self, record: QueryRecord, model: str | None) -> None:
        """The client of a run has gone. `model`: the one that it asked for."""
        seconds = self._gateway.settings.client_gone_seconds
        key = (record.user_id, record.asked, model)
        if seconds == 0 or self._gateway.stopping:
            return
        if (before := self._waiting.pop(key, None)) is not None:
            before[1].cancel()
            self._stop(before[0])
        timer = asyncio.get_running_loop().call_later(seconds, self._over, key)
        self._waiting[key] = record, timer

    def take(self, user_id: str, ask: Ask) -> QueryRecord | None:
        """The run of the same request that somebody has just left; it is somebody's again."""
        # what makes two requests the same is all that they say
        found = self._waiting.pop((user_id, ask.digest(), ask.model), None) if self._waiting else None
        if found is None:
            return None
        found[1].cancel()
        return found[0]

    def stop(self, session_id: str) -> None:
        """Nobody comes back for the runs that were left in a session."""
        for key, (record, timer) in list(self._waiting.items()):
            if record.session_id == session_id:
                timer.cancel()
                self._over(key)

    def _over(self, key: _Key) -> None:
        record, _ = self._waiting.pop(key)
        self._stop(record)

    def _stop(self, record: QueryRecord) -> None:
        task = asyncio.get_running_loop().create_task(self._cancel(record))
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    async def _cancel(self, record: QueryRecord) -> None:
        log.info("query.left", query_id=record.query_id)
        try:
            async with self._gateway.reachable():
                await cancel_all(self._gateway, [record.query_id])
        except TransientError as exc:
            log.warning("query.left_running", query_id=record.query_id, reason=str(exc))


async def orphans_of(request: Request) -> Orphans:
    orphans: Orphans = request.app.state.orphans
    return orphans


OrphansDep = Annotated[Orphans, Depends(orphans_of)]
