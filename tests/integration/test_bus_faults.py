"""Tools go on by message after Redis was emptied."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis
from support.apps import ProbeSettings, probe
from support.services import announced, running

from shared.participant.service import open_context
from shared.participant.tool_client import Caller, ToolClient


async def test_tools_answer_by_message_again_after_a_flush(
    redis_url: str, raw: redis.Redis, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    look = ToolClient._look

    async def looking(client: ToolClient, call: Any) -> None:
        looked.append(call.call_id)
        await look(client, call)

    monkeypatch.setattr(ToolClient, "_look", looking)
    settings = ProbeSettings(redis_url=redis_url, data_dir=tmp_path, heartbeat=0.5)
    async with running(probe, settings), open_context("asker", settings) as context:
        client = ToolClient(context)
        await announced(redis_url, "probe")

        async def answered(n: int) -> bool:
            """By message, and not by looking the stored result up."""
            answer = await client.call("probe", {"text": f"t{n}"}, call_id=f"c{n}", caller=Caller("1-1"), timeout=3)
            assert answer.result == f"you said t{n}" or "unavailable" in answer.result or "unknown" in answer.result
            return answer.error is None and f"c{n}" not in looked

        await answered(0)
        raw.flushall()
        n = 1
        async with asyncio.timeout(60):
            while not await answered(n):
                n += 1
