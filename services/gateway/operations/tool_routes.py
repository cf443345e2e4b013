"""The live tools, and calling one without a model."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Request, Response

from services.gateway.http.auth import UserDep
from services.gateway.http.body import JsonRoute
from services.gateway.http.errors import ApiError, not_found
from services.gateway.http.gateway import Gateway, GatewayDep
from services.gateway.http.json_response import reply
from services.gateway.http.keys import Principal
from services.gateway.http.schemas import ToolCallBody, spec
from services.gateway.operations.operator_shapes import ToolAnswer, ToolList
from services.gateway.queries.sse import gone
from shared.contracts import ToolResultMessage, canonical_tool
from shared.participant.tool_client import Caller

router = APIRouter(route_class=JsonRoute, tags=["tools"])

_TOOL = {
    "type": "function",
    "function": {"name": "web_search", "description": "Search the web.", "parameters": {"type": "object"}},
}
_RESULT: dict[str, Any] = {
    "result": "Today's date: 2026-06-01",
    "error": None,
    "data": {"hits": []},
    "duration_ms": 210,
}


@router.get("/tools", summary="The tools that are alive, as the model sees them",
            responses=spec("Live tools", ToolList, {"tools": [_TOOL]}, 503))  # fmt: skip
async def list_tools(gateway: GatewayDep, _user: UserDep) -> Response:
    async with gateway.reachable():
        schemas = await gateway.tools.schemas()
    return reply({"tools": [schemas[name] for name in sorted(schemas)]})


@router.post(
    "/tools/{name}/call",
    summary="Call one tool over the bus; what goes wrong inside it is its `error`",
    responses=spec("The tool's result", ToolAnswer, _RESULT, 400, 404, 415, 422, 429, 503),
)
async def call_tool(request: Request, name: str, body: ToolCallBody, gateway: GatewayDep, user: UserDep) -> Response:
    with gateway.tool_call(user.user_id):
        outcome = await _outcome(request, name, body, gateway, user)
    if outcome is None:
        raise ApiError(503, "stopping", "this gateway stops; call the tool again")
    return reply(
        {
            "result": outcome.result,
            "error": outcome.error,
            "data": outcome.data,
            "duration_ms": outcome.duration_ms,
        }
    )


async def _outcome(
    request: Request, name: str, body: ToolCallBody, gateway: Gateway, user: Principal
) -> ToolResultMessage | None:
    """Return the result of a call, or None when the client has gone or the gateway stops. Raises ApiError."""
    tool, settings = canonical_tool(name, body.args), gateway.settings
    async with gateway.reachable():
        timeout = await gateway.tools.patience(tool, body.args, settings.tool_limit, settings.tool_timeout)
    async with gateway.reachable(extra=timeout):
        registry = gateway.context.registry
        served = await registry.served(tool)
        if served is None or served.get("internal"):
            # what is served, but not to users, is not there for them
            if served is not None or not await registry.known(tool):
                raise not_found("tool")
            await gateway.check_room()
            raise ApiError(503, "tool_unavailable", f"no worker of {tool} is running", {"Retry-After": "5"})
        call_id = f"http:{uuid.uuid4().hex}"
        deadline = gateway.bus.now_ms() + int(timeout * 1000)
        caller = Caller(
            query_id=call_id,
            user_id=user.user_id,
            deadline=deadline,
            time_zone=user.time_zone or gateway.settings.zone,
        )
        calling = gateway.tools.call(tool, body.args, call_id=call_id, caller=caller, timeout=timeout, attempt=1)
        return await gateway.race(calling, gone(request.receive))
