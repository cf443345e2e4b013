"""One open connection to a Redis server: commands leave as bytes, replies arrive in the moment they are read.

RESP2, as every server from Redis 6 and every Valkey speaks it without a greeting (https://redis.io/docs/latest/develop/reference/protocol-spec/).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any, cast

import hiredis

from shared.bus.endpoint import Server
from shared.bus.port import Command, Reply, ReplyError


class Desync(Exception):
    """Replies do not belong to the commands that wait for them."""


def packed(commands: Sequence[Command]) -> bytes:
    """Commands as they are sent."""
    return b"".join([hiredis.pack_command(command) for command in commands])


class Wire(asyncio.Protocol):
    """Replies go to `receive` in the moment they arrive, those of one read together, without a task in between.

    lost: the reason, once the connection has ended or `receive` could not make sense of a reply.
    heard: the loop's time at which the last bytes came.
    """

    transport: asyncio.WriteTransport

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[Exception] = self._loop.create_future()
        self.receive: Callable[[list[Reply]], None] = self._unasked
        self.heard = self._loop.time()
        self._ended = False
        self._parser = hiredis.Reader(protocolError=Desync, replyError=ReplyError)

    async def ask(self, commands: Sequence[Command]) -> list[Reply]:
        """The replies of the connection's first commands. Raises what ended it before they came: what
        the server had said last, when it is the server that closed it."""
        replies: list[Reply] = []
        complete: asyncio.Future[None] = self._loop.create_future()

        def take(found: list[Reply]) -> None:
            replies.extend(found)
            if len(replies) > len(commands):
                self._unasked(found)
            if len(replies) == len(commands):
                self.receive = self._unasked
                if not complete.done():
                    complete.set_result(None)

        self.receive = take
        self.send(commands)
        either: set[asyncio.Future[Any]] = {complete, self.lost}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not complete.done():
            # one that wants a password closes the connection at the first long command
            refusals = [str(reply) for reply in replies if isinstance(reply, ReplyError)]
            raise ConnectionError(refusals[0]) if refusals else self.lost.result()
        return replies

    def send(self, commands: Sequence[Command]) -> None:
        """Writes commands; what they are answered goes to `receive`."""
        self.write([packed(commands)])

    def write(self, data: Sequence[bytes]) -> None:
        """Writes what is packed already, together and without a copy. On a connection that has been closed it is lost,
        as on one that is about to be (uvloop raises RuntimeError there): `lost` says so."""
        if not self.transport.is_closing():
            self.transport.writelines(data)

    def abort(self) -> None:
        """Closes the connection at once, and throws away what is still on its way.

        Left to the system it would arrive later, beside what is sent again, or when somebody else has done the work.
        One that has ended stays as it is: its socket's number may be another's by now, and uvloop raises ValueError.
        """
        if self._ended:
            return
        sock = self.transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _unasked(self, _replies: list[Reply]) -> None:
        raise Desync("a reply that nobody asked for")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's
        self.transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        # whatever follows a reply that made no sense makes none either
        if self.lost.done():
            return
        self.heard = self._loop.time()
        try:
            self._parser.feed(data)
            next_reply = self._parser.gets
            replies = []
            while (reply := next_reply()) is not False:
                replies.append(reply)
            if replies:
                self.receive(replies)
        except Exception as exc:
            # handled where the connection is replaced; raised here it would end in the event loop's log
            self.lost.set_result(exc)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        if not self.lost.done():
            self.lost.set_result(exc or ConnectionError("Redis closed the connection"))


async def open_wire(server: Server, commands: Sequence[Command] = ()) -> tuple[Wire, list[Reply]]:
    """A connection that has introduced itself, and the replies to further first commands.

    Raises OSError when the server cannot be reached or refuses the password.
    """
    loop = asyncio.get_running_loop()
    if server.path is not None:
        _, wire = await loop.create_unix_connection(Wire, server.path)
    else:
        _, wire = await loop.create_connection(Wire, server.host, server.port, ssl=server.tls)
    try:
        greeting = server.greeting()
        replies = await wire.ask([*greeting, *commands]) if greeting or commands else []
        for reply in replies[: len(greeting)]:
            if isinstance(reply, ReplyError):
                raise ConnectionError(str(reply))
    except BaseException:
        wire.abort()
        raise
    return wire, replies[len(greeting) :]
