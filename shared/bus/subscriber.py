"""Follow journals by pub/sub: every journal writer publishes the entry that it adds, and followers have it at once.

The stream decides. The ids of one writer are dense: a follower that is offered the next id has missed nothing, and at
any other id it reads the stream. A message can get lost, so all journals are also polled now and then. The cost
of an event does not grow with the number of followed journals.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

from shared.bus.follow import Follower, StreamTailer, directly_before
from shared.bus.reconnecting import Reconnecting, until_first_ends
from shared.bus.redis_connection import BusConnection, pack
from shared.bus.replies import Command, Reply, ReplyError
from shared.bus.scripts import FOLDER
from shared.bus.streams import Bus
from shared.envelope import order

# Defines the function with which scripts publish an entry that they add to KEYS[1].
PUBLISH_ENTRY = FOLDER / "publish_entry.lua"

# Seconds of silence after which a connection gets a PING.
_SILENCE_S = 1.0


class JournalSubscriber(StreamTailer):
    """All followers of journals of a process; made by `open_subscriber`."""

    # Seconds after which an entry that was not published is found.
    pause = 0.5

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus)
        self._subscription = _Subscription(self)

    def add(self, follower: Follower) -> None:
        super().add(follower)
        if self.subscribed(follower.stream):
            # Entries may have been published since the follower read the stream.
            follower.wake()
        self._subscription.update(follower.stream)

    def remove(self, follower: Follower) -> None:
        super().remove(follower)
        self._subscription.update(follower.stream)

    def subscribed(self, stream: str) -> bool:
        """Return whether the server has confirmed the subscription to a stream's channel."""
        return stream in self._subscription.confirmed

    def streams(self) -> list[str]:
        """Return the followed streams."""
        return list(self._followers)

    async def run(self) -> NoReturn:
        """Subscribe and poll until cancelled. The connection opens when there is a first follower."""
        await self._followed.wait()
        async with self._subscription:
            while True:
                await self._followed.wait()
                await asyncio.sleep(self.pause)
                await self.poll()

    def on_message(self, stream: str, message: bytes) -> None:
        """Take a published entry: id, type, time and data. A message without data only announces the entry."""
        followers = self._followers.get(stream)
        if not followers:
            return
        entry_id, *fields = message.split(b" ", 3)
        try:
            at = order(entry_id.decode())
        except ValueError:
            fields = []
        if len(fields) < 3:
            self.wake(stream)
            return
        kind, time, data = fields
        if directly_before(at) == order(self._cursor[stream]):
            # Only for the direct successor: a false message must not hide entries that were not published.
            self._cursor[stream] = f"{at[0]}-{at[1]}"
        entry = (entry_id.decode(), [b"type", kind, b"time", time, b"data", data])
        for follower in followers:
            follower.offer(at, entry, len(message))


class _Subscription(Reconnecting):
    """The connection that is subscribed to the channels of all followed streams, also after it reconnects."""

    def __init__(self, subscriber: JournalSubscriber) -> None:
        bus = subscriber.bus
        super().__init__(bus.server, name=f"{bus.source}:journals", timeout=bus.timeout)
        self._subscriber = subscriber
        # channels that were subscribed on this connection, and those that the server has confirmed
        self._asked: set[str] = set()
        self.confirmed: set[str] = set()
        # streams whose followers have changed since the last write
        self._changed: set[str] = set()
        self._writable = asyncio.Event()

    def update(self, stream: str) -> None:
        """The followers of a stream have changed: subscribe to its channel or unsubscribe."""
        self._changed.add(stream)
        self._writable.set()

    async def serve(self, connection: BusConnection) -> NoReturn:
        self._asked.clear()
        self.confirmed.clear()
        self._changed.update(self._subscriber.streams())
        await until_first_ends(
            self._subscribe(connection), connection.receive(self._on_reply), self._check_alive(connection)
        )

    async def _subscribe(self, connection: BusConnection) -> NoReturn:
        while True:
            followed = set(self._subscriber.streams())
            changed, self._changed = self._changed, set()
            commands: list[Command] = [("SSUBSCRIBE", stream) for stream in changed & followed - self._asked]
            commands += [("SUNSUBSCRIBE", stream) for stream in (changed & self._asked) - followed]
            self._asked = (self._asked | (changed & followed)) - (changed - followed)
            if commands:
                await connection.write(pack(*commands))
            await self._writable.wait()
            self._writable.clear()

    def _on_reply(self, reply: Reply) -> None:
        self.useful = True
        match reply:
            case [b"smessage", stream, message]:
                self._subscriber.on_message(stream.decode(), message)
            case [b"ssubscribe", stream, _]:
                self.confirmed.add(stream.decode())
                # This connection received no notification of earlier entries.
                self._subscriber.wake(stream.decode())
            case [b"sunsubscribe", stream, _]:
                # A node also says this of its own accord when it gives the bus to another node.
                self.confirmed.discard(stream.decode())
                self._asked.discard(stream.decode())
                self.update(stream.decode())
            case ReplyError() if reply.code in ("MOVED", "CLUSTERDOWN"):
                raise ConnectionError(str(reply))
            case ReplyError():
                # A user that may not subscribe: the streams are polled.
                self.report(str(reply))

    async def _check_alive(self, connection: BusConnection) -> NoReturn:
        """Raise TimeoutError when a silent server does not answer."""
        asked = connection.received_at
        while connection.received_at >= asked:
            await asyncio.sleep(_SILENCE_S)
            if self.loop.time() - connection.received_at >= _SILENCE_S:
                asked = self.loop.time()
                await connection.write(pack(("PING",)))
                await asyncio.sleep(self.patience)
        raise TimeoutError(f"Redis has not answered for {self.patience:g} s")


@asynccontextmanager
async def open_subscriber(bus: Bus) -> AsyncIterator[JournalSubscriber]:
    """Run a JournalSubscriber for as long as the block runs."""
    subscriber = JournalSubscriber(bus)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(subscriber.run(), name="journal subscriber")
        try:
            yield subscriber
        finally:
            running.cancel()
