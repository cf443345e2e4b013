"""A server on loopback that speaks Redis' protocol and answers what the test says."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import hiredis
from support.loopback import listening

from shared.bus import ReplyError


class HangUp(Exception):
    """Raised by an answer: the connection ends here."""


class ScriptedRedis:
    """answers: by a command's first word a reply, or what makes one of its parts; `...` is no reply at all. What is not
    among them is answered as by a server that has all scripts and is well, at five thousand seconds of its clock.

    asked: what each connection was asked, in its order.
    """

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[str, Any] = {
            "AUTH": "OK",
            "CLIENT": lambda *parts: len(self.asked) if parts[1] == b"ID" else "OK",
            "ECHO": lambda _name, text: text,
            "HELLO": [b"server", b"redis", b"mode", b"standalone"],
            "MULTI": "OK",
            "PING": "PONG",
            "ROLE": [b"master", 0, []],
            "SCRIPT": lambda _name, what, *shas: [1] * len(shas) if what == b"EXISTS" else "OK",
            "SELECT": "OK",
            "TIME": [b"5000", b"0"],
            "ZRANGE": [],
            **answers,
        }
        self.asked: list[list[tuple[bytes, ...]]] = []
        self._open: set[asyncio.StreamWriter] = set()

    @contextlib.asynccontextmanager
    async def listening(self, *, tls: ssl.SSLContext | None = None, path: Path | None = None) -> AsyncIterator[str]:
        """Listen during the block, and yield the URL. path: of a unix socket, instead of a port."""
        async with listening(self._serve, tls=tls, path=path) as port:
            self.port = port
            yield f"unix://{path}" if path else f"redis{'s' if tls else ''}://127.0.0.1:{port}"

    def behind(self) -> list[list[tuple[bytes, ...]]]:
        """What each connection was asked behind its handshake, without the numbers that end each write."""
        found = []
        for asked in self.asked:
            start = asked.index((b"TIME",)) + 1 if (b"TIME",) in asked else len(asked)
            found.append([one for one in asked[start:] if one[0] not in (b"ECHO", b"SCRIPT")])
        return found

    def cut(self) -> None:
        """Breaks every open connection."""
        for writer in self._open:
            writer.transport.abort()

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._open)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        asked: list[tuple[bytes, ...]] = []
        self.asked.append(asked)
        parser = hiredis.Reader()
        try:
            while data := await reader.read(65_536):
                parser.feed(data)
                while (command := parser.gets()) is not False:
                    asked.append(tuple(command))
                    found = self.answers.get(command[0].decode(), ReplyError("ERR unknown command"))
                    reply = found(*command) if callable(found) else found
                    if reply is not ...:
                        writer.write(packed(reply))
        except HangUp:
            return
        finally:
            self._open.discard(writer)


def packed(reply: Any) -> bytes:
    """A reply as it is sent; a text is a status."""
    match reply:
        case None:
            return b"$-1\r\n"
        case str():
            return f"+{reply}\r\n".encode()
        case int():
            return b":%d\r\n" % reply
        case bytes():
            return b"$%d\r\n%s\r\n" % (len(reply), reply)
        case Exception():
            return f"-{reply}\r\n".encode()
        case _:
            return b"*%d\r\n" % len(reply) + b"".join(map(packed, reply))
