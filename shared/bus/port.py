"""What the bus asks of its way to Redis, be it one server, a master behind sentinels or a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from hashlib import sha1
from typing import Any, ClassVar, Protocol

from shared.bus.endpoint import Server
from shared.errors import BusUnavailable, Local2Error, TransientError

Command = tuple[Any, ...]
Reply = Any

# Messages that come up in one loop tick are written so many at a time: Redis, and whoever reads them, begin on these
# while the next ones are prepared.
TOGETHER = 16

# A server that has no room on its disk (MISCONF), or fewer replicas than its configuration wants for a write, refuses
# all writes and goes on reading; one that has none in its memory those that may need more of it.
NO_WRITES = ("MISCONF", "NOREPLICAS")
FULL = ("OOM", *NO_WRITES)


class ReplyError(Local2Error):
    """Redis refused a command. `code` is the first word of its answer."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = text.partition(" ")[0]


class BusFull(TransientError):
    """Redis has reached its memory limit, cannot write to its disk or lacks replicas, and refuses writes."""


class ConnectionLost(Local2Error):
    """The connection broke after the command was sent; whether it was carried out is not known.

    broken: how often it did while a large message was on its way that has not been written in time.
    """

    def __init__(self, text: str, broken: int = 0) -> None:
        super().__init__(text)
        self.broken = broken


class Script:
    """A Lua script. All its keys share a hash slot.

    Whoever connects sees to it that the server knows those of his process, and every heartbeat that it still does; a
    user of Redis who may not load scripts waits for one who may.
    """

    known: ClassVar[dict[str, Script]] = {}

    def __init__(self, source: str) -> None:
        self.source = source
        self.sha = sha1(source.encode(), usedforsecurity=False).hexdigest()
        Script.known[self.sha] = self

    def __call__(self, keys: Sequence[str], *args: Any) -> Command:
        return ("EVALSHA", self.sha, len(keys), *keys, *args)


async def load_scripts(ask: Callable[[Sequence[Command]], Awaitable[list[Reply]]]) -> list[Reply]:
    """Loads those of this process that a server does not know; what it says to that, or why it does not tell which.

    ask: has it carry out commands.
    """
    scripts = list(Script.known.values())
    (known,) = await ask([("SCRIPT", "EXISTS", *[script.sha for script in scripts])])
    if isinstance(known, ReplyError):
        if known.code != "NOPERM":
            return [known]
        # who may not even ask loads them all
        known = [0] * len(scripts)
    loading = [("SCRIPT", "LOAD", script.source) for script, there in zip(scripts, known, strict=True) if not there]
    return await ask(loading) if loading else []


class Port(AbstractAsyncContextManager[Any], Protocol):
    """Sends commands in their order. After a lost connection they are sent again, unless `retry` is off: then
    ConnectionLost is raised, and whether they were carried out is not known.

    one_server: whether all keys are on one: then `commit` is all or nothing, and one read may wait for all streams.
    connected: set while there is somebody to send to.
    """

    one_server: ClassVar[bool]
    connected: asyncio.Event

    @property
    def trouble(self) -> str:
        """Why a connection was lost or could not be made, the last time; empty while that is not so."""

    def server_of(self, stream: str) -> Server | None:
        """The master that has a stream, if it is known just now."""

    def line(self, stream: str, name: str) -> Port:
        """A further connection to whoever has a stream, for a read that waits; it is opened by `async with`."""

    def submit(
        self,
        commands: Sequence[Command],
        retry: bool,
        *,
        block: float = 0.0,
        until: float | None = None,
        now: bool = False,
    ) -> Awaitable[list[Reply]]:
        """The replies to come, errors (ReplyError) at their place; cancelled before it is sent, it never is.

        block: seconds that the server may legitimately keep the replies back.
        until: the loop's time after which they are not sent (again); ConnectionLost is raised then.
        now: there is nothing to come that should leave in the same write. A cluster asks node by node, and need not
        know.
        """

    async def call(self, *command: Any, retry: bool = True, block: float = 0.0, now: bool = False) -> Reply:
        """One command's reply (see `submit`). Raises ReplyError, BusFull, BusUnavailable, ConnectionLost."""
        (reply,) = await self.submit((command,), retry, block=block, now=now)
        return checked(reply)

    async def pipe(self, commands: Sequence[Command], *, retry: bool = True) -> list[Reply]:
        """The replies of several commands, all of them carried out. The first error among them is raised."""
        return [checked(reply) for reply in await self.submit(commands, retry)]

    async def pipe_raw(self, commands: Sequence[Command]) -> list[Reply]:
        """Like `pipe`, with errors (ReplyError) at their place."""
        return await self.submit(commands, True)

    async def places(self) -> Sequence[int]:
        """Whom to ask for what lies in all masters together: a hash slot of each."""

    async def at_place(self, place: int, commands: Sequence[Command]) -> list[Reply]:
        """What the master of a slot answers to commands without a key, errors too."""

    def commit(
        self, commands: Sequence[Command], *, until: float | None = None, retry: bool = True
    ) -> asyncio.Future[list[Reply]]:
        """Several writes of which the last ones say that it is done: they are carried out all or not at all.

        Fails with what a server refused them with: BusFull, ReplyError. A command can still fail while it is carried
        out (a key of the wrong type): its ReplyError stands among the replies. In a cluster, where no transaction spans
        two nodes, they are carried out one after the other, and nothing behind one that was refused.

        Whoever waits in Redis for one of these writes is woken once, after the last of them, and reads them together.
        They leave at once, for whoever gathers commands himself (see TOGETHER). until: see `submit`.
        """


def checked(reply: Reply) -> Reply:
    """The reply. Raises the error that it is, as what its caller can do about it."""
    if not isinstance(reply, ReplyError):
        return reply
    if reply.code == "BUSY":
        raise BusUnavailable(str(reply))
    # a new one: the reply itself would refer to this frame, which refers to it
    raise BusFull(str(reply)) if reply.code in FULL else ReplyError(str(reply))


def committed(replies: Sequence[Reply]) -> list[Reply]:
    """The replies of a transaction's commands, from those of MULTI, its commands and EXEC. Raises what the server
    refused it with."""
    outcome = replies[-1]
    if isinstance(outcome, ReplyError):
        # EXECABORT only says that an earlier reply has the reason
        checked(next(reply for reply in replies if isinstance(reply, ReplyError)))
    return list(outcome)
