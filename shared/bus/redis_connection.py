"""Connections of redis-py that report progress, parse replies at once, and discard what is unsent when they end.

redis-py closes a connection gracefully: the operating system still delivers what was written. The bus sends unanswered
commands again on a new connection, so the old copies must not arrive beside them. redis-py's public API has no way to
discard them, nor to see whether the bytes of a long message are moving. This subclass adds both.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from fcntl import ioctl
from termios import TIOCOUTQ
from typing import Any, NoReturn, cast

import hiredis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ResponseError

from shared.bus.replies import Command, Reply, ReplyError

_INCOMPLETE = object()


class _Receiver(asyncio.Protocol):
    """Pass events on to the protocol of redis-py's stream, and replies to a function once there is one.

    received_at: the loop's time at which bytes arrived last. take: called with each reply. end: the error after which
    no reply comes.
    """

    def __init__(self, inner: asyncio.Protocol) -> None:
        self._inner = inner
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(replyError=ReplyError, notEnoughData=_INCOMPLETE)
        self.take: Callable[[Reply], None] | None = None
        self.end: asyncio.Future[Exception] = self._loop.create_future()
        self.received_at = self._loop.time()

    def data_received(self, data: bytes) -> None:
        self.received_at = self._loop.time()
        if self.take is None:
            self._inner.data_received(data)
        elif not self.end.done():
            try:
                self._reader.feed(data)
                while (reply := self._reader.gets()) is not _INCOMPLETE:
                    self.take(reply)
            except Exception as exc:
                self._end(exc)

    def eof_received(self) -> bool | None:
        self._end(None)
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc)
        self._inner.connection_lost(exc)

    def _end(self, exc: Exception | None) -> None:
        if not self.end.done():
            self.end.set_result(exc or ConnectionError("Redis closed the connection"))

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


class BusConnection(AbstractConnection):  # type: ignore[misc]
    """The mix-in that `bus_connection_class` adds to redis-py's connection classes."""

    transport: asyncio.WriteTransport | None = None
    _receiver: _Receiver

    async def _connect(self) -> None:
        await super()._connect()
        transport = self.transport = cast(asyncio.WriteTransport, self._writer.transport)
        self._receiver = _Receiver(cast(asyncio.Protocol, transport.get_protocol()))
        transport.set_protocol(self._receiver)

    async def write(self, *packed: bytes) -> None:
        """Write packed commands. Raises ConnectionError when the connection is closed: redis-py would open it again."""
        if not self.is_connected:
            raise ConnectionError("Redis closed the connection")
        await self.send_packed_command(packed, check_health=False)

    async def receive(self, take: Callable[[Reply], None]) -> NoReturn:
        """Call `take` with each reply from now on, errors included. Raise an error of `take`, or that of the end.

        Nothing else may read this connection any more.
        """
        # perf: by redis-py's `read_response`, a tool call takes 20 % more CPU (make bench-peers).
        self._receiver.take = take
        raise await self._receiver.end

    async def disconnect(self, nowait: bool = True, **details: Any) -> None:
        """Close the connection at once, and discard what is unsent."""
        transport, self.transport = self.transport, None
        if transport is not None and not transport.is_closing():
            sock = transport.get_extra_info("socket")
            # A unix socket has delivered already what was written.
            if sock is not None and sock.family != socket.AF_UNIX:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()
        await super().disconnect(nowait=True, **details)

    @property
    def received_at(self) -> float:
        """The loop's time at which bytes arrived last."""
        return self._receiver.received_at

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the other side has not acknowledged, so far as this system reports them."""
        if self.transport is None:
            return 0
        count = bytearray(4)
        # The send buffer of the system may have megabytes of a long message.
        with contextlib.suppress(OSError, ValueError):
            ioctl(self.transport.get_extra_info("socket").fileno(), TIOCOUTQ, count)
        return self.transport.get_write_buffer_size() + int.from_bytes(count, sys.byteorder)


def bus_connection_class(base: type[AbstractConnection]) -> type[BusConnection]:
    """Return one of redis-py's connection classes with BusConnection mixed in."""
    return type(f"Bus{base.__name__}", (BusConnection, base), {})


def pack(*commands: Command) -> bytes:
    """Return commands as the bytes to send."""
    # redis-py's own packing for asyncio is in Python, and takes eight times as long.
    return b"".join([hiredis.pack_command(command) for command in commands])


async def exchange(connection: BusConnection, commands: Sequence[Command]) -> list[Reply]:
    """Send commands and return their replies, errors as values; before `BusConnection.receive`."""
    await connection.write(pack(*commands))
    return [await _reply(connection) for _ in commands]


async def _reply(connection: BusConnection) -> Reply:
    try:
        return await connection.read_response(disable_decoding=True)
    except ResponseError as exc:
        return reply_error(exc)


def reply_error(exc: Exception) -> ReplyError:
    """Return the error with the server's own text: redis-py removes the code of those that it has a class for."""
    code, text = getattr(exc, "status_code", None), str(exc)
    return ReplyError(f"{code} {text}" if code and not text.startswith(code) else text)


def is_busy(exc: BaseException) -> bool:
    """Return whether a server refused a command because a script has run for too long."""
    return isinstance(exc, ResponseError | ReplyError) and str(exc).startswith("BUSY ")
