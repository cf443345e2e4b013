"""A gateway behind real HTTP on loopback, and a generator whose answers tests write themselves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from support.described import hook
from support.entries import event_of
from support.forked import Forked
from support.services import running
from support.waiting import PATIENCE, eventually

from services.gateway.service import listen, run
from services.gateway.settings import GatewaySettings
from shared.bus import Command, Delivery
from shared.bus.keys import journal_key
from shared.contracts import QUERY_RECEIVED, Outgoing, QueryReceived
from shared.envelope import Envelope, Message, now_ms
from shared.participant.service import Context, Service, Work, receive
from shared.participant.settings import Settings
from shared.records import lanes
from shared.records.journal import EntryType, JournalWriter, closing
from shared.records.sessions import Sessions, Turn

ADMIN_KEY = "an-administrator's-key"
FACTS = {"backend": "scripted", "model": "scripted:1b", "backend_ok": True, "backend_reason": None, "demo": False}


@dataclass
class Site:
    """A running gateway. `http` sends the administrator's key."""

    url: str
    http: httpx.AsyncClient
    stop: asyncio.Event

    async def key(self, user_id: str, role: str = "user") -> httpx.AsyncClient:
        """A client with a new key of a user's own; close it."""
        made = await self.http.post("/keys", json={"name": user_id, "user_id": user_id, "role": role})
        assert made.status_code == 201, made.text
        return client(self.url, made.json()["key"])


def client(url: str, key: str | None, timeout: float = 15.0) -> httpx.AsyncClient:
    """timeout: in seconds of a free machine."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    hooks = {"response": [hook]}
    # without the certificates, which no address here needs: reading them takes longer than most tests
    return httpx.AsyncClient(
        base_url=url, headers=headers, timeout=PATIENCE * timeout, trust_env=False, verify=False, event_hooks=hooks
    )


def gateway_settings(redis_url: str, data_dir: Path, **values: Any) -> GatewaySettings:
    plain: dict[str, Any] = {"heartbeat": 0.5, "drain": 2.0, "admin_key": ADMIN_KEY, "port": 0, "log_level": "error"}
    return GatewaySettings(**{**plain, "redis_url": redis_url, "data_dir": data_dir, **values})


@contextlib.asynccontextmanager
async def serving(settings: GatewaySettings, *, ready: bool = True) -> AsyncIterator[Site]:
    """Serves until the block ends, then stops as on SIGTERM."""
    listener = listen(settings)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    stop = asyncio.Event()
    task = asyncio.create_task(run(settings, stop, listener=listener))
    try:
        async with client(url, ADMIN_KEY) as http:
            if ready:
                await eventually(lambda: _serves(http), what="the gateway is on the bus")
            yield Site(url, http, stop)
    finally:
        stop.set()
        await task


@contextlib.asynccontextmanager
async def serving_ahead(redis_url: str, data_dir: Path, seconds: float) -> AsyncIterator[httpx.AsyncClient]:
    """Serve as a process on a host whose clock is ahead by so many seconds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    values = {"redis_url": redis_url, "data_dir": data_dir, "api_port": port, "admin_key": ADMIN_KEY}
    environment = {**os.environ, **{f"LOCAL2_{name.upper()}": str(value) for name, value in values.items()}}
    process = Forked("support.other_clock", str(seconds), "services.gateway", environment=environment)
    try:
        async with client(f"http://127.0.0.1:{port}", ADMIN_KEY) as http:
            await eventually(lambda: _serves(http), 30, "the gateway is on the bus")
            yield http
    finally:
        process.kill()
        process.wait()


async def _serves(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/sessions")).status_code == 200
    except httpx.ConnectError:
        return False


class FakeGenerator:
    """Answers by the first word of the query: `say`, `tool`, `think`, `slow`, `fail CODE`, `restart`, `truncate`.

    `slow` waits for `gate` before its answer; a cancel ends it. `rate` seconds pass between the deltas of `many N`.
    facts: what it announces. title: its answer to a request for a title. before_title: awaited before that answer.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.facts = facts
        self.title: str | None = None
        self.before_title: Callable[[], Awaitable[None]] | None = None
        self.gate = asyncio.Event()
        self.started: list[str] = []
        self.queries: list[Message[QueryReceived]] = []
        self.rate = 0.0

    def service(self, participant: str = "generator", respondent: str = "A") -> Service[Settings]:
        @contextlib.asynccontextmanager
        async def build(context: Context[Settings]) -> AsyncIterator[Sequence[Work]]:
            context.facts.update(self.facts)
            yield [_Answering(self, context, respondent)]

        return Service(participant, Settings, build)


class _Answering:
    stream = QUERY_RECEIVED.stream

    def __init__(self, fake: FakeGenerator, context: Context[Settings], respondent: str) -> None:
        self._fake = fake
        self._bus = context.bus
        self._inbox = context.inbox
        self._retention = context.settings.retention
        self._sessions = Sessions(context.bus)
        self._respondent = respondent

    def route(self, _context: Context[Any]) -> Any:
        from shared.bus import Route

        return Route(self._handle)

    async def _handle(self, delivery: Delivery) -> Sequence[Command]:
        message = receive(QUERY_RECEIVED, delivery)
        query, query_id = message.payload, message.entry_id
        self._fake.queries.append(message)
        stored = query.messages is None
        kept = stored or query.kept
        if stored:
            place = (query.session_id, self._respondent, query_id)
            while await lanes.turn(self._bus, *place, self._inbox) is not None:
                await asyncio.sleep(0.01)
        key = journal_key(query_id, self._respondent)
        claimed = {"query_id": query_id, "session_id": query.session_id, "model": query.model or "scripted:1b"}
        writer, _ = await JournalWriter.claim(self._bus, key, event_of("claimed", claimed), 3_600)
        self._fake.started.append(query_id)
        try:
            return await self._play(query, query_id, writer, kept)
        finally:
            if stored:
                await lanes.leave(self._bus, *place)

    async def _play(
        self, query: QueryReceived, query_id: str, writer: JournalWriter, stored: bool
    ) -> Sequence[Command]:
        word, _, rest = query.query.partition(" ")
        await writer.append(event_of(EntryType.STATE, {"from": "IDLE", "action": "RECEIVE", "to": "RECEIVING"}))
        await writer.append(
            event_of(EntryType.STATE, {"from": "RECEIVING", "action": "START_GENERATION", "to": "GENERATING"})
        )
        await self._publish(query_id, "agent.transition", "agent.transition")
        calls: list[dict[str, Any]] = []
        thinking, answer = "Let me see.", f"You said: {rest or word}"
        await writer.append(event_of(EntryType.THINKING, {"text": thinking}))
        match word:
            case _ if query.plain and self._fake.title is not None:
                if self._fake.before_title is not None:
                    await self._fake.before_title()
                answer = self._fake.title
                await self._say(writer, answer)
            case "fail":
                await self._end(writer, EntryType.FAILED, {"code": rest, "message": f"it failed: {rest}"})
                return ()
            case "slow":
                await writer.append(event_of(EntryType.ANSWER, {"text": "You "}))
                if await self._cancelled(query_id):
                    await self._end(writer, EntryType.CANCELLED, {"answer": "You ", "thinking": thinking})
                    return ()
                await writer.append(event_of(EntryType.ANSWER, {"text": answer.removeprefix("You ")}))
            case "tool":
                calls = await self._tool(query_id, writer)
                await self._say(writer, answer)
            case "restart":
                before = await writer.append(event_of(EntryType.STATE, {"from": "A", "action": "B", "to": "C"}))
                await writer.append(event_of(EntryType.ANSWER, {"text": "You said: re"}))
                await writer.append(event_of(EntryType.RESTARTED, {"discard_after": before, "step": 0}))
                await self._say(writer, answer)
            case "many":
                answer = ""
                for number in range(int(rest)):
                    await writer.append(event_of(EntryType.ANSWER, {"text": f"{number} "}))
                    answer += f"{number} "
                    if self._fake.rate:
                        await asyncio.sleep(self._fake.rate)
            case _:
                await self._say(writer, answer)
        counts = {"prompt_tokens": 11, "completion_tokens": 7}
        await writer.append(event_of(EntryType.MESSAGE, {"step": 1, "role": "assistant", "content": answer, **counts}))
        if stored:
            if query.kept:
                await self._sessions.open(query.session_id, query.user_id, query.query, query_id)
            turn = Turn(query_id, query.query, answer, now_ms())
            await self._bus.link.pipe(self._sessions.appending(query.session_id, self._respondent, turn))
        completed = {
            "answer": answer,
            "thinking": thinking,
            "tool_calls": calls,
            "usage": counts,
            "finish_reason": "length" if word == "long" else "stop",
            "model": query.model or "scripted:1b",
        }
        await self._publish(query_id, "response.generation", "answer.dialog")
        await self._end(writer, EntryType.COMPLETED, completed)
        return ()

    async def _publish(self, query_id: str, *subjects: str) -> None:
        """Publish messages as a generator does. Their payloads are empty: no participant of these tests reads them."""
        envelopes = (Envelope(subject, b"{}", correlation_id=query_id) for subject in subjects)
        await self._bus.publish(*map(Outgoing, envelopes))

    async def _say(self, writer: JournalWriter, text: str) -> None:
        for start in range(0, len(text), 5):
            await writer.append(event_of(EntryType.ANSWER, {"text": text[start : start + 5]}))

    async def _tool(self, query_id: str, writer: JournalWriter) -> list[dict[str, Any]]:
        await writer.append(event_of(EntryType.ANSWER, {"text": "Searching."}))
        call = {"id": "c1", "name": "web_search", "args": {"query": "x"}}
        message = {"step": 0, "role": "assistant", "content": "Searching.", "tool_calls": [call]}
        await writer.append(event_of(EntryType.MESSAGE, {**message, "prompt_tokens": 5, "completion_tokens": 2}))
        asked = {"call_id": "c1", "tool": "web_search", "args": {"query": "x"}}
        await writer.append(event_of(EntryType.TOOL_REQUEST, {**asked, "step": 0}))
        told = {"result": "found", "error": None, "data": {"hits": 1}, "duration_ms": 3}
        await self._publish(query_id, "tool.request.web_search", "tool.result.web_search")
        await writer.append(event_of(EntryType.TOOL_RESULT, {**asked, **told}))
        return [{**asked, **told}]

    async def _cancelled(self, query_id: str) -> bool:
        """Waits for the gate or a cancel."""
        while not self._fake.gate.is_set():
            if await self._bus.link.call("GET", f"local2:cancel:{query_id}"):
                return True
            await asyncio.sleep(0.01)
        return False

    async def _end(self, writer: JournalWriter, kind: EntryType, data: dict[str, Any]) -> None:
        await writer.append(event_of(kind, data))
        await self._bus.link.pipe([closing(writer.key, self._retention)])


@contextlib.asynccontextmanager
async def generating(
    redis_url: str, data_dir: Path, respondent: str = "A", **facts: Any
) -> AsyncIterator[FakeGenerator]:
    """A fake generator on the bus. `facts` replace some of those that it announces."""
    from support.services import announced

    fake = FakeGenerator({**FACTS, **facts})
    participant = "generator" if respondent == "A" else "respondent-b"
    settings = Settings(redis_url=redis_url, data_dir=data_dir, heartbeat=0.5, drain=0.5, log_level="error")
    async with running(fake.service(participant, respondent), settings):
        await announced(redis_url, participant)
        yield fake


def events(text: str) -> list[tuple[str, str, str]]:
    """(id, event, data) of a server-sent stream, comments left out."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if line and not line.startswith(":"))
        if fields:
            found.append((fields["id"], fields["event"], fields["data"]))
    return found
