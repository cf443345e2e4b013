"""Writing what entries have caused, together with their acknowledgements."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial

from shared.bus.keys import nothing_key
from shared.bus.port import TOGETHER, BusFull, Command, ConnectionLost, Reply, ReplyError
from shared.bus.slots import Delivery
from shared.bus.streams import Bus
from shared.errors import Local2Error, PermanentError

# Told what became of an entry's effects: None when they are written and it is acknowledged.
Settled = Callable[[Delivery, Sequence[Command], BaseException | None], None]
_Item = tuple[Delivery, Sequence[Command], float]


class EffectRefused(Local2Error):
    """Redis refused one of an entry's effects; the others hold, and so does its acknowledgement."""


class Settling:
    """What entries of one loop tick have caused is written in one transaction, their acknowledgements last."""

    def __init__(self, bus: Bus, group: str, settled: Settled) -> None:
        self._bus = bus
        self._group = group
        self._settled = settled
        self._waiting: list[_Item] = []
        self._loop = asyncio.get_running_loop()
        # what the task of one entry says of itself in all that it logs is not true of the others
        self._context = copy_context()

    def settle(self, delivery: Delivery, effects: Sequence[Command], until: float) -> None:
        """Has the effects of an entry written and the entry acknowledged. Nobody need wait for it: `settled` is told.

        until: the loop's time after which they must not be written any more; the error is ConnectionLost then.
        BusFull, ReplyError and PermanentError mean that nothing was written, EffectRefused that something was.
        """
        item = (delivery, effects, until)
        delivery.settling = True
        if delivery.broken or not self._bus.link.one_server:
            # what has broken a connection takes nothing else along
            self._write([item])
            return
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(item)
        if len(self._waiting) == TOGETHER:
            self._flush()

    def _flush(self) -> None:
        items, self._waiting = self._waiting, []
        if items:
            self._write(items)

    def _write(self, items: Sequence[_Item]) -> None:
        acknowledged: defaultdict[str, list[str]] = defaultdict(list)
        commands: list[Command] = []
        for delivery, effects, _ in items:
            commands += effects
            acknowledged[delivery.stream].append(delivery.entry_id)
        if "EVALSHA" in [command[0] for command in commands]:
            # A full Redis refuses the writes of a script one by one, and not the transaction. This is refused with it.
            commands.append(("SET", nothing_key(items[0][0].stream), "", "XX"))
        commands += [("XACK", stream, self._group, *ids) for stream, ids in acknowledged.items()]
        writing = self._bus.link.commit(commands, until=min([until for _, _, until in items]))
        writing.add_done_callback(partial(self._written, items), context=self._context)

    def _written(self, items: Sequence[_Item], writing: asyncio.Future[list[Reply]]) -> None:
        error = ConnectionLost("the write was given up") if writing.cancelled() else writing.exception()
        if isinstance(error, BusFull | ReplyError | PermanentError) and len(items) > 1:
            # one of them was refused, or cannot be sent, and all with it
            for item in items:
                self._write([item])
            return
        replies = () if error is not None else writing.result()
        refused, start = ReplyError in map(type, replies), 0
        for delivery, effects, _ in items:
            outcome = error
            if refused:
                end = start + len(effects)
                of_this = [reply for reply in replies[start:end] if isinstance(reply, ReplyError)]
                outcome = EffectRefused(str(of_this[0])) if of_this else None
                start = end
            delivery.settling = False
            self._settled(delivery, effects, outcome)
