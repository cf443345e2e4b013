"""One answer being played: chunks at their time, faults, and what became of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, assert_never

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shared.testing.script import Asked, Rule, chunks_of, fill
from shared.testing.speech import Speech, Usage

# refused: an HTTP error · broken: a scripted fault ended it · aborted: the client left before the end
Outcome = Literal["waiting", "running", "done", "refused", "broken", "aborted"]


@dataclass(slots=True)
class Received:
    """A chat request and what became of it; times are seconds since the epoch."""

    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]
    query: str
    model: str
    at: float = field(default_factory=time.time)
    rule: str = ""
    outcome: Outcome = "waiting"
    ended_at: float | None = None
    chunks: int = 0

    def note(self, outcome: Outcome) -> None:
        self.outcome = outcome
        if outcome not in ("waiting", "running"):
            self.ended_at = time.time()

    def shown(self) -> dict[str, Any]:
        """As JSON, without the headers: they may hold a key."""
        return {name: value for name, value in asdict(self).items() if name != "headers"}


class _Cut(Exception):
    """Makes the HTTP server close the connection in the middle of the answer."""


class Performance(Response):
    """The streamed or whole answer of one rule."""

    def __init__(
        self,
        asked: Asked,
        rule: Rule,
        speech: Speech,
        received: Received,
    ) -> None:
        super().__init__()
        self._asked = asked
        self._rule = rule
        self._respond = rule.respond
        self._speech = speech
        self._received = received

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        playing = asyncio.create_task(self._play(send))
        leaving = asyncio.create_task(_client_leaves(receive))
        try:
            await asyncio.wait({playing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not playing.done():
                self._received.note("aborted")
                return
            complete = playing.exception() is None and playing.result()
            self._received.note("done" if complete else "broken")
            await playing
        finally:
            playing.cancel()
            leaving.cancel()
            await asyncio.wait({playing, leaving})

    async def _play(self, send: Send) -> bool:
        """Whether the answer came to its proper end."""
        respond = self._respond
        await asyncio.sleep(respond.delay)
        if not self._asked.stream:
            await self._send_whole(send)
            return True
        await _start(send, self._speech.content_type)
        if first := self._speech.begin():
            await _chunk(send, first)
        parts, calls = self._parts()
        broken_at = min(respond.fault.after, len(parts)) if respond.fault else -1
        began = time.monotonic()
        for number in range(len(parts) + 1):
            if number == broken_at and not await self._survives(send):
                await _end(send)
                return False
            if number == len(parts):
                break
            if respond.pace:
                # By the clock, so that the rate holds however long a chunk takes to send.
                await asyncio.sleep(max(0.0, began + number * respond.pace - time.monotonic()))
            await _chunk(send, parts[number])
            self._received.chunks += 1
        usage = self._usage(len(parts))
        await _chunk(send, self._speech.done(calls if respond.calls_in_done else (), usage))
        await _end(send)
        return True

    def _parts(self) -> tuple[list[bytes], list[Any]]:
        """The chunks before the last one, and the calls."""
        respond, asked, rule = self._respond, self._asked, self._rule
        calls = [call.model_copy(update={"args": fill(call.args, rule, asked)}) for call in respond.tool_calls]
        thoughts = chunks_of(respond.thinking, rule, asked) if asked.think is not False else []
        parts = [self._speech.thinking(chunk) for chunk in thoughts]
        parts += [self._speech.text(chunk) for chunk in chunks_of(respond.text, rule, asked)]
        if not respond.calls_in_done:
            parts += self._speech.calls(calls)
        return parts, calls

    async def _survives(self, send: Send) -> bool:
        """Plays the fault; whether the stream goes on after it."""
        fault = self._respond.fault
        assert fault is not None
        match fault.kind:
            case "error_line":
                await _chunk(send, self._speech.error(fault.text))
                return False
            case "no_done":
                return False
            case "cut":
                raise _Cut
            case "garbage":
                await _chunk(send, self._speech.garbage())
                return True
            case "stall":
                await asyncio.Event().wait()
                return True
            case _:
                assert_never(fault.kind)

    async def _send_whole(self, send: Send) -> None:
        respond, asked, rule = self._respond, self._asked, self._rule
        calls = [call.model_copy(update={"args": fill(call.args, rule, asked)}) for call in respond.tool_calls]
        thinking = "".join(chunks_of(respond.thinking, rule, asked)) if asked.think is not False else ""
        text = "".join(chunks_of(respond.text, rule, asked))
        body = self._speech.whole(thinking, text, calls, self._usage(len(text.split())))
        await _start(send, "application/json")
        await _chunk(send, body)
        await _end(send)

    def _usage(self, completion: int) -> Usage:
        characters = sum(len(message["content"]) for message in self._asked.messages)
        return Usage(prompt=characters // 4 + 1, completion=completion)


async def _start(send: Send, content_type: str) -> None:
    headers = [(b"content-type", content_type.encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _chunk(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _end(send: Send) -> None:
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
