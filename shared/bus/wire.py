"""One open connection to a Redis server: commands leave as bytes, replies arrive in the moment they are read.

RESP2, as every server from Redis 6 and every Valkey speaks it without a greeting (https://redis.io/docs/latest/develop/reference/protocol-spec/).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import parse_qsl, unquote, urlsplit

import hiredis

from shared.bus.port import Command, Reply, ReplyError

_CERTIFICATES = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}
_SSL_OPTIONS = frozenset(
    {
        "ssl_cert_reqs",
        "ssl_ca_certs",
        "ssl_ca_path",
        "ssl_certfile",
        "ssl_keyfile",
        "ssl_password",
        "ssl_check_hostname",
    }
)
# What other clients take in a URL and what makes no difference here.
_IGNORED = frozenset(
    {"protocol", "socket_timeout", "socket_connect_timeout", "max_connections", "health_check_interval", "client_name"}
)


class Desync(Exception):
    """Replies do not belong to the commands that wait for them."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where a server listens, and as whom it is spoken to. `path`: a unix socket, instead of host and port."""

    host: str = "localhost"
    port: int = 6379
    path: str | None = None
    username: str | None = None
    password: str | None = None
    database: int = 0
    tls: ssl.SSLContext | None = None

    @classmethod
    def parse(cls, url: str) -> Server:
        """`redis://`, `rediss://` or `unix://`, as redis-py and redis-cli write them. Raises ValueError."""
        parts = urlsplit(url)
        try:
            port = parts.port or 6379
        except ValueError:
            # its own words show what stands there, which may be a password with its server left out
            raise ValueError("the port is no number from 0 to 65535") from None
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        database = options.pop("db", "")
        username = options.pop("username", None) or (unquote(parts.username) if parts.username else None)
        password = options.pop("password", None) or (unquote(parts.password) if parts.password else None)
        if parts.scheme == "unix":
            host, port, path = "localhost", 0, unquote(parts.path)
        else:
            host, port, path = unquote(parts.hostname or "localhost"), port, None
            database = database or parts.path.strip("/")
        if database and not database.isdecimal():
            raise ValueError(f"the database must be a number, not {database!r}")
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise ValueError("the URL of one server begins with redis://, rediss:// or unix://")
        tls = _context(options) if parts.scheme == "rediss" else None
        unknown = options.keys() - _IGNORED - (_SSL_OPTIONS if tls else frozenset())
        if unknown:
            raise ValueError(f"unknown options: {', '.join(sorted(unknown))}")
        return cls(host, port, path, username, password, int(database or 0), tls)

    def greeting(self) -> list[Command]:
        """The commands that a new connection begins with."""
        commands: list[Command] = []
        if self.password is not None:
            commands.append(("AUTH", *([self.username] if self.username else []), self.password))
        if self.database:
            commands.append(("SELECT", self.database))
        return commands


def _context(options: dict[str, str]) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"), capath=options.get("ssl_ca_path"))
    wanted = options.get("ssl_cert_reqs", "required").lower()
    if wanted not in _CERTIFICATES:
        raise ValueError(f"ssl_cert_reqs must be one of {', '.join(_CERTIFICATES)}")
    # Python 3.13 wants of certificates what those of one's own authority often lack, and what 3.12 takes
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    checked = options.get("ssl_check_hostname", "true").lower() not in ("0", "false", "no")
    context.check_hostname = checked and wanted != "none"
    context.verify_mode = _CERTIFICATES[wanted]
    if certificate := options.get("ssl_certfile"):
        context.load_cert_chain(certificate, options.get("ssl_keyfile"), options.get("ssl_password"))
    return context


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
