"""Following journals: whoever writes an entry rings, with the entry in the message, and who follows has it at once.

The stream stays the truth. The ids of one writer are dense: a follower that is rung for the next one has missed
nothing, and takes the entry from the message; at anything else it reads the stream. A ring can get lost, so a journal
from which nothing came is looked at now and then, all of them in one write. What an event costs does not grow with the
number of journals that are followed, and a cluster needs no more than one connection per master.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from shared.bus.cluster import ClusterLink
from shared.bus.endpoint import Address
from shared.bus.follow import Feed, Follower, Id
from shared.bus.hash_slots import slot_of_key
from shared.bus.link import Link
from shared.bus.port import Reply, ReplyError
from shared.bus.streams import Bus, order
from shared.bus.wire import Server, Wire
from shared.errors import BusUnavailable

# The end of a script that adds an entry to KEYS[1]. What is large is announced only: Redis would keep a copy of it for
# every listener. A user who may not publish has written all the same.
RING = """
local function ring(id, kind, time, data)
  local message = id
  if #data <= 8192 then message = id .. ' ' .. kind .. ' ' .. time .. ' ' .. data end
  redis.pcall('SPUBLISH', KEYS[1], message)
end
"""

# A journal is looked at when nothing came from it between two rounds: what was not rung is known after two of them.
_ROUND = 0.5
_BATCH = 500
# A connection that has been silent is asked whether it lives.
_SILENCE = 1.0


class Bell(Feed):
    """All followers of a process. Opens a connection when somebody follows; made by `open_bell`.

    patience: seconds after which a connection that does not answer is replaced (see Link).
    """

    def __init__(self, bus: Bus, patience: float) -> None:
        super().__init__(bus)
        self.patience = patience
        # one server has no address: it may be another one with every connection
        self._lines: dict[Address | None, _Line] = {}
        self._rung: set[str] = set()
        self._followed = asyncio.Event()

    # ── who follows what ─────────────────────────────────────────────────────────────────────────────────────

    def join(self, follower: Follower) -> None:
        super().join(follower)
        self._followed.set()
        line = self._line(follower.stream)
        if line is not None and line.listen(follower.stream):
            follower.look()

    def _left(self, stream: str) -> None:
        for line in self._lines.values():
            line.forget(stream)
        if not self._followers:
            self._followed.clear()

    def streams_of(self, line: _Line) -> list[str]:
        """What is followed over a connection."""
        return [stream for stream in self._followers if self._line(stream) is line]

    def _line(self, stream: str) -> _Line | None:
        """The connection on which a stream rings; None while its slot has no master."""
        address = None
        if isinstance(self.bus.link, ClusterLink):
            address = self.bus.link.owner(slot_of_key(stream))
            if address is None:
                return None
        line = self._lines.get(address)
        if line is None:
            line = self._lines[address] = _Line(self, address)
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
        self._rung.add(stream)
        entry_id, *fields = message.split(b" ", 3)
        try:
            at = order(entry_id.decode())
        except ValueError:
            fields = []
        if len(fields) < 3:
            self.look(stream)
            return
        kind, time, data = fields
        entry = (entry_id.decode(), [b"type", kind, b"time", time, b"data", data])
        for follower in followers:
            follower.offer(_before(at), ((at, entry),), len(message))

    def look(self, stream: str) -> bool:
        """There may be something in the stream that was not rung; False when nobody follows it."""
        followers = self._followers.get(stream, ())
        for follower in followers:
            follower.look()
        return bool(followers)

    def moved(self) -> None:
        """A slot has another master than the map says."""
        if isinstance(self.bus.link, ClusterLink):
            self.bus.link.doubt()

    # ── what was not heard ───────────────────────────────────────────────────────────────────────────────────

    async def watch(self) -> None:
        """Finds what was not rung, and connections that are dead."""
        while True:
            await self._followed.wait()
            await asyncio.sleep(_ROUND)
            await self._settle()
            quiet: dict[_Line, list[str]] = {}
            for stream in self._followers.keys() - self._rung:
                if (line := self._line(stream)) is not None:
                    quiet.setdefault(line, []).append(stream)
            self._rung.clear()
            # a node that does not answer must not keep the others from being asked
            await asyncio.gather(*(self._ask(streams) for streams in quiet.values()))

    async def _settle(self) -> None:
        """Every stream is listened to where its slot is now."""
        for stream in list(self._followers):
            line = self._line(stream)
            if line is not None:
                line.listen(stream)
        if isinstance(self.bus.link, ClusterLink):
            for address in self._lines.keys() - self.bus.link.masters.keys():
                await self._lines.pop(address).__aexit__()

    async def _ask(self, streams: Sequence[str]) -> None:
        with contextlib.suppress(TimeoutError, BusUnavailable):
            async with asyncio.timeout(_ROUND):
                for start in range(0, len(streams), _BATCH):
                    await self._ask_some(streams[start : start + _BATCH])

    async def _ask_some(self, streams: Sequence[str]) -> None:
        waiting: dict[str, str] = {}
        for stream in streams:
            positions = [one.position for one in self._followers.get(stream, ()) if one.waiting]
            if positions:
                waiting[stream] = min(positions, key=order)
        if not waiting:
            return
        reads = [("XREAD", "COUNT", 1, "STREAMS", stream, after) for stream, after in waiting.items()]
        replies = await self.bus.link.pipe_raw(reads)
        for stream, reply in zip(waiting, replies, strict=True):
            # a key that is no stream has nothing to say
            if reply and not isinstance(reply, ReplyError):
                self.look(stream)


def _before(at: Id) -> Id:
    """The id behind which an entry comes directly. A journal's first entry is 1-1."""
    epoch, number = at
    return (0, 0) if at == (1, 1) else (epoch, number - 1)


class _Line(Link):
    """The connection to one server. It carries subscriptions alone, and asks for them anew whenever it is opened."""

    def __init__(self, bell: Bell, address: Address | None) -> None:
        super().__init__(Server(), name=f"{bell.bus.source}:bell", timeout=bell.patience)
        self._bell = bell
        self._address = address
        # streams that ring here, as the server has confirmed
        self._listening: set[str] = set()

    def listen(self, stream: str) -> bool:
        """Asks for a stream's rings; True when they come already."""
        if stream in self._listening:
            return True
        if self._wire is not None:
            self._wire.send([("SSUBSCRIBE", stream)])
        return False

    def forget(self, stream: str) -> None:
        if stream in self._listening and self._wire is not None:
            # whoever comes back meanwhile asks anew
            self._listening.discard(stream)
            self._wire.send([("SUNSUBSCRIBE", stream)])

    async def server(self) -> Server:
        link = self._bell.bus.link
        if isinstance(link, ClusterLink):
            assert self._address is not None
            return link.at(self._address)
        assert isinstance(link, Link)
        return await link.server()

    async def _serve(self, wire: Wire, client_id: int) -> None:
        wire.send([("SSUBSCRIBE", stream) for stream in self._bell.streams_of(self)])
        try:
            await super()._serve(wire, client_id)
        finally:
            # what rings meanwhile is found in the streams
            self._listening.clear()

    async def _watch(self, wire: Wire) -> None:
        """Returns when a server that was asked whether it lives does not say so."""
        asked = wire.heard
        while wire.heard >= asked:
            await asyncio.sleep(_SILENCE)
            if self._loop.time() - wire.heard >= _SILENCE:
                asked = self._loop.time()
                wire.send([("PING",)])
                await asyncio.sleep(self._patience)

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
                self._bell.moved()
            case Exception():
                # a user who may not listen: the streams are looked at
                self._report(str(reply), self.generation)


@asynccontextmanager
async def open_bell(bus: Bus, *, patience: float = 5.0) -> AsyncIterator[Bell]:
    """A bell for as long as the block runs."""
    bell = Bell(bus, patience)
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(bell.watch(), name="bell")
        try:
            yield bell
        finally:
            watching.cancel()
            await bell.close()
