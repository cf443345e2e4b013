"""Writing what entries have caused, together with their acknowledgements."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from shared.bus.port import BusFull, Command, ConnectionLost, Reply, ReplyError
from shared.bus.slots import Delivery
from shared.bus.streams import Bus
from shared.errors import Local2Error, PermanentError

_Item = tuple[Delivery, Sequence[Command], float, "asyncio.Future[None]"]


class EffectRefused(Local2Error):
    """Redis refused one of an entry's effects; the others hold, and so does its acknowledgement."""


class Settling:
    """What the entries of one loop tick have caused is written in one transaction, their acknowledgements last."""

    def __init__(self, bus: Bus, group: str) -> None:
        self._bus = bus
        self._group = group
        self._waiting: list[_Item] = []
        self._loop = asyncio.get_running_loop()

    async def settle(self, delivery: Delivery, effects: Sequence[Command], until: float) -> None:
        """Returns when the effects of an entry are written and it is acknowledged.

        until: the loop's time after which they must not be written any more; ConnectionLost is raised then.
        Raises BusFull, ReplyError and PermanentError when nothing was written, EffectRefused when something was.
        """
        settled: asyncio.Future[None] = self._loop.create_future()
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append((delivery, effects, until, settled))
        delivery.settling = True
        try:
            await settled
        finally:
            delivery.settling = False

    def _flush(self) -> None:
        items, self._waiting = self._waiting, []
        if self._bus.link.transactions:
            self._write(items)
        else:
            self._write_each(items)

    def _write(self, items: Sequence[_Item]) -> None:
        acknowledged: dict[str, list[str]] = {}
        commands: list[Command] = []
        for delivery, effects, _, _ in items:
            commands += effects
            acknowledged.setdefault(delivery.stream, []).append(delivery.entry_id)
        commands += [("XACK", stream, self._group, *ids) for stream, ids in acknowledged.items()]
        writing = self._bus.link.post_commit(commands, until=min([until for _, _, until, _ in items]))
        writing.add_done_callback(partial(self._written, items))

    def _write_each(self, items: Sequence[_Item]) -> None:
        for item in items:
            self._write([item])

    def _written(self, items: Sequence[_Item], writing: asyncio.Future[list[Reply]]) -> None:
        error = ConnectionLost("the write was given up") if writing.cancelled() else writing.exception()
        if isinstance(error, BusFull | ReplyError | PermanentError) and len(items) > 1:
            # one of them was refused, or cannot be sent, and all with it
            self._write_each(items)
            return
        start = 0
        for _, effects, _, settled in items:
            end = start + len(effects)
            if settled.done():
                pass
            elif error is not None:
                settled.set_exception(error)
            elif wrong := [reply for reply in writing.result()[start:end] if isinstance(reply, ReplyError)]:
                settled.set_exception(EffectRefused(str(wrong[0])))
            else:
                settled.set_result(None)
            start = end
