"""The client of the stream measurements, in a process of its own; the same code for every way.

The parent writes `measure WAY LOAD STREAMS SECONDS` on the standard input: so many clients ask one after the other for
so long. Ways: `model` (POST /api/chat of the model server), `api` (POST /query of the gateway, as events), `bus` (a
query published by a participant, the journal followed). Answers are lines of JSON.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httptools
import orjson
import uvloop

from shared.bus import JournalSubscriber, open_subscriber
from shared.bus.keys import journal_key
from shared.contracts import QUERY_RECEIVED, QueryReceived
from shared.envelope import now_ms
from shared.participant.service import Context, open_context
from shared.participant.settings import Settings
from shared.records.journal import TERMINAL, EntryType, JournalEntry
from shared.telemetry.logging import configure

# Seconds between two tokens of `paced`.
PACE = 0.033
# Tokens of each load's answer, as stream_rules.yaml has them.
TOKENS = {"short": 12, "long": 2_000, "paced": 100, "flood": 300}
_ANSWER_SECONDS = 120.0


class Exchange(asyncio.Protocol):
    """One HTTP request on one connection, and the body of its answer piece by piece: as little as possible."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pieces.put_nowait(None)

    def on_body(self, body: bytes) -> None:
        self._pieces.put_nowait(body)

    def on_message_complete(self) -> None:
        self._pieces.put_nowait(None)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Raises RuntimeError for a refusal."""
        while (piece := await self._pieces.get()) is not None:
            if self._parser.get_status_code() >= 400:
                raise RuntimeError(f"status {self._parser.get_status_code()}: {piece[:500]!r}")
            yield piece


async def post(url: str, path: str, body: Any, separator: bytes, *headers: str) -> AsyncIterator[bytes]:
    """The parts of the answer that end in `separator`, as they come."""
    parts = urlsplit(url)
    host, port = str(parts.hostname), int(parts.port or 80)
    data = orjson.dumps(body)
    head = [f"POST {path} HTTP/1.1", f"Host: {parts.netloc}", "Content-Type: application/json",
            f"Content-Length: {len(data)}", "Connection: close", *headers]  # fmt: skip
    transport, exchange = await asyncio.get_running_loop().create_connection(Exchange, host, port)
    try:
        transport.write("\r\n".join([*head, "", ""]).encode() + data)
        rest = b""
        async for piece in exchange.pieces():
            *whole, rest = (rest + piece).split(separator)
            for part in whole:
                yield part
    finally:
        transport.close()


async def by_model(load: str) -> AsyncIterator[str]:
    body = {"model": "bench", "stream": True, "think": True, "messages": [{"role": "user", "content": f"bench {load}"}]}
    async for line in post(os.environ["BENCH_MODEL"], "/api/chat", body, b"\n"):
        if text := orjson.loads(line)["message"]["content"]:
            yield text


async def by_http(server: str, load: str) -> AsyncIterator[str]:
    key = os.environ["BENCH_KEY"]
    headers = ("Accept: text/event-stream", f"Authorization: Bearer {key}")
    async for event in post(server, "/query", {"query": f"bench {load}"}, b"\n\n", *headers):
        if b"event: answer\n" in event:
            yield orjson.loads(event.partition(b"data: ")[2])["text"]


async def by_bus(load: str, context: Context[Settings], bell: JournalSubscriber) -> AsyncIterator[str]:
    session = str(uuid.uuid4())
    query = QueryReceived(session_id=session, query=f"bench {load}", user_id="bench")
    deadline = now_ms() + 120_000
    (query_id,) = await context.bus.publish(QUERY_RECEIVED.of(query, session_id=session, deadline=deadline))
    follower = bell.follow(journal_key(query_id, "A"))
    try:
        while True:
            for entry in map(JournalEntry.parse, await follower.next()):
                if entry.type is EntryType.ANSWER:
                    yield entry.value()["text"]
                elif entry.type in TERMINAL:
                    return
    finally:
        follower.close()


@dataclass(slots=True)
class Seen:
    """firsts: seconds to each answer's first token. streaming: seconds that all answers took together."""

    firsts: list[float] = field(default_factory=list)
    streaming: float = 0.0


class Client:
    def __init__(self, context: Context[Settings], bell: JournalSubscriber) -> None:
        self._context = context
        self._bell = bell

    def _texts(self, way: str, load: str) -> AsyncIterator[str]:
        match way:
            case "model":
                return by_model(load)
            case "api":
                return by_http(os.environ["BENCH_API"], load)
            case _:
                return by_bus(load, self._context, self._bell)

    async def _one(self, way: str, load: str) -> tuple[float, float]:
        """Seconds to the first token, and to the end."""
        began, first, tokens = time.perf_counter(), 0.0, 0
        async for text in self._texts(way, load):
            if not tokens:
                first = time.perf_counter() - began
            tokens += text.count(" ")
        # the last word has no space behind it
        if tokens + 1 != TOKENS[load]:
            raise RuntimeError(f"{way} {load}: {tokens + 1} tokens instead of {TOKENS[load]}")
        return first, time.perf_counter() - began

    async def _stream(self, way: str, load: str, seen: Seen, offset: float, until: float) -> None:
        await asyncio.sleep(offset)
        if load == "paced":
            # given while others have not begun yet: it does not count
            await self._one(way, load)
        while True:
            async with asyncio.timeout(_ANSWER_SECONDS):
                first, whole = await self._one(way, load)
            seen.firsts.append(first)
            seen.streaming += whole
            if time.perf_counter() > until:
                return

    async def measure(self, way: str, load: str, streams: int, seconds: float) -> dict[str, float]:
        """tokens: per second; of all streams together when the model does not set the pace."""
        seen = Seen()
        began = time.perf_counter()
        # in all phases: clients that all begin in the same moment measure a queue, not a stream
        phase = TOKENS[load] * PACE / streams if load == "paced" else 0.0
        async with asyncio.TaskGroup() as group:
            for number in range(streams):
                group.create_task(self._stream(way, load, seen, number * phase, began + number * phase + seconds))
        took = time.perf_counter() - began
        firsts = sorted(seen.firsts)
        count = len(firsts)
        busy = seen.streaming if load == "paced" else took
        return {
            "answers": count,
            "asked": count + (streams if load == "paced" else 0),
            "p50": firsts[count // 2],
            "p99": firsts[min(count - 1, count * 99 // 100)],
            "tokens": count * TOKENS[load] / busy * (streams if load == "paced" else 1),
        }


def say(value: object) -> None:
    sys.stdout.buffer.write(orjson.dumps(value) + b"\n")
    sys.stdout.buffer.flush()


async def main() -> None:
    configure("warning", "json", participant="bench")
    settings = Settings(redis_url=os.environ["BENCH_REDIS"], data_dir=Path("data"))
    async with open_context("bench", settings) as context, open_subscriber(context.bus) as bell:
        client = Client(context, bell)
        say({"ready": True})
        while line := (await asyncio.to_thread(sys.stdin.readline)).split():
            _, way, load, streams, seconds = line
            say(await client.measure(way, load, int(streams), float(seconds)))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
