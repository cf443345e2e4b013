"""mcp: the tools of MCP servers as tools on the bus."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import Any

import orjson
from pydantic import RootModel

from services.mcp.link import Link
from services.mcp.listing import Listed, Sorted, Waiting, pins, sorted_out
from services.mcp.settings import McpSettings
from shared.bus.keys import MCP_PINS
from shared.contracts import ToolRequest
from shared.errors import ToolError
from shared.participant.service import Context, Service, Work
from shared.participant.tool import Offered, Tool, ToolResult
from shared.telemetry.logging import get_logger

log = get_logger()

# So many of a server's tools that wait for a yes are shown in full: a registry entry is written with every heartbeat.
_SHOWN = 10


class Arguments(RootModel[dict[str, Any]]):
    """Whatever the model gave: the server checks it against its own schema."""


class Bridge:
    """All servers of the settings, and what of their tools is offered just now."""

    def __init__(self, context: Context[McpSettings]) -> None:
        self._context = context
        self.offered = Offered(context)
        self.links = {
            name: Link(name, server, lambda: context.settings, self.refresh)
            for name, server in context.settings.servers.items()
        }
        self._found: dict[str, Sorted] = {}
        self._turn = asyncio.Lock()

    async def refresh(self, _settings: McpSettings | None = None) -> None:
        """Offers what may be offered now, and tells the registry what is there and what is not."""
        async with self._turn:
            found = {name: await self._sorted(link) for name, link in self.links.items()}
            for name, one in found.items():
                _tell(name, one, self._found.get(name, Sorted()))
            self._found = found
            tools = [self._tool(self.links[name], tool) for name, one in found.items() for tool in one.offered]
            withdrawn = set(self.offered.current.runs) - {tool.name for tool in tools}
            new = self.offered.set(tools)
            self.offered.current.runs.update(dict.fromkeys(withdrawn, self._withdrawn))
            self._context.facts["mcp"] = [_fact(self.links[name], one) for name, one in found.items()]
            await self._context.serve(new)
        await self._context.announce()
        self.offered.announce()

    async def _sorted(self, link: Link) -> Sorted:
        if not link.tools:
            return Sorted()
        settings = self._context.settings
        return sorted_out(link.tools, link.server.allow, await self._pinned(link), settings.approved)

    async def _pinned(self, link: Link) -> dict[str, str]:
        """The server's tools as they were when it was first seen: by this replica, another one, or an earlier one."""
        seen = orjson.dumps(pins(link.tools))
        _, stored = await self._context.bus.link.pipe(
            [("HSETNX", MCP_PINS, link.name, seen), ("HGET", MCP_PINS, link.name)]
        )
        try:
            return {str(name): str(value) for name, value in orjson.loads(stored or seen).items()}
        except (orjson.JSONDecodeError, AttributeError):
            # nobody can say what was seen first: all of it waits for a yes
            log.error("mcp.pins_unreadable", server=link.name)
            return {}

    def _tool(self, link: Link, tool: Listed) -> Tool[Arguments]:
        async def run(args: Arguments, _request: ToolRequest) -> ToolResult:
            return await link.call(tool.name, args.root)

        timeout = self._context.settings.timeout
        return Tool(
            tool.function.name, Arguments, run, function=tool.function, timeout=timeout, read_only=tool.read_only
        )

    async def _withdrawn(self, _args: Arguments, request: ToolRequest) -> ToolResult:
        """A call that was on its way when its tool went."""
        server = self.links[request.tool.split("__")[0]]
        if server.state == "ready":
            raise ToolError("the tool has changed, and is not offered until an operator approves it")
        raise ToolError(f"mcp server {server.name} is away")


def _tell(server: str, now: Sorted, before: Sorted) -> None:
    """Says in the log what is not offered, once."""
    for waiting in now.waiting:
        if waiting not in before.waiting:
            name = waiting.tool.function.name
            log.warning(
                "mcp.tool_waits", server=server, tool=name, why=waiting.why, remedy=f"local2 mcp approve {name}"
            )
    for left_out in now.left_out:
        if left_out not in before.left_out:
            log.warning("mcp.tool_left_out", server=server, tool=left_out.tool, why=left_out.why)


def _fact(link: Link, found: Sorted) -> dict[str, Any]:
    """What `local2 mcp` and the API show of a server."""
    return {
        "server": link.name,
        "state": link.state,
        "reason": link.reason or None,
        "tools": [tool.function.name for tool in found.offered],
        "waiting": [_waits(one, shown=n < _SHOWN) for n, one in enumerate(found.waiting)],
        "left_out": [asdict(one) for one in found.left_out],
    }


def _waits(one: Waiting, *, shown: bool) -> dict[str, Any]:
    entry = {"tool": one.tool.function.name, "why": one.why, "hash": one.tool.hash}
    return {**entry, "function": one.tool.function.model_dump()} if shown else entry


@contextlib.asynccontextmanager
async def build(context: Context[McpSettings]) -> AsyncIterator[Sequence[Work]]:
    bridge = Bridge(context)
    context.on_settings(bridge.refresh)
    await bridge.offered.begin()
    context.facts["mcp"] = [_fact(link, Sorted()) for link in bridge.links.values()]
    if not bridge.links:
        log.warning("mcp.no_servers", remedy="name some under mcp: servers: in local2.yaml, or in LOCAL2_MCP_SERVERS")
    for name, link in bridge.links.items():
        context.supervise(f"mcp {name}", link.run, first_pause=context.settings.restart_seconds)
    try:
        yield []
    finally:
        await bridge.offered.current.close()


app = Service("mcp", McpSettings, build)
