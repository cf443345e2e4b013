"""Tool calls as the contract suite makes them: workers in this process or in their own, callers, and what ran."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import redis
from contract.bus.surface import (
    QUERY_CANCEL,
    TOOL_REQUEST,
    TOOL_RESULT,
    VISIBILITY_TIMEOUT,
    Bus,
    Caller,
    Context,
    Place,
    QueryCancel,
    ToolClient,
    ToolRequest,
    ToolResultMessage,
    open_context,
    url_of,
)
from support.apps import ProbeSettings, probe
from support.services import Child, announced, child, running

HEARTBEAT = VISIBILITY_TIMEOUT / 3
REQUESTS = TOOL_REQUEST.for_tool("probe")
RESULTS = TOOL_RESULT.for_tool("probe")


class Effects:
    """What the tool `probe` has done, counted on a server of its own, which no fault reaches."""

    def __init__(self, url: str, client: redis.Redis) -> None:
        self.url = url
        self.client = client

    def runs(self, text: str) -> int:
        """Return how often the tool has begun with this text."""
        return int(self.client.hget("effects", text) or 0)

    def all_runs(self) -> dict[str, int]:
        return {text: int(count) for text, count in self.client.hgetall("effects").items()}

    def ended(self, text: str) -> int:
        """Return how often a run with `seconds` has ended, by itself or by a cancellation."""
        return int(self.client.hget("ended", text) or 0)

    def answer(self, call_id: str) -> ToolResultMessage | None:
        """Return what a caller in a process of its own was answered."""
        found = self.client.hget("answers", call_id)
        return None if found is None else ToolResultMessage(**json.loads(found))


class Asker:
    """A participant that calls the tool `probe`."""

    def __init__(self, context: Context[Any]) -> None:
        self.context = context
        self.bus: Bus = context.bus
        self.client = ToolClient(context)

    async def ask(
        self,
        text: str,
        call_id: str = "c1",
        *,
        query_id: str = "1-1",
        timeout: float = 20.0,
        deadline: int | None = None,
        attempt: int | None = None,
        **args: Any,
    ) -> ToolResultMessage:
        caller = Caller(query_id, session_id="s", user_id="u", deadline=deadline)
        return await self.client.call(
            "probe", {"text": text, **args}, call_id=call_id, caller=caller, timeout=timeout, attempt=attempt,
        )  # fmt: skip

    async def cancel(self, query_id: str) -> None:
        await self.bus.publish(QUERY_CANCEL.of(QueryCancel(query_id=query_id)))


class Callers:
    """Opens workers and callers of `probe` on a server or a network."""

    def __init__(self, effects: Effects, folder: Path) -> None:
        self._effects = effects
        self._folder = folder

    def settings(self, place: Place | str, **more: Any) -> ProbeSettings:
        url = place if isinstance(place, str) else url_of(place)
        values = {"heartbeat": HEARTBEAT, "drain": 1.0, "effects_url": self._effects.url, **more}
        return ProbeSettings(redis_url=url, data_dir=self._folder, **values)

    @contextlib.asynccontextmanager
    async def worker(self, place: Place | str, *, replicas: int = 1, **settings: Any) -> AsyncIterator[None]:
        """Run a worker in this process until the block ends. replicas: of all, when the block begins."""
        values = self.settings(place, **settings)
        async with running(probe, values):
            await announced(values.redis_url, "probe", replicas=replicas)
            yield

    @contextlib.asynccontextmanager
    async def process(self, place: Place | str, *, replicas: int = 1, **options: Any) -> AsyncIterator[Child]:
        """Run a worker in a process of its own. options: see `support.services.child`; settings by their variables."""
        url = place if isinstance(place, str) else url_of(place)
        with child("probe", url, LOCAL2_EFFECTS_URL=self._effects.url, **options) as started:
            await announced(url, "probe", replicas=replicas)
            yield started

    @contextlib.contextmanager
    def asker_process(
        self, place: Place | str, text: str, call_id: str, query_id: str = "1-1", *, timeout: float = 20.0,
        ahead: float = 0.0, log: Path | None = None, **args: Any,
    ) -> Iterator[Child]:  # fmt: skip
        """Run a caller of its own process that makes one call; its answer comes to `Effects.answer`.

        ahead, log: see `support.services.Child`.
        """
        url = place if isinstance(place, str) else url_of(place)
        ask = json.dumps({"text": text, **args})
        names = {"ASK": ask, "CALL_ID": call_id, "QUERY_ID": query_id, "TIMEOUT": str(timeout)}
        with child(
            "asker", url, ahead=ahead, log=log, LOCAL2_LOG_LEVEL="warning", ANSWERS_URL=self._effects.url, **names
        ) as started:
            yield started

    @contextlib.asynccontextmanager
    async def asker(self, place: Place | str, **settings: Any) -> AsyncIterator[Asker]:
        """Open a caller that sees the tool, if a worker serves it."""
        async with open_context("asker", self.settings(place, **settings)) as context:
            yield Asker(context)

    @contextlib.asynccontextmanager
    async def both(self, place: Place | str, **settings: Any) -> AsyncIterator[Asker]:
        """Open a worker and a caller."""
        async with self.worker(place, **settings), self.asker(place) as asker:
            yield asker


def request(call_id: str, text: str, query_id: str = "1-1", reply_to: str = "", **args: Any) -> ToolRequest:
    """Return a request as any client may write it."""
    return ToolRequest(
        query_id=query_id, call_id=call_id, tool="probe", args={"text": text, **args}, session_id="s", user_id="u",
        reply_to=reply_to,
    )  # fmt: skip


async def within(seconds: float, measured: Callable[[int], Any], tries: int = 3) -> float:
    """Return the best of some measured times, in seconds; a busy machine alone makes one of them long."""
    best = float("inf")
    for number in range(tries):
        best = min(best, await measured(number))
        if best <= seconds:
            break
    return best
