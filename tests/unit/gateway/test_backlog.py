"""The number of unfinished queries that a gateway compares with its limit."""

from __future__ import annotations

from services.gateway.http.gateway import Gateway
from shared.contracts import QUERY_RECEIVED


async def test_backlog_is_counted_anew_only_above_the_limit_or_when_unknown(gateway: Gateway) -> None:
    """Other gateways accept queries too, and generators finish some."""
    for number in range(1, 8):
        await gateway.bus.link.call("XADD", QUERY_RECEIVED.stream, f"{number}-0", "session_id", "s")
    assert await gateway.backlog(3) == 0
    gateway.accepted("chat", 3)
    assert await gateway.backlog(3) == 3
    gateway.accepted("chat", 4)
    assert await gateway.backlog(3) == 7


async def test_backlog_that_redis_cannot_count_is_counted_anew(gateway: Gateway) -> None:
    await gateway.bus.link.call("XADD", QUERY_RECEIVED.stream, "1-0", "session_id", "s")
    gateway.accepted("chat", None)
    assert await gateway.backlog(3) == 1
