"""Participants that tests start as processes: `python -m support.apps NAME`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, Field
from redis.asyncio import Redis
from support.consuming import STREAM

from shared.bus import Delivery, Route
from shared.contracts import RESPONSE_GENERATION, USER_FEEDBACK, Outgoing, UserFeedback, encode
from shared.envelope import Message
from shared.errors import ToolError
from shared.participant.service import Context, Service, Subscription, Work
from shared.participant.settings import Settings
from shared.participant.tool import Run, ToolResult, tool_service
from shared.participant.tool_client import Caller, ToolClient


class Probe(BaseModel):
    """A tool of the tests: notes that it ran, waits, answers. Call it in tests."""

    text: str = Field(min_length=1, description="What to answer")
    seconds: float = Field(default=0.0, description="How long to take")
    fail: str = Field(default="", description="What to complain about")
    size: int = Field(default=0, description="Number of further characters in the answer")
    stubborn: bool = Field(default=False, description="Answer even after a cancellation")
    lethal: bool = Field(default=False, description="Kill the worker's process")


class ProbeSettings(Settings):
    """effects_url: where runs are counted, past any proxy."""

    runtime: ClassVar[frozenset[str]] = Settings.runtime | {"greeting", "concurrency", "timeout"}

    greeting: str = Field(default="you said", min_length=1, description="First words of an answer")
    effects_url: str = Field(default="", description="Redis in which runs are counted")
    timeout: float | None = Field(default=None, gt=0, description="Seconds that it says a call may take")


@asynccontextmanager
async def open_probe(settings: ProbeSettings) -> AsyncIterator[Run[Probe]]:
    counting = Redis.from_url(settings.effects_url or settings.redis_url)

    async def run(args: Probe) -> ToolResult:
        await counting.hincrby("effects", args.text, 1)
        if args.lethal:
            os.kill(os.getpid(), signal.SIGKILL)
        if args.seconds:
            try:
                await asyncio.sleep(args.seconds)
            except asyncio.CancelledError:
                if not args.stubborn:
                    raise
            finally:
                await counting.hincrby("ended", args.text, 1)
        if args.fail:
            raise ToolError(args.fail)
        return ToolResult(f"{settings.greeting} {args.text}{'x' * args.size}", {"text": args.text})

    try:
        yield run
    finally:
        await counting.hincrby("closed", settings.greeting, 1)
        await counting.aclose()


probe = tool_service("probe", Probe, ProbeSettings, open_probe)


@asynccontextmanager
async def open_judge(context: Context[Settings]) -> AsyncIterator[list[Work]]:
    """Publishes one feedback for each response, after a while."""
    seconds = float(os.environ.get("SECONDS", "0"))

    async def judge(message: Message[Any]) -> list[Outgoing]:
        await context.bus.link.call("INCR", "judged")
        await asyncio.sleep(seconds)
        feedback = UserFeedback(
            query_id=message.payload.query_id, session_id="s", user_id=context.replica, sentiment="positive"
        )
        return [USER_FEEDBACK.of(feedback)]

    yield [Subscription(RESPONSE_GENERATION, judge)]


judge = Service("judge", Settings, open_judge)


@dataclass(frozen=True)
class Deadly:
    """Every entry ends the process, except those that are harmless: they take a while."""

    stream: str = STREAM

    def route(self, context: Context[Any]) -> Route:
        async def handler(delivery: Delivery) -> list[Any]:
            if b"harmless" in delivery.fields:
                await asyncio.sleep(0.5)
                return [("INCR", "survivors")]
            await context.bus.link.call("INCR", "deaths")
            os.kill(os.getpid(), signal.SIGKILL)
            return []

        return Route(handler)


@asynccontextmanager
async def open_deadly(context: Context[Settings]) -> AsyncIterator[list[Work]]:
    yield [Deadly()]


deadly = Service("deadly", Settings, open_deadly)


@asynccontextmanager
async def open_asker(context: Context[Settings]) -> AsyncIterator[list[Work]]:
    """Calls `probe` once as the environment says (ASK: arguments, QUERY_ID, CALL_ID, TIMEOUT: seconds until the query's
    deadline, ANSWERS_URL) and writes the answer to the hash `answers`, under the call's id."""

    async def ask() -> None:
        while not await client.schemas():
            await asyncio.sleep(0.01)
        caller = Caller(os.environ["QUERY_ID"], deadline=context.bus.now_ms() + int(timeout * 1000))
        call_id = os.environ["CALL_ID"]
        answer = await client.call("probe", args, call_id=call_id, caller=caller, timeout=timeout, attempt=1)
        await counting.hset("answers", call_id, encode(answer))

    args, timeout = json.loads(os.environ["ASK"]), float(os.environ["TIMEOUT"])
    client = ToolClient(context)
    async with Redis.from_url(os.environ["ANSWERS_URL"]) as counting:
        asking = asyncio.create_task(ask())
        try:
            yield []
        finally:
            asking.cancel()


asker = Service("asker", Settings, open_asker)

if __name__ == "__main__":
    {"probe": probe, "judge": judge, "deadly": deadly, "asker": asker}[sys.argv[1]].main()
