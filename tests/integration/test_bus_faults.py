"""Tools go on by message after Redis was emptied."""

from __future__ import annotations

from pathlib import Path

import redis
from support.apps import ProbeSettings, probe
from support.services import announced, running
from support.waiting import eventually

from shared.participant.service import open_context
from shared.participant.tool_client import Caller, ToolClient


async def test_tools_answer_by_message_after_a_flush(redis_url: str, raw: redis.Redis, tmp_path: Path) -> None:
    settings = ProbeSettings(redis_url=redis_url, data_dir=tmp_path, heartbeat=0.5)
    async with running(probe, settings), open_context("asker", settings) as context:
        client, number = ToolClient(context), 0
        await announced(redis_url, "probe")

        def messages() -> int:
            """Return how many entries the inbox has had. A worker answers only to an inbox that exists."""
            return int(raw.xinfo_stream(context.inbox)["entries-added"]) if raw.exists(context.inbox) else 0

        async def answered() -> bool:
            nonlocal number
            number += 1
            before = messages()
            name = f"c{number}"
            answer = await client.call("probe", {"text": name}, call_id=name, caller=Caller("1-1"), timeout=3)
            assert answer.error in (None, "tool unavailable", "unknown tool: 'probe'")
            return answer.error is None and messages() > before > 0

        await eventually(answered)
        raw.flushall()
        await eventually(answered, 30)
