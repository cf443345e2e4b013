"""Cancel queries."""

from __future__ import annotations

from services.gateway.http.gateway import Gateway
from shared.bus.keys import cancel_key
from shared.contracts import QUERY_CANCEL, QueryCancel

_CANCEL_SECONDS = 86_400


async def cancel_all(gateway: Gateway, query_ids: list[str]) -> None:
    """Announce the cancellation of queries, and store it for generators that are away."""
    bus = gateway.bus
    commands = []
    for query_id in query_ids:
        # one that was taken back stays so
        commands.append(("SET", cancel_key(query_id), "1", "NX", "EX", _CANCEL_SECONDS))
        commands.append(bus.publishing(QUERY_CANCEL.of(QueryCancel(query_id=query_id), correlation_id=query_id)))
    await bus.link.pipe(commands)
