"""The commands about MCP servers: what they offer, and saying yes to what has changed."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from services.cli.api import Api, ApiError, rows
from services.cli.commands.operate import AsJson, print_json, with_api
from services.cli.terminal import console
from services.cli.words import printable

mcp = typer.Typer(no_args_is_help=True)

_SETTINGS = "/participants/mcp/settings"


@mcp.command("list")
def list_servers(as_json: AsJson = False) -> None:
    """List the servers, their tools and those that wait for approval."""
    found = with_api(_servers)
    if as_json:
        print_json(found)
        return
    for server in found:
        reason = f": {server['reason']}" if server["reason"] else ""
        _say(f"{server['server']}  {server['state']}{reason}")
        for tool in server["tools"]:
            _say(f"  {tool}")
        for waiting in server["waiting"]:
            _say(f"  {waiting['tool']}  is {waiting['why']} and waits: local2 mcp approve {waiting['tool']}")
            if function := waiting.get("function"):
                _say(f"    {function['description']}")
                _say(f"    {json.dumps(function['parameters'], ensure_ascii=False)}")
        for left_out in server["left_out"]:
            _say(f"  {left_out['tool']}  is left out: {left_out['why']}")
    if not found:
        _say("no MCP servers are configured; name them under mcp: servers: in local2.yaml")


@mcp.command("approve")
def approve(
    names: Annotated[list[str], typer.Argument(help="Tools that wait, or a server for all of its tools that do")],
) -> None:
    """Approve tools that have changed or have come later."""
    for tool in with_api(lambda api: _approve(api, names)):
        _say(f"approved {tool}")


async def _servers(api: Api) -> list[dict[str, Any]]:
    """What the first replica says of its servers. Raises ApiError when none is running."""
    replicas = [
        replica
        for participant in rows(await api.get("/participants"), "participants")
        if participant["name"] == "mcp"
        for replica in participant["replicas"]
    ]
    if not replicas:
        raise ApiError("not_running", "no mcp is running; name servers under mcp: servers: in local2.yaml")
    found: list[dict[str, Any]] = replicas[0]["facts"].get("mcp", [])
    return found


async def _approve(api: Api, names: list[str]) -> list[str]:
    waiting = [(server["server"], one) for server in await _servers(api) for one in server["waiting"]]
    chosen: dict[str, str] = {}
    for name in names:
        meant = {one["tool"]: one["hash"] for server, one in waiting if name in (server, one["tool"])}
        if not meant:
            raise ApiError("not_found", f"no tool {name} waits for a yes; local2 mcp list shows those that do")
        chosen |= meant
    approved = (await api.get(_SETTINGS))["values"].get("approved", {})
    await api.call("PATCH", _SETTINGS, json={"approved": {**approved, **chosen}})
    return sorted(chosen)


def _say(text: str) -> None:
    console.print(printable(text))
