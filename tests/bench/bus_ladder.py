"""What the promises cost by themselves: the bare loop with the commands and bytes of LoCAL2's calls, and no code of it.

`EnvelopeBus` sends what a call and its answer are known by: the fields of both entries, the token, a transaction for
what leaves together and the number behind every write. `PromisesBus` has every result stored and copied for observers
besides. Both read and write the socket themselves, as LoCAL2 does. `CheckedBus` has every entry read and checked as a
participant must, and a task for every call. From the first to the second is what result and copy cost, from the second
to the third what libraries take for what is not believed unseen, from there to LoCAL2 what its own Python costs. What
comes up in one loop tick is one transaction; nothing is claimed, limited in time or sent again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any, cast
from urllib.parse import urlsplit

import hiredis
import orjson
from bus_bare import COUNT, GROUP, KEPT, BareBus
from bus_port import tool_work

from shared.contracts import TOOL_REQUEST, TOOL_RESULT
from shared.envelope import Envelope

# Every so many entries of a stream cut it.
_CUT = 32
_SENDER, _TOOL, _USER = "bench/host-1234-abcdef", "bench_echo", "bench"
_STORED_UNDER = "local2:result:{local2:tool.request.bench_echo}:"
_RETENTION = 86_400
_READ = ("query_id", "call_id", "args", "session_id", "reply_to", "token")


class _Wire(asyncio.Protocol):
    """A socket and a parser: as little as there can be between asyncio and Redis."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._parser = hiredis.Reader()

    async def ask(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        self._replies: list[Any] = []
        self._wanted = len(commands)
        self._complete: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._transport.write(b"".join([hiredis.pack_command(command) for command in commands]))
        replies = await self._complete
        for reply in replies:
            if isinstance(reply, hiredis.ReplyError):
                raise reply
        return replies

    def data_received(self, data: bytes) -> None:
        self._parser.feed(data)
        while (reply := self._parser.gets()) is not False:
            self._replies.append(reply)
        if len(self._replies) == self._wanted and not self._complete.done():
            self._complete.set_result(self._replies)

    def close(self) -> None:
        self._transport.close()


class EnvelopeBus(BareBus):
    name = "with our fields"
    promises = (
        "none: a socket and hiredis, with the fields of our entries, the token, MULTI … EXEC and ECHO for each write"
    )

    def __init__(self, url: str) -> None:
        super().__init__(url)
        parts = urlsplit(url)
        self._host, self._port, self._password = str(parts.hostname), parts.port or 6379, parts.password
        self.observed = f"{type(self).__name__}:observed"
        self._session = f"{time.time_ns()}"
        self._written = 0
        self._added = dict.fromkeys((self.requests, self.replies, self.observed), 0)

    async def call(self, args: dict[str, Any]) -> str:
        number, now = next(self._numbers), time.time_ns() // 1_000_000
        query = f"{self._session}-{number}"
        call = f"{query}:A:1:0"
        request = {
            "query_id": query,
            "call_id": call,
            "tool": _TOOL,
            "args": args,
            "session_id": self._session,
            "user_id": _USER,
            "reply_to": self.replies,
            "token": f"{number:032x}",
        }
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting[call.encode()] = future
        self._add(
            self.requests,
            *_fields(query, self._session, now),
            *("deadline", str(now + 15_000), "attempt", "1", "payload", orjson.dumps(request)),
        )
        return await future

    def _add(self, stream: str, *fields: str | bytes) -> None:
        self._added[stream] += 1
        cut = () if self._added[stream] % _CUT else ("MAXLEN", "~", KEPT)
        self._writes.add("XADD", stream, *cut, "*", *fields)

    async def _start(self, reading: Coroutine[Any, Any, None]) -> None:
        loop = asyncio.get_running_loop()
        opened = [await loop.create_connection(_Wire, self._host, self._port) for _ in range(2)]
        self._writing, self._reading = (wire for _, wire in opened)
        for wire in (self._writing, self._reading) if self._password else ():
            await wire.ask([("AUTH", self._password)])
        self._tasks = [asyncio.create_task(self._writes.run(self._write)), asyncio.create_task(reading)]

    async def _write(self, commands: list[tuple[Any, ...]]) -> None:
        self._written += 1
        await self._writing.ask([("MULTI",), *commands, ("EXEC",), ("ECHO", str(self._written))])

    # a field of an entry stands where its writer has put it

    async def _requests(self) -> list[Any]:
        read = ("XREADGROUP", "GROUP", GROUP, "one", "COUNT", COUNT, "BLOCK", 0, "STREAMS", self.requests, ">")
        return await self._entries(*read)

    async def _replies(self, after: bytes | str) -> list[Any]:
        found = await self._entries("XREAD", "COUNT", 512, "BLOCK", 0, "STREAMS", self.replies, after)
        return [(entry_id, fields[3], fields[7]) for entry_id, fields in found]

    async def _entries(self, *command: Any) -> list[Any]:
        (((_, entries),),) = await self._reading.ask([command])
        return list(entries)

    async def _work(self) -> None:
        while True:
            entries = await self._requests()
            for entry_id, fields in entries:
                self._serve(entry_id.decode(), orjson.loads(fields[-1]))
            self._writes.add("XACK", self.requests, GROUP, *(entry_id for entry_id, _ in entries))

    def _serve(self, entry_id: str, request: dict[str, Any]) -> None:
        answer = {
            "query_id": request["query_id"],
            "call_id": request["call_id"],
            "tool": _TOOL,
            "result": tool_work(request["args"]),
            "error": None,
            "data": None,
            "duration_ms": 1,
            "session_id": request["session_id"],
            "request_id": entry_id,
        }
        self._answer(entry_id, request, orjson.dumps(answer))

    def _answer(self, _entry_id: str, request: dict[str, Any], answer: bytes) -> None:
        told = ("type", "tool.result", "call_id", request["call_id"], "token", request["token"], "payload", answer)
        self._add(request["reply_to"], *told)

    async def close(self) -> None:
        await super().close()
        for wire in (self._writing, self._reading):
            wire.close()


class PromisesBus(EnvelopeBus):
    name = "with all our commands"
    promises = "a stored result and the observers' copy besides: all that a call of ours sends, and nothing that looks"

    def _answer(self, entry_id: str, request: dict[str, Any], answer: bytes) -> None:
        self._writes.add("SET", _STORED_UNDER + request["call_id"], answer, "EX", _RETENTION)
        super()._answer(entry_id, request, answer)
        known = _fields(request["query_id"], request["session_id"], time.time_ns() // 1_000_000)
        self._add(self.observed, *known, "causation_id", entry_id, "payload", answer)


class CheckedBus(PromisesBus):
    name = "read and checked"
    promises = "envelopes read, payloads checked by pydantic and a task for every call besides"

    async def _work(self) -> None:
        # what nobody refers to may be collected
        running: set[asyncio.Task[None]] = set()
        while True:
            entries = await self._requests()
            for entry_id, fields in entries:
                task = asyncio.create_task(self._run(entry_id.decode(), fields))
                running.add(task)
                task.add_done_callback(running.discard)
            self._writes.add("XACK", self.requests, GROUP, *(entry_id for entry_id, _ in entries))

    async def _run(self, entry_id: str, fields: Sequence[bytes]) -> None:
        asked = TOOL_REQUEST.decode(Envelope.parse(TOOL_REQUEST.name, entry_id, fields))
        request = {name: getattr(asked, name) for name in _READ}
        self._serve(entry_id, request)

    async def _collect(self) -> None:
        after: bytes | str = "0"
        while True:
            entries = await self._replies(after)
            for _, number, payload in entries:
                self._waiting.pop(number).set_result(TOOL_RESULT.read(payload).result)
            after = entries[-1][0]


def _fields(query: str, session: str, now: int) -> tuple[str, ...]:
    return (
        *("source", _SENDER, "time", str(now), "correlation_id", query, "session_id", session),
        *("respondent_id", "A", "user_id", _USER),
    )
