"""A first token's hops by themselves: what is asked, written and told on its way, and no code of ours.

`door` takes POST /query (uvicorn and a bare ASGI application), accepts by one script and tells what rings; `answerer`
reads queries as a group, claims by one script, asks the model server and writes what that says. What is kept and told
is about as long as LoCAL2's. Nothing is checked, limited in time or sent again, no session has a place in it, and one
question is under way at a time.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from typing import Any
from urllib.parse import urlsplit

import hiredis
import httptools
import orjson
import uvicorn
import uvloop

QUERIES, GROUP, RECORDS = "{hops}:queries", "answerer", "{hops}:record:"
_ACCEPT = """
local id = redis.call('XADD', KEYS[1], '*', unpack(ARGV))
redis.call('HSET', KEYS[2] .. id, unpack(ARGV))
redis.call('EXPIRE', KEYS[2] .. id, 86400)
return id
"""
_WRITE = """
for i = 1, #ARGV, 3 do
  redis.call('XADD', KEYS[1], ARGV[i], 'type', ARGV[i + 1], 'data', ARGV[i + 2])
  redis.call('SPUBLISH', KEYS[1], ARGV[i] .. ' ' .. ARGV[i + 1] .. ' ' .. ARGV[i + 2])
end
redis.call('EXPIRE', KEYS[1], 86400)
"""
# as long as ours
_ABOUT = ("about", "x" * 200)
_CLAIM, _STATE = b'{"about":"%b"}' % (b"x" * 200), b'{"from":"IDLE","action":"RECEIVE","to":"RECEIVING"}'
_BEGUN = ("1-1", "claimed", _CLAIM, "1-2", "state", _STATE, "1-3", "state", _STATE)


class Wire(asyncio.Protocol):
    """A socket and a parser. `told` is given what nobody has asked for."""

    def __init__(self) -> None:
        self._asked: asyncio.Queue[Any] = asyncio.Queue()
        self.told: asyncio.Queue[list[bytes]] = asyncio.Queue()
        self._parser = hiredis.Reader()

    @classmethod
    async def open(cls) -> Wire:
        parts = urlsplit(os.environ["BENCH_REDIS"])
        _, wire = await asyncio.get_running_loop().create_connection(cls, parts.hostname, parts.port or 6379)
        if parts.password:
            await wire.ask("AUTH", parts.password)
        return wire

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def send(self, *command: Any) -> None:
        self._transport.write(hiredis.pack_command(command))

    async def ask(self, *command: Any) -> Any:
        self.send(*command)
        reply = await self._asked.get()
        if isinstance(reply, hiredis.ReplyError):
            raise reply
        return reply

    def data_received(self, data: bytes) -> None:
        self._parser.feed(data)
        while (reply := self._parser.gets()) is not False:
            pushed = isinstance(reply, list) and reply and reply[0] in (b"smessage", b"ssubscribe", b"sunsubscribe")
            (self.told if pushed else self._asked).put_nowait(reply)


class Door:
    def __init__(self, bus: Wire, bell: Wire, accept: bytes) -> None:
        self._bus, self._bell, self._accept = bus, bell, accept

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        said = orjson.loads((await receive())["body"])
        fields = (*_ABOUT, "payload", orjson.dumps(said))
        query = (await self._bus.ask("EVALSHA", self._accept, 2, QUERIES, RECORDS, *fields)).decode()
        journal = f"{{hops}}:journal:{query}"
        self._bell.send("SSUBSCRIBE", journal)
        head = [(b"content-type", b"text/event-stream"), (b"x-query-id", query.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        told, kind = 0, b""
        while kind != b"completed":
            what, _, message = await self._bell.told.get()
            rows = [message.split(b" ", 2)] if what == b"smessage" else []
            if what == b"ssubscribe":
                # what was written before was not rung
                rows = [[at, row[1], row[3]] for at, row in await self._bus.ask("XRANGE", journal, "-", "+")]
            if new := [row for row in rows if int(row[0][2:]) > told]:
                told, kind = int(new[-1][0][2:]), new[-1][1]
                body = b"".join([b"id: %b\nevent: %b\ndata: %b\n\n" % tuple(row) for row in new])
                await send({"type": "http.response.body", "body": body, "more_body": kind != b"completed"})
        self._bell.send("SUNSUBSCRIBE", journal)


class Model(asyncio.Protocol):
    """One connection to the model server, and the body of its answer piece by piece."""

    open = False

    def connection_made(self, transport: Any) -> None:
        self._transport, self.open = transport, True

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False

    def ask(self, host: str, body: bytes) -> asyncio.Queue[bytes]:
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue()
        head = f"POST /api/chat HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)
        return self._pieces

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._pieces.put_nowait(body)


async def answer() -> None:
    parts, loop = urlsplit(os.environ["BENCH_MODEL"]), asyncio.get_running_loop()
    bus, reader = await Wire.open(), await Wire.open()
    model, write = Model(), await bus.ask("SCRIPT", "LOAD", _WRITE)
    await bus.ask("XGROUP", "CREATE", QUERIES, GROUP, "0", "MKSTREAM")
    print('"ready"', flush=True)
    while True:
        read = ("XREADGROUP", "GROUP", GROUP, "one", "COUNT", 1, "BLOCK", 0, "STREAMS", QUERIES, ">")
        (((_, ((query, fields),)),),) = (await reader.ask(*read),)
        said, journal = orjson.loads(fields[-1]), f"{{hops}}:journal:{query.decode()}"
        await bus.ask("EVALSHA", write, 1, journal, *_BEGUN)
        asked = {"model": "bench", "stream": True, "messages": [{"role": "user", "content": said["query"]}]}
        if not model.open:
            # the server closes what is idle
            _, model = await loop.create_connection(Model, parts.hostname, parts.port)
        pieces, number, done = model.ask(parts.netloc, orjson.dumps(asked)), 4, False
        while not done:
            for line in (await pieces.get()).splitlines():
                part = orjson.loads(line)
                done = part["done"]
                kind, data = ("completed", {}) if done else ("answer", {"text": part["message"]["content"]})
                await bus.ask("EVALSHA", write, 1, journal, f"1-{number}", kind, orjson.dumps(data))
                number += 1
        await bus.ask("XACK", QUERIES, GROUP, query)


async def serve() -> None:
    bus = await Wire.open()
    door = Door(bus, await Wire.open(), await bus.ask("SCRIPT", "LOAD", _ACCEPT))
    listener = socket.create_server(("127.0.0.1", 0))
    print(f'"http://127.0.0.1:{listener.getsockname()[1]}"', flush=True)
    config = uvicorn.Config(door, lifespan="off", log_config=None, access_log=False, server_header=False)
    await uvicorn.Server(config).serve(sockets=[listener])


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve() if sys.argv[1] == "door" else answer())
