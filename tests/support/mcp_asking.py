"""Calling the tools of MCP servers, and the settings of the participant that offers them."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import redis
from support.waiting import eventually

from services.mcp.settings import McpSettings
from shared.bus import Bus
from shared.bus.keys import settings_key
from shared.contracts import SETTINGS_UPDATE, SettingsUpdate, ToolResultMessage
from shared.participant.service import Context, open_context
from shared.participant.settings import Settings
from shared.participant.tool_client import Caller, ToolClient

SECRET = "sk-a-very-secret-key"


class Asker:
    """Calls tools as the generator does."""

    def __init__(self, context: Context[Settings]) -> None:
        self.context = context
        self.tools = ToolClient(context)
        self._count = 0

    async def call(self, tool: str, timeout: float = 20.0, query_id: str = "q-1", **args: Any) -> ToolResultMessage:
        self._count += 1
        call_id = f"c-{id(self)}-{self._count}"
        caller = Caller(query_id=query_id)
        return await self.tools.call(tool, args, call_id=call_id, caller=caller, timeout=timeout, attempt=1)

    async def offered(self) -> dict[str, Any]:
        await self.context.registry.replicas(fresh=True)
        return {name: one["function"] for name, one in (await self.tools.schemas()).items() if "__" in name}

    async def fact(self) -> dict[str, Any]:
        async def alone() -> list[Any] | None:
            there = [one for one in await self.context.registry.replicas(fresh=True) if one.participant == "mcp"]
            return there if len(there) == 1 else None

        # one that starved for a while, or has just left, is there again, or gone, a moment later
        (replica,) = await eventually(alone, what="there is one mcp")
        (server,) = replica.facts["mcp"]
        found: dict[str, Any] = server
        return found


@asynccontextmanager
async def asking(settings: Settings) -> AsyncIterator[Asker]:
    async with open_context("asker", settings) as context:
        yield Asker(context)


ENV = ["PYTHONPATH", "MCP_SERVER_FOLDER", "MCP_SERVER_SECRET"]


def mcp_settings(settings: Settings, **values: Any) -> McpSettings:
    server = {"command": [sys.executable, "-m", "support.mcp_server"], "env": ENV, **values.pop("server", {})}
    common = {
        "redis_url": settings.redis_url,
        "data_dir": settings.data_dir,
        "heartbeat": 0.2,
        "drain": 0.5,
        "restart_seconds": 0.1,
    }
    return McpSettings(**{**common, "log_level": "error", "servers": {"faulty": server}, **values})


async def change(bus: Bus, raw: redis.Redis, **values: Any) -> None:
    """What the gateway does when an operator changes settings."""
    raw.hset(settings_key("mcp"), mapping={name: orjson.dumps(value) for name, value in values.items()})
    await bus.publish(SETTINGS_UPDATE.of(SettingsUpdate(participant="mcp", values=values)))
