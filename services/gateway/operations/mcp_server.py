"""LoCAL2 as an MCP server: the agent and its tools, a user's sessions and memories.

Nothing is kept between two requests, so that any gateway answers any of them. What the SDK weighs is loaded by the
first request of the protocol.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

import mcp_types as types
import orjson
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel.server import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from services.gateway.http.body import MAX_BODY
from services.gateway.http.errors import ApiError, not_found
from services.gateway.http.gateway import Gateway
from services.gateway.http.keys import Principal
from services.gateway.http.participant_rpc import operate
from services.gateway.http.schemas import QueryBody
from services.gateway.http.session_ids import is_session_id
from services.gateway.openai.orphans import Orphans
from services.gateway.queries.accept import Ask, Origin, accept
from services.gateway.queries.cancel import cancel_all
from services.gateway.queries.query_routes import failure, loop_time_of, shown_result
from services.gateway.queries.records import QueryRecord, forgotten, own_session
from services.gateway.queries.sse import heard
from shared.bus.keys import journal_key
from shared.contracts import canonical_tool
from shared.errors import TransientError
from shared.participant.settings import describe
from shared.participant.tool_client import Caller
from shared.records import events
from shared.records.events import TERMINAL, Event
from shared.records.journal import JournalEntry
from shared.records.sessions import words_of

# Of the tools that are alive, those that MCP clients are offered.
TOOLS = (
    "search_memory",
    "search_documents",
    "search_knowledge_graph",
    "save_memory",
    "web_search",
    "web_fetch",
)
_SESSION, _ENGRAM = "local2://sessions/", "local2://engrams/"
_PAGE = 50
_PREVIEW = 200

Context = ServerRequestContext[Any, Any]

_ASK = types.Tool(
    name="ask",
    description="Ask the LoCAL2 assistant. It searches the web, reads pages, remembers and recalls by itself, and "
    "answers in text. Call it for a question that needs more than one of its tools, or its memory of the user.",
    input_schema={
        "type": "object",
        "properties": {
            "question": {"type": "string", "description": "What is asked, with all that must be known for it"},
            "session_id": {"type": "string", "description": "Goes on with this conversation; left out: a new one"},
        },
        "required": ["question"],
    },
)
_TEMPLATES = [
    types.ResourceTemplate(
        name="session", uri_template=_SESSION + "{session_id}", mime_type="application/json",
        description="A conversation of yours: its newest turns",
    ),
    types.ResourceTemplate(
        name="engram", uri_template=_ENGRAM + "{engram_id}", mime_type="application/json",
        description="Something that is remembered of you, with its grades",
    ),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Asking:
    """Who sent a request. `key`: makes it the same request wherever its cancellation comes in; None where a client
    has no session."""

    principal: Principal
    key: str | None
    traceparent: str | None


def request_key(session: str, request_id: object) -> str:
    """The Idempotency-Key of a request in a client's session."""
    return f"mcp:{session}:{request_id!r}"


async def serve(gateway: Gateway, orphans: Orphans, asking: Asking, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers one request of the protocol."""
    asked = McpServer(gateway, orphans, asking)
    # made for one request: it holds nothing but that, and ends with it
    manager = StreamableHTTPSessionManager(asked.server(), stateless=True, max_request_body_size=MAX_BODY)
    async with manager.run():
        await manager.handle_request(scope, receive, send)


class McpServer:
    def __init__(self, gateway: Gateway, orphans: Orphans, asking: Asking) -> None:
        self._gateway = gateway
        self._orphans = orphans
        self._asking = asking

    def server(self) -> Server[Any]:
        return Server(
            "LoCAL2",
            version="1",
            instructions="A local-first assistant. `ask` runs the whole agent; the other tools are its own.",
            on_list_tools=self.list_tools,
            on_call_tool=self.call_tool,
            on_list_resources=self.list_resources,
            on_list_resource_templates=self.list_templates,
            on_read_resource=self.read_resource,
        )

    @property
    def _user_id(self) -> str:
        return self._asking.principal.user_id

    # ── tools ────────────────────────────────────────────────────────────────────────────────────────────────

    async def list_tools(self, _ctx: Context, _params: Any) -> types.ListToolsResult:
        try:
            async with self._gateway.reachable():
                live = await self._gateway.tools.schemas()
        except TransientError as exc:
            raise _error(exc) from exc
        own = [
            types.Tool(
                name=name, description=live[name]["function"]["description"],
                input_schema=live[name]["function"]["parameters"],
            )
            for name in TOOLS if name in live
        ]  # fmt: skip
        return types.ListToolsResult(tools=[_ASK, *own])

    async def call_tool(self, ctx: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        """A refusal is a result too: the model that asked reads it."""
        args = params.arguments or {}
        try:
            if params.name == "ask":
                return await self._ask(ctx, args)
            if (tool := canonical_tool(params.name, args)) in TOOLS:
                with self._gateway.tool_call(self._user_id):
                    return await self._tool(tool, args)
        except ApiError as exc:
            wait = (exc.headers or {}).get("Retry-After")
            return _said(f"{exc.message}{f'; try again in {wait} s' if wait else ''}", is_error=True)
        except TransientError as exc:
            return _said(str(exc), is_error=True)
        raise MCPError(types.INVALID_PARAMS, f"unknown tool: {params.name}")

    async def _tool(self, name: str, args: dict[str, Any]) -> types.CallToolResult:
        """One call over the bus, without a model."""
        gateway = self._gateway
        async with gateway.reachable():
            timeout = await gateway.tools.patience(
                name, args, gateway.settings.tool_limit, gateway.settings.tool_timeout
            )
        async with gateway.reachable(extra=timeout):
            call_id = f"mcp:{uuid.uuid4().hex}"
            caller = Caller(
                call_id,
                user_id=self._user_id,
                deadline=gateway.bus.now_ms() + int(timeout * 1000),
                time_zone=self._asking.principal.time_zone or gateway.settings.zone,
            )
            calling = gateway.tools.call(name, args, call_id=call_id, caller=caller, timeout=timeout, attempt=1)
            found = await gateway.race(calling, _never())
        if found is None:
            raise _stopping()
        return _said(found.error if found.error is not None else found.result, is_error=found.error is not None)

    async def _ask(self, ctx: Context, args: dict[str, Any]) -> types.CallToolResult:
        if unknown := sorted(args.keys() - _ASK.input_schema["properties"].keys()):
            return _said(f"ask has no argument {', '.join(unknown)}", is_error=True)
        try:
            body = QueryBody(query=args.get("question"), session_id=args.get("session_id"))
        except ValidationError as exc:
            return _said(describe(exc).replace("query:", "question:"), is_error=True)
        asking = self._asking
        origin = Origin(asking.principal, asking.key, asking.traceparent)
        record = await accept(self._gateway, origin, Ask(query=body.query, session_id=body.session_id))
        try:
            shown = await self._gateway.race(self._answered(ctx, record), _never())
        except asyncio.CancelledError:
            await self._left(ctx, record)
            raise
        if shown is None:
            raise _stopping()
        if shown["state"] == "failed":
            raise failure(record, shown["error"])
        told = {"query_id": record.query_id, "session_id": record.session_id, "state": shown["state"]}
        if shown["state"] == "cancelled":
            return _said("the question was cancelled", is_error=True)
        return _said(shown["answer"], structured_content=told)

    async def _answered(self, ctx: Context, record: QueryRecord) -> dict[str, Any]:
        """The result, once it is there; meanwhile the client is told what is going on. Raises ApiError 504."""
        gateway = self._gateway
        until = loop_time_of(gateway, record)
        follower = gateway.journals.follow(journal_key(record.query_id, "A"), new=True)
        progress = _Progress()
        try:
            ended = False
            while not ended and (found := await heard(follower, until, gateway.settings.keepalive)) is not None:
                if not found and await forgotten(gateway, record.query_id):
                    raise not_found("query: it was deleted before it was answered")
                for entry in map(JournalEntry.parse, found):
                    if message := progress.told(entry.typed().event):
                        await ctx.session.report_progress(progress.steps, None, message)
                    ended = ended or entry.type in TERMINAL
        finally:
            follower.close()
        if not ended:
            raise ApiError(504, "deadline", "the question was not answered by its deadline")
        async with gateway.reachable():
            return await shown_result(gateway, record, "A")

    async def _left(self, ctx: Context, record: QueryRecord) -> None:
        """The client has closed the connection: by the newest protocol that is how it cancels; by those before, it may
        have lost it, and has a moment to ask the same again."""
        if self._gateway.stopping:
            return
        if ctx.protocol_version in MODERN_PROTOCOL_VERSIONS:
            await asyncio.shield(cancel_all(self._gateway, [record.query_id]))
        else:
            self._orphans.leave(record, None)

    # ── resources ────────────────────────────────────────────────────────────────────────────────────────────

    async def list_templates(self, _ctx: Context, _params: Any) -> types.ListResourceTemplatesResult:
        return types.ListResourceTemplatesResult(resource_templates=_TEMPLATES)

    async def list_resources(
        self, _ctx: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        """Sessions, the one used last first, then engrams, the newest first."""
        cursor = (params.cursor if params else None) or "sessions:0"
        kind, _, place = cursor.partition(":")
        try:
            if kind == "sessions" and place.isascii() and place.isdigit() and len(place) < 9:
                return await self._sessions(int(place))
            if kind == "engrams":
                return await self._engrams(place or None)
        except (ApiError, TransientError) as exc:
            raise _error(exc) from exc
        raise MCPError(types.INVALID_PARAMS, "the cursor is not one that this server has given")

    async def _sessions(self, offset: int) -> types.ListResourcesResult:
        async with self._gateway.reachable():
            found = await self._gateway.sessions.of_user(self._user_id, _PAGE, offset)
            memory = await self._gateway.context.registry.served("memory_manage") is not None
        more = "engrams:" if memory else None
        return types.ListResourcesResult(
            resources=[_resource(_SESSION, one.session_id, one.title or one.session_id) for one in found],
            next_cursor=f"sessions:{offset + _PAGE}" if len(found) == _PAGE else more,
        )

    async def _engrams(self, cursor: str | None) -> types.ListResourcesResult:
        page = await operate(self._gateway, "memory", self._user_id, op="list", limit=_PAGE, cursor=cursor)
        resources = [
            _resource(_ENGRAM, one["id"], str(one.get("query") or one.get("answer") or one["id"]))
            for one in page["engrams"]
            if _shown(one)
        ]
        next_cursor = f"engrams:{page['cursor']}" if page["cursor"] else None
        return types.ListResourcesResult(resources=resources, next_cursor=next_cursor)

    async def read_resource(self, _ctx: Context, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
        try:
            if params.uri.startswith(_SESSION):
                value = await self._session(unquote(params.uri.removeprefix(_SESSION)))
            elif params.uri.startswith(_ENGRAM):
                engram_id = unquote(params.uri.removeprefix(_ENGRAM))
                found = await operate(self._gateway, "memory", self._user_id, op="get", id=engram_id)
                value = found["engram"] if found["found"] and _shown(found["engram"]) else None
            else:
                value = None
        except (ApiError, TransientError) as exc:
            raise _error(exc) from exc
        if value is None:
            # also for somebody else's: their existence is not told
            raise MCPError(types.INVALID_PARAMS, f"there is no such resource: {params.uri[:_PREVIEW]}")
        text = orjson.dumps(value).decode()
        contents = types.TextResourceContents(uri=params.uri, mime_type="application/json", text=text)
        return types.ReadResourceResult(contents=[contents])

    async def _session(self, session_id: str) -> dict[str, Any] | None:
        gateway = self._gateway
        async with gateway.reachable():
            known = is_session_id(session_id)
            info = await own_session(gateway, self._asking.principal, session_id) if known else None
            if info is None:
                return None
            page = await gateway.sessions.page(info.session_id, "A", limit=1)
            said = await gateway.sessions.turns(info.session_id, "A", after=info.tip or None)
        turns = [
            {"query_id": turn.query_id, "query": words_of(turn.query), "answer": turn.answer, "time": turn.time}
            for turn in said
        ]
        return {"session_id": info.session_id, "title": info.title, "turns": turns, "total": page.total}


class _Progress:
    """What is worth a word of the events of a response. `steps`: how many were."""

    def __init__(self) -> None:
        self.steps = 0
        self._last = ""

    def told(self, event: Event) -> str:
        """One line; nothing when there is nothing new."""
        message = _line(event)
        if not message or message == self._last:
            return ""
        self._last = message
        self.steps += 1
        return message


def _line(event: Event) -> str:
    match event:
        case events.Claimed():
            return "begun"
        case events.ThinkingPiece():
            return "thinking"
        case events.AnswerPiece():
            return "answering"
        case events.Restarted():
            return "begun again"
        case events.ToolAsked(tool=tool, args=args):
            return f"{tool} {orjson.dumps(args).decode()}"[:_PREVIEW]
        case events.ToolAnswered(tool=tool, error=error):
            return f"{tool}: {error}"[:_PREVIEW] if error else f"{tool} has answered"
        case events.PersonaWorking(persona=persona):
            return f"{persona} deliberates"
        case _:
            return ""


def _said(text: str, **more: Any) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(text=text)], **more)


def _resource(prefix: str, name: str, title: str) -> types.Resource:
    short = " ".join(title.split())[:_PREVIEW]
    return types.Resource(name=name, title=short, uri=prefix + quote(name, safe=""), mime_type="application/json")


def _shown(engram: dict[str, Any]) -> bool:
    """Return whether the user saw this answer: respondent B's answers are for judging only."""
    return engram.get("respondent_id") != "B"


def _error(exc: ApiError | TransientError) -> MCPError:
    return MCPError(types.INTERNAL_ERROR, exc.message if isinstance(exc, ApiError) else str(exc))


def _stopping() -> ApiError:
    return ApiError(503, "stopping", "this gateway stops; ask again", {"Retry-After": "1"})


async def _never() -> None:
    await asyncio.Event().wait()
