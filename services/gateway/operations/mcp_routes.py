"""/mcp: the agent for programs that speak the Model Context Protocol, over streamable HTTP."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Header, Request, Response
from starlette.types import Message, Receive, Scope, Send

from services.gateway.http.auth import UserDep
from services.gateway.http.body import JsonRequest
from services.gateway.http.errors import ApiError
from services.gateway.http.gateway import Gateway, GatewayDep
from services.gateway.http.keys import Principal, digest
from services.gateway.openai.orphans import Orphans, OrphansDep
from services.gateway.queries.cancel import cancel_all
from services.gateway.settings import names_loopback
from shared.bus.keys import once_key
from shared.contracts import QUERY_RECEIVED

router = APIRouter(tags=["mcp"])

SESSION_HEADER = "mcp-session-id"
# As we make them: it becomes part of a key.
_LONGEST_SESSION = 64


@router.post("/mcp", summary="The Model Context Protocol, over streamable HTTP", include_in_schema=False)
async def mcp(
    request: Request,
    gateway: GatewayDep,
    user: UserDep,
    orphans: OrphansDep,
    origin: Annotated[str | None, Header()] = None,
    mcp_session_id: Annotated[str, Header()] = "",
    traceparent: Annotated[str | None, Header()] = None,
) -> Response:
    _check_origin(gateway, origin)
    read = JsonRequest(request.scope, request.receive)
    body = await read.body()
    try:
        message = await read.json()
    except orjson.JSONDecodeError as exc:
        raise ApiError(400, "bad_json", "the body could not be read as JSON") from exc
    message = message if isinstance(message, dict) else {}
    session = mcp_session_id[:_LONGEST_SESSION]
    if message.get("method") == "notifications/cancelled":
        await _cancel(gateway, user, session, message.get("params"))
    return _Answer(gateway, orphans, user, traceparent, body, session, message)


def _check_origin(gateway: Gateway, origin: str | None) -> None:
    """A page in somebody's browser must not speak to this through a name that it has pointed here."""
    if origin is not None and not names_loopback(origin) and origin not in gateway.settings.mcp_origins:
        raise ApiError(403, "forbidden", "requests of pages from there are refused; allow them with LOCAL2_MCP_ORIGINS")


async def _cancel(gateway: Gateway, user: Principal, session: str, params: Any) -> None:
    """Ends the run of a request, whichever gateway waits for it."""
    from services.gateway.operations.mcp_server import request_key

    request_id = params.get("requestId") if isinstance(params, dict) else None
    if not session or not isinstance(request_id, str | int):
        return
    once = digest(f"{user.user_id}\n{request_key(session, request_id)}")
    async with gateway.reachable():
        query_id = await gateway.bus.link.call("GET", once_key(QUERY_RECEIVED.stream, once))
        if query_id is not None:
            await cancel_all(gateway, [query_id.decode()])


class _Answer(Response):
    """Hands the request to the SDK's server, and gives a client that begins a session its name."""

    def __init__(
        self,
        gateway: Gateway,
        orphans: Orphans,
        user: Principal,
        traceparent: str | None,
        body: bytes,
        session: str,
        message: dict[str, Any],
    ) -> None:
        self._gateway = gateway
        self._orphans = orphans
        self._user = user
        self._traceparent = traceparent
        self._body = body
        self._session = session
        self._message = message
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from services.gateway.operations.mcp_server import Asking, request_key, serve

        request_id = self._message.get("id")
        # a session that we have not named may be another client's too
        key = request_key(self._session, request_id) if self._session and request_id is not None else None
        unread = [{"type": "http.request", "body": self._body, "more_body": False}]
        name = secrets.token_hex(16) if self._message.get("method") == "initialize" else None

        async def again() -> Message:
            return unread.pop() if unread else await receive()

        async def named(message: Message) -> None:
            if name is not None and message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (SESSION_HEADER.encode(), name.encode())]}
            await send(message)

        asking = Asking(self._user, key, self._traceparent)
        await serve(self._gateway, self._orphans, asking, scope, again, named)
