"""Following journals: whoever writes an entry rings, with the entry in the message, and who follows has it at once.

The stream stays the truth. The ids of one writer are dense: a follower that is rung for the next one has missed
nothing, and takes the entry from the message; at anything else it reads the stream. A ring can get lost, so journals
are looked at now and then, all of them in one write. What an event costs does not grow with the number of journals that
are followed, and a cluster needs no more than one connection per master.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

from shared.bus.endpoint import Server
from shared.bus.follow import Follower, Tail, directly_before
from shared.bus.link import Link
from shared.bus.port import Reply
from shared.bus.streams import Bus, order
from shared.bus.wire import Wire

# The end of a script that adds an entry to KEYS[1]. What is large is announced only: Redis would keep a copy of it for
# every listener. A user who may not publish has written all the same.
RING = """
local function ring(id, kind, time, data)
  local message = id
  if #data <= 8192 then message = id .. ' ' .. kind .. ' ' .. time .. ' ' .. data end
  redis.pcall('SPUBLISH', KEYS[1], message)
end
"""

# A connection that has been silent is asked whether it lives.
_SILENCE = 1.0


class Bell(Tail):
    """All followers of journals. Opens a connection when somebody follows; made by `open_bell`."""

    # what was not rung is known after a look
    pause = 0.5

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus)
        self._lines: dict[Server, _Line] = {}

    # ── who follows what ─────────────────────────────────────────────────────────────────────────────────────

    def join(self, follower: Follower) -> None:
        super().join(follower)
        line = self._line(follower.stream)
        if line is not None and line.listen(follower.stream):
            follower.look()

    def leave(self, follower: Follower) -> None:
        super().leave(follower)
        if follower.stream not in self._followers:
            for line in self._lines.values():
                line.forget(follower.stream)

    def streams_of(self, line: _Line) -> list[str]:
        """What is followed over a connection."""
        return [stream for stream in self._followers if self._line(stream) is line]

    def _line(self, stream: str) -> _Line | None:
        """The connection on which a stream rings; None while nobody is known to have it."""
        server = self.bus.link.server_of(stream)
        if server is None:
            return None
        line = self._lines.get(server)
        if line is None:
            line = self._lines[server] = _Line(self, server)
            line.open()
        return line

    async def close(self) -> None:
        """Nobody follows any more."""
        for line in self._lines.values():
            await line.__aexit__()

    # ── what is heard ────────────────────────────────────────────────────────────────────────────────────────

    def rang(self, stream: str, message: bytes) -> None:
        """Takes a message; whatever it holds, the stream is the truth."""
        followers = self._followers.get(stream)
        if not followers:
            return
        entry_id, *fields = message.split(b" ", 3)
        try:
            at = order(entry_id.decode())
        except ValueError:
            fields = []
        if len(fields) < 3:
            self.look(stream)
            return
        kind, time, data = fields
        if directly_before(at) == order(self._told[stream]):
            # of no other one: a message that lies must not hide what was not rung
            self._told[stream] = f"{at[0]}-{at[1]}"
        entry = (entry_id.decode(), [b"type", kind, b"time", time, b"data", data])
        for follower in followers:
            follower.offer(at, entry, len(message))

    async def _look_around(self) -> None:
        """Every stream is listened to where it is now; what was not rung is found."""
        for stream in list(self._followers):
            line = self._line(stream)
            if line is not None:
                line.listen(stream)
        for server, line in list(self._lines.items()):
            # one that answers may be needed again
            if line.trouble and not self.streams_of(line):
                await self._lines.pop(server).__aexit__()
        await super()._look_around()


class _Line(Link):
    """The connection to one server. It carries subscriptions alone, and asks for them anew whenever it is opened."""

    def __init__(self, bell: Bell, server: Server) -> None:
        super().__init__(server, name=f"{bell.bus.source}:bell", timeout=bell.bus.timeout)
        self._bell = bell
        # streams that ring here, as the server has confirmed
        self._listening: set[str] = set()

    def listen(self, stream: str) -> bool:
        """Asks for a stream's rings; True when they come already."""
        if self._wire is None:
            return False
        if stream not in self._listening:
            self._wire.send([("SSUBSCRIBE", stream)])
        return stream in self._listening

    def forget(self, stream: str) -> None:
        if stream in self._listening and self._wire is not None:
            # whoever comes back meanwhile asks anew
            self._listening.discard(stream)
            self._wire.send([("SUNSUBSCRIBE", stream)])

    async def _watch(self, wire: Wire) -> NoReturn:
        """Asks for what rings here. Raises TimeoutError when a server that was asked does not say that it lives."""
        # what rang meanwhile is found in the streams
        self._listening.clear()
        wire.send([("SSUBSCRIBE", stream) for stream in self._bell.streams_of(self)])
        asked = wire.heard
        while wire.heard >= asked:
            await asyncio.sleep(_SILENCE)
            if self._loop.time() - wire.heard >= _SILENCE:
                asked = self._loop.time()
                wire.send([("PING",)])
                await asyncio.sleep(self._patience)
        raise TimeoutError(f"Redis has not answered for {self._patience:g} s")

    def _receive(self, replies: list[Reply]) -> None:
        self._useful = True
        for reply in replies:
            self._take(reply)

    def _take(self, reply: Reply) -> None:
        match reply:
            case [b"smessage", stream, message]:
                self._bell.rang(stream.decode(), message)
            case [b"ssubscribe", stream, _]:
                self._listening.add(stream.decode())
                # what was written before this moment was not rung; whoever asked may have left already
                if not self._bell.look(stream.decode()):
                    self.forget(stream.decode())
            case [b"sunsubscribe", stream, _]:
                # also when the slot goes to another master
                self._listening.discard(stream.decode())
            case Exception() if str(reply).startswith("MOVED"):
                # a look finds out where it is now
                pass
            case Exception():
                # a user who may not listen: the streams are looked at
                self._report(str(reply), self.generation)


@asynccontextmanager
async def open_bell(bus: Bus) -> AsyncIterator[Bell]:
    """A bell for as long as the block runs."""
    bell = Bell(bus)
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(bell.watch(), name="bell")
        try:
            yield bell
        finally:
            watching.cancel()
            await bell.close()
