"""Connections of redis-py that report progress and discard what is unsent when they end.

redis-py closes a connection gracefully: the operating system still delivers what was written. The bus sends unanswered
commands again on a new connection, so the old copies must not arrive beside them. redis-py's public API has no way to
discard them, nor to see whether the bytes of a long message are moving. This subclass adds both, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
from collections.abc import Sequence
from fcntl import ioctl
from termios import TIOCOUTQ
from typing import Any, cast

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ResponseError

from shared.bus.replies import Command, Reply, ReplyError


class _Receiver(asyncio.Protocol):
    """Pass events on to the protocol of redis-py's stream, and note when bytes arrive."""

    def __init__(self, inner: asyncio.Protocol) -> None:
        self._inner = inner
        self._loop = asyncio.get_running_loop()
        self.received_at = self._loop.time()

    def data_received(self, data: bytes) -> None:
        self.received_at = self._loop.time()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


class BusConnection(AbstractConnection):  # type: ignore[misc]
    """What `bus_connection_class` adds to redis-py's connection classes."""

    transport: asyncio.WriteTransport | None = None
    _receiver: _Receiver

    async def _connect(self) -> None:
        await super()._connect()
        transport = self.transport = cast(asyncio.WriteTransport, self._writer.transport)
        self._receiver = _Receiver(cast(asyncio.Protocol, transport.get_protocol()))
        transport.set_protocol(self._receiver)

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


async def read_reply(connection: BusConnection) -> Reply:
    """Return the next reply; an error of a command is a ReplyError, also inside a transaction's list."""
    try:
        reply = await connection.read_response(disable_decoding=True)
    except ResponseError as exc:
        return reply_error(exc)
    if type(reply) is list:
        for position, one in enumerate(reply):
            if isinstance(one, ResponseError):
                reply[position] = reply_error(one)
    return reply


async def exchange(connection: BusConnection, commands: Sequence[Command]) -> list[Reply]:
    """Send commands and return their replies; only for a connection that nothing else uses."""
    await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
    return [await read_reply(connection) for _ in commands]


def reply_error(exc: Exception) -> ReplyError:
    """Return the error with the server's own text: redis-py removes the code of those that it has a class for."""
    code, text = getattr(exc, "status_code", None), str(exc)
    return ReplyError(f"{code} {text}" if code and not text.startswith(code) else text)


def is_busy(exc: BaseException) -> bool:
    """Return whether a server refused a command because a script has run for too long."""
    return isinstance(exc, ResponseError | ReplyError) and str(exc).startswith("BUSY ")
