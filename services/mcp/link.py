"""One MCP server: connected as long as it answers, begun again when it does not."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Literal

from mcp.client import Client, Transport
from mcp.client.session import IncomingMessage
from mcp.client.subscriptions import SubscriptionLost
from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED, Implementation, ToolListChangedNotification
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError

from services.mcp import http, stdio
from services.mcp.listing import Listed, listed
from services.mcp.results import tool_result
from services.mcp.secrets import Secrets
from services.mcp.settings import McpSettings, Server
from services.mcp.stdio import Trouble
from shared.errors import ToolError, TransientError
from shared.participant.tool import ToolResult
from shared.telemetry.logging import get_logger

log = get_logger()

# How often a server is asked for its tools that does not say when they change, and how often at most one that does.
_LOOK_SECONDS = 60.0
_AT_MOST_EVERY = 0.5
_MOST_PAGES = 20
# What is known of each is written to the registry; only a hundred of them could be offered.
MOST_LISTED = 1_000
_LONGEST_REASON = 500
_LONGEST_ERROR = 4_000

State = Literal["starting", "ready", "away"]


class Away(TransientError):
    """The server cannot be reached; it is tried again."""


class Link:
    """The connection with one server.

    tools: what the server lists; empty while it cannot be started. reason: why it is away.
    changed: called when `tools` or `state` has changed.
    """

    def __init__(
        self, name: str, server: Server, settings: Callable[[], McpSettings], changed: Callable[[], Awaitable[None]]
    ) -> None:
        self.name = name
        self.server = server
        self.state: State = "starting"
        self.reason = ""
        self.tools: Sequence[Listed] = ()
        self._settings = settings
        self._changed = changed
        self._client: Client | None = None
        self._secrets: Secrets | None = None
        self._trouble = Trouble()
        # whether it is known if the server is there: not while it is being started
        self._known = asyncio.Event()
        self._look = asyncio.Event()

    # ── the connection ───────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Keeps the connection until it breaks. Raises Away with the reason, always: whoever calls it begins again."""
        was_ready = False
        try:
            secrets = self._secrets = Secrets(self.server, os.environ)
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(self._settings().start_seconds):
                    client, ended, why = await stack.enter_async_context(self._opened(secrets))
                    await self._list(client)
                was_ready = True
                try:
                    await self._ready(client)
                    await self._stay(client, ended)
                finally:
                    # before it is closed, which takes its time
                    self._drop(client)
                reason = why()
        except TimeoutError:
            reason = "it does not answer in time"
        except Exception as exc:
            # whatever a server and the libraries between us make of it: the next try may go better
            reason = (not was_ready and _refusal(self._trouble.refused)) or _leaf(exc)
        self.state = "away"
        self.reason = (self._secrets.masked(reason) if self._secrets else reason)[:_LONGEST_REASON]
        if not was_ready:
            # one that only has to be started again is back in a moment, and calls wait for it
            self.tools = ()
            self._known.set()
        await self._changed()
        raise Away(f"mcp server {self.name} is away: {self.reason}")

    @contextlib.asynccontextmanager
    async def _opened(self, secrets: Secrets) -> AsyncIterator[tuple[Client, asyncio.Event, Callable[[], str]]]:
        """A session; the event is set when the server's program has ended, and what is called then says why."""
        ended = asyncio.Event()
        trouble = self._trouble = Trouble()
        server = self.server
        async with contextlib.AsyncExitStack() as stack:
            transport: Transport
            if server.url:
                headers = {name: secrets.put_in(value) for name, value in server.headers.items()}
                address = secrets.put_in(server.url)
                transport = await stack.enter_async_context(http.connected(address, headers, trouble))
                why = _not_ended
            else:
                command = [secrets.put_in(part) for part in server.command]
                environment = secrets.of(server.env)
                starting = stdio.started(command, environment, secrets.masked, ended, trouble)
                streams, why = await stack.enter_async_context(starting)
                transport = contextlib.nullcontext(streams)
            try:
                client = Client(transport, message_handler=self._hear, client_info=_WE, cache=None)
                yield await stack.enter_async_context(client), ended, why
            except Exception as exc:
                if not ended.is_set():
                    raise
                # it says more than that the connection is closed
                raise Away(why()) from exc

    async def _ready(self, client: Client) -> None:
        self._client = client
        self.state, self.reason = "ready", ""
        self._known.set()
        log.info("mcp.connected", server=self.name, tools=len(self.tools))
        await self._changed()

    def _drop(self, client: Client) -> None:
        """No call is given to it any more."""
        if self._client is client:
            self._client = None
            self._known.clear()

    async def _stay(self, client: Client, ended: asyncio.Event) -> None:
        """Hears of changes until the server is gone."""
        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task(ended.wait()), group.create_task(_listen(client, self._look))]
            try:
                while not ended.is_set():
                    looking = group.create_task(self._look.wait())
                    waiting.append(looking)
                    await asyncio.wait({waiting[0], looking}, timeout=_LOOK_SECONDS, return_when="FIRST_COMPLETED")
                    looking.cancel()
                    waiting.pop()
                    if ended.is_set():
                        break
                    self._look.clear()
                    before = self.tools
                    async with asyncio.timeout(self._settings().start_seconds):
                        await self._list(client)
                    if self.tools != before:
                        log.info("mcp.tools_changed", server=self.name, tools=len(self.tools))
                        await self._changed()
                    await asyncio.sleep(_AT_MOST_EVERY)
            finally:
                for task in waiting:
                    task.cancel()

    async def _list(self, client: Client) -> None:
        """Takes note of all tools that the server has. Raises Away for one that floods."""
        assert self._secrets is not None
        found: list[Listed] = []
        cursor: str | None = None
        for _ in range(_MOST_PAGES if client.server_capabilities.tools is not None else 0):
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                told = self._secrets.masked_in([tool.description or "", tool.input_schema])
                read_only = tool.annotations is not None and tool.annotations.read_only_hint is True
                found.append(listed(self.name, tool.name, *told, read_only=read_only))
            if len(found) > MOST_LISTED:
                raise Away(f"it lists more than {MOST_LISTED} tools")
            cursor = page.next_cursor
            if not cursor:
                break
        self.tools = found

    async def _hear(self, message: IncomingMessage) -> None:
        if isinstance(message, ToolListChangedNotification):
            self._look.set()

    # ── calls ────────────────────────────────────────────────────────────────────────────────────────────────

    async def call(self, tool: str, args: dict[str, Any]) -> ToolResult:
        """Runs a tool, by the server's name of it. Raises ToolError; a cancelled call is cancelled at the server."""
        settings = self._settings()
        until = asyncio.get_running_loop().time() + settings.timeout
        client, secrets, trouble = await self._connection(until), self._secrets, self._trouble
        assert secrets is not None
        try:
            async with asyncio.timeout_at(until):
                answer = await client.call_tool(tool, args)
        except TimeoutError as exc:
            raise ToolError(f"timeout after {settings.timeout:g}s: mcp server {self.name} has not answered") from exc
        except MCPError as exc:
            if exc.code == CONNECTION_CLOSED or client is not self._client:
                self._drop(client)
                self._look.set()
                raise self._away(trouble.text) from exc
            raise ToolError(secrets.masked(exc.message)[:_LONGEST_ERROR]) from exc
        except (RuntimeError, ValidationError) as exc:
            # an answer against the server's own schema, or one that asks for something back
            reason = secrets.masked(_leaf(exc))[:_LONGEST_REASON]
            raise ToolError(f"mcp server {self.name} answered what cannot be used: {reason}") from exc
        return tool_result(answer, secrets, settings.max_bytes)

    async def _connection(self, until: float) -> Client:
        """Raises ToolError when there is none until then (loop time)."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._known.wait()
        if self._client is None:
            raise self._away()
        return self._client

    def _away(self, why: str = "") -> ToolError:
        return ToolError(f"mcp server {self.name} is away{f': {why}' if why else ''}")


_WE = Implementation(name="LoCAL2", version="1")


def _not_ended() -> str:
    return "the connection has ended"


async def _listen(client: Client, look: asyncio.Event) -> None:
    """Hears of changes from a server that tells them on a stream of their own, as the newest protocol has it."""
    if client.protocol_version not in MODERN_PROTOCOL_VERSIONS:
        return
    # without it the tools are looked at now and then
    with contextlib.suppress(MCPError, SubscriptionLost, TimeoutError):
        async with client.listen(tools_list_changed=True) as events:
            async for _event in events:
                look.set()


def _refusal(status: int | None) -> str:
    """What a server has said by a status of HTTP; the SDK's error does not tell it."""
    hint = ": look at the key in its headers" if status in (401, 403) else ""
    return f"it answers with status {status}{hint}" if status else ""


def _leaf(exc: BaseException) -> str:
    """The text of an error, or of the first one in a group."""
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    return " ".join(str(exc).split()) or type(exc).__name__
