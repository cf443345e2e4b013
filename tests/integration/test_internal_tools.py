"""Operations between participants, and tools whose answer depends on who asks."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from pydantic import BaseModel
from support.services import announced, running

from shared.bus.keys import result_key
from shared.contracts import TOOL_RESULT, ToolRequest
from shared.participant.service import Context, Service, Work, open_context
from shared.participant.settings import Settings
from shared.participant.tool import Tool, ToolResult, open_tools
from shared.participant.tool_client import Caller, ToolClient


class Who(BaseModel):
    """Says who asked."""


class Manage(BaseModel):
    """Does what operators ask for."""

    op: str


async def who(_args: Who, request: ToolRequest) -> ToolResult:
    return ToolResult(f"{request.user_id} in {request.session_id}")


async def manage(args: Manage, request: ToolRequest) -> ToolResult:
    return ToolResult(args.op, data={"by": request.user_id})


@contextlib.asynccontextmanager
async def build(_settings: Settings) -> AsyncIterator[Sequence[Tool[Any]]]:
    yield [Tool("who", Who, who), Tool("office_manage", Manage, manage, internal=True)]


def opened(context: Context[Settings]) -> contextlib.AbstractAsyncContextManager[Sequence[Work]]:
    return open_tools(context, build)


office = Service("office", Settings, opened)
CALLER = Caller("1-1", session_id="s1", user_id="ann")


@pytest.fixture
def staffed(redis_url: str, tmp_path: Path) -> Settings:
    return Settings(redis_url=redis_url, data_dir=tmp_path, heartbeat=0.5)


@asynccontextmanager
async def asking(settings: Settings) -> AsyncIterator[tuple[ToolClient, Context[Any]]]:
    async with running(office, settings):
        await announced(settings.redis_url, "office")
        async with open_context("asker", settings) as context:
            yield ToolClient(context), context


async def test_a_tool_knows_who_asks(staffed: Settings) -> None:
    async with asking(staffed) as (client, _):
        answer = await client.call("who", {}, call_id="c1", caller=CALLER, timeout=3)
    assert answer.result == "ann in s1"


async def test_an_internal_operation_is_neither_offered_nor_callable_by_its_name(staffed: Settings) -> None:
    async with asking(staffed) as (client, _):
        assert set(await client.schemas()) == {"who"}
        answer = await client.call("office_manage", {"op": "x"}, call_id="c2", caller=CALLER, timeout=3)
    assert answer.result == "[unknown tool: 'office_manage']"


async def test_a_participant_calls_an_internal_operation_unseen_by_observers(
    staffed: Settings, raw: redis.Redis
) -> None:
    async with asking(staffed) as (client, _):
        answer = await client.call("office_manage", {"op": "x"}, call_id="c3", caller=CALLER, timeout=3, internal=True)
    assert (answer.result, answer.data) == ("x", {"by": "ann"})
    assert raw.xlen(TOOL_RESULT.for_tool("office_manage").stream) == 0
    # nobody asks for it again, and it may hold what its owner deletes next
    assert not raw.exists(result_key("office_manage", "c3"))


async def test_an_offered_tool_is_not_reachable_as_an_internal_one(staffed: Settings) -> None:
    async with asking(staffed) as (client, _):
        answer = await client.call("who", {}, call_id="c4", caller=CALLER, timeout=3, internal=True)
    assert answer.error == "unknown tool: 'who'"
