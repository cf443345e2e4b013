"""A graph server on loopback that speaks Bolt 4.4 and finds nothing, and refuses or stands still where a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from support.loopback import listening

_HELLO, _GOODBYE, _RESET, _RUN, _BEGIN, _COMMIT, _ROLLBACK = 0x01, 0x02, 0x0F, 0x10, 0x11, 0x12, 0x13
_SUCCESS, _IGNORED, _FAILURE = 0x70, 0x7E, 0x7F
_NAMES = {_HELLO: "HELLO", _BEGIN: "BEGIN", _COMMIT: "COMMIT", _ROLLBACK: "ROLLBACK"}


@dataclass
class BoltServer:
    """refuses: what no query may contain. silent: at which message (or query) it stops to answer, for good."""

    refuses: tuple[str, ...] = ()
    silent: str = ""
    port: int = 0
    # queries with whether they stood in a transaction; most: transactions that were open at the same time
    queries: list[tuple[str, bool]] = field(default_factory=list)
    most: int = 0
    _open: int = 0

    @property
    def address(self) -> str:
        return f"bolt://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._speak(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _speak(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(20)
        writer.write(bytes([0, 0, 4, 4]))
        within = failed = False
        while True:
            message = await _message(reader)
            tag = message[1]
            said = _text(message[2:]) if tag == _RUN else _NAMES.get(tag, "")
            if tag == _RUN and not failed:
                self.queries.append((said, within))
            if self.silent and self.silent in said:
                await reader.read()
                return
            if tag == _GOODBYE:
                return
            if tag == _RESET:
                failed = within = False
            elif failed:
                _say(writer, _IGNORED)
                continue
            elif any(word in said for word in self.refuses):
                failed = True
                _say(writer, _FAILURE, {"code": "Neo.ClientError.Statement.SyntaxError", "message": "no such form"})
                continue
            elif tag == _BEGIN:
                within = True
                self._open += 1
                self.most = max(self.most, self._open)
                await asyncio.sleep(0.01)
            elif tag in (_COMMIT, _ROLLBACK):
                within = False
                self._open -= 1
            _say(writer, _SUCCESS, {"server": "Neo4j/4.4.0", "connection_id": "c"} if tag == _HELLO else {})


@asynccontextmanager
async def bolt_server(refuses: tuple[str, ...] = (), silent: str = "") -> AsyncIterator[BoltServer]:
    here = BoltServer(refuses, silent)
    async with listening(here.serve) as here.port:
        yield here


async def _message(reader: asyncio.StreamReader) -> bytes:
    whole = b""
    while size := int.from_bytes(await reader.readexactly(2), "big"):
        whole += await reader.readexactly(size)
    return whole


def _text(packed: bytes) -> str:
    if packed[0] == 0xD0:
        return packed[2 : 2 + packed[1]].decode()
    if packed[0] == 0xD1:
        return packed[3 : 3 + int.from_bytes(packed[1:3], "big")].decode()
    return packed[1 : 1 + (packed[0] & 0x0F)].decode()


def _say(writer: asyncio.StreamWriter, tag: int, words: dict[str, str] | None = None) -> None:
    body = bytes([0xB0 if words is None else 0xB1, tag])
    if words is not None:
        body += bytes([0xA0 + len(words)])
        for part in (part for pair in words.items() for part in pair):
            body += bytes([0xD0, len(part)]) + part.encode()
    if tag == _SUCCESS and not words:
        # what a RUN and a PULL are answered with, in one
        body = bytes([0xB1, tag, 0xA1, 0x86]) + b"fields" + bytes([0x90])
    writer.write(len(body).to_bytes(2, "big") + body + bytes(2))


__all__ = ["BoltServer", "bolt_server"]
