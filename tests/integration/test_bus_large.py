"""Large messages over slow lines: limits of time count progress, and signs of life do not wait behind them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import redis
from support.apps import ProbeSettings, probe
from support.consuming import GROUP, STREAM, consuming
from support.proxy import Proxy
from support.services import announced, running
from support.waiting import eventually

from shared.bus import Delivery
from shared.contracts import DEAD_LETTER, ToolResultMessage
from shared.participant.service import open_context
from shared.participant.tool_client import Caller, ToolClient


class Breaking(Proxy):
    """Something on the way that cannot bear large messages."""

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, path: Any, *, replies: bool
    ) -> None:
        seen = 0
        while data := await source.read(65_536):
            seen += 0 if replies else len(data)
            await asyncio.sleep(len(data) / self.rate if self.rate else 0)
            if seen > 2_000_000:
                break
            sink.write(data)
            await sink.drain()
        raise EOFError


async def test_what_cannot_be_written_takes_nothing_else_along(redis_url: str, raw: redis.Redis) -> None:
    """Effects of one loop tick leave together."""
    together = asyncio.Barrier(2)

    async def handler(delivery: Delivery) -> list[Any]:
        await together.wait()
        name = delivery.fields[1].decode()
        return [("SET", name, "x" * (4_000_000 if name == "large" else 1))]

    async with Breaking(redis_url) as proxy:
        raw.xadd(STREAM, {"name": "large"})
        raw.xadd(STREAM, {"name": "small"})
        async with consuming(proxy.url, handler, heartbeat=5.0, timeout=0.5):
            await eventually(lambda: raw.xlen(DEAD_LETTER.stream))
            await eventually(lambda: raw.get("small"))
            await eventually(lambda: raw.xpending(STREAM, GROUP)["pending"] == 0)
    (letter,) = raw.xrange(DEAD_LETTER.stream)
    assert b"broke the connection to Redis" in letter[1][b"payload"]
    assert b'"large"' in letter[1][b"payload"]


async def test_what_breaks_the_connection_later_than_its_claim_is_certain_ends_with_a_reason_too(
    redis_url: str, raw: redis.Redis
) -> None:
    async def handler(delivery: Delivery) -> list[Any]:
        name = delivery.fields[1].decode()
        return [("SET", name, "x" * (4_000_000 if name == "large" else 1))]

    async with (
        Breaking(redis_url, rate=4_000_000) as proxy,
        consuming(proxy.url, handler, heartbeat=0.2, timeout=0.5),
    ):
        raw.xadd(STREAM, {"name": "large"})
        raw.xadd(STREAM, {"name": "small"})
        await eventually(lambda: raw.xlen(DEAD_LETTER.stream), 30.0)
        await eventually(lambda: raw.xpending(STREAM, GROUP)["pending"] == 0)
    assert raw.get("small") == b"x"
    ((_, letter),) = raw.xrange(DEAD_LETTER.stream)
    assert b"broke the connection to Redis" in letter[b"payload"]


async def test_a_call_that_cannot_be_sent_is_answered_and_those_beside_it_are_made(
    redis_url: str, tmp_path: Path
) -> None:
    settings = ProbeSettings(redis_url=redis_url, data_dir=tmp_path, heartbeat=0.5, drain=1.0)
    async with running(probe, settings), Breaking(redis_url) as proxy:
        await announced(redis_url, "probe")
        async with open_context("asker", settings.model_copy(update={"redis_url": proxy.url})) as context:
            client = ToolClient(context)
            await eventually(client.schemas)

            async def ask(text: str) -> ToolResultMessage:
                call = client.call(
                    "probe", {"text": text}, call_id=text[:5], caller=Caller("1-1"), timeout=8, attempt=1
                )
                return await call

            large, small = await asyncio.gather(ask("x" * 4_000_000), ask("small"))
            assert small.result == "you said small"
            assert large.error is not None
            assert "broke the connection to Redis" in large.error
