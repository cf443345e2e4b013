"""Exports of what a participant keeps: page by page, and never cut off unseen."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel
from support.http_gateway import gateway_settings, serving
from support.services import announced, running

from shared.contracts import ToolRequest
from shared.errors import ToolError
from shared.participant.service import Context, Service, Work
from shared.participant.settings import Settings
from shared.participant.tool import Tool, ToolResult, open_tools

PAGES = {None: "first", "first": "second", "second": None}


class Manage(BaseModel):
    """Does what operators ask for."""

    op: str
    limit: int = 0
    cursor: str | None = None


def keeper(participant: str, fails_at: str | None) -> Service[Settings]:
    """Return a participant that exports three pages of one line, or fails at a cursor."""

    async def manage(args: Manage, _request: ToolRequest) -> ToolResult:
        if args.cursor == fails_at:
            raise ToolError("the store is damaged")
        return ToolResult("", data={"lines": [{"after": args.cursor}], "cursor": PAGES[args.cursor]})

    @contextlib.asynccontextmanager
    async def build(_settings: Settings) -> AsyncIterator[Sequence[Tool[Any]]]:
        yield [Tool(f"{participant}_manage", Manage, manage, internal=True)]

    def opened(context: Context[Settings]) -> contextlib.AbstractAsyncContextManager[Sequence[Work]]:
        return open_tools(context, build)

    return Service(participant, Settings, opened)


@contextlib.asynccontextmanager
async def exporting(redis_url: str, folder: Path, participant: str, fails_at: str | None) -> AsyncIterator[Any]:
    settings = Settings(redis_url=redis_url, data_dir=folder, heartbeat=0.5)
    async with serving(gateway_settings(redis_url, folder)) as site, running(keeper(participant, fails_at), settings):
        await announced(redis_url, participant)
        yield site.http


@pytest.mark.parametrize("participant", ["memory", "knowledge"])
async def test_export_has_the_lines_of_all_pages(redis_url: str, tmp_path: Path, participant: str) -> None:
    async with exporting(redis_url, tmp_path, participant, "") as http:
        answer = await http.get(f"/{participant}/export")
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    assert answer.text == '{"after":null}\n{"after":"first"}\n{"after":"second"}\n'


@pytest.mark.parametrize("participant", ["memory", "knowledge"])
async def test_export_whose_first_page_fails_is_an_error(redis_url: str, tmp_path: Path, participant: str) -> None:
    async with exporting(redis_url, tmp_path, participant, None) as http:
        answer = await http.get(f"/{participant}/export")
    assert (answer.status_code, answer.json()["error"]["message"]) == (422, "the store is damaged")


@pytest.mark.parametrize("participant", ["memory", "knowledge"])
async def test_export_whose_later_page_fails_is_cut_off(redis_url: str, tmp_path: Path, participant: str) -> None:
    async with exporting(redis_url, tmp_path, participant, "first") as http:
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
            await http.get(f"/{participant}/export")
