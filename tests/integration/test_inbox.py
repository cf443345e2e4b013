"""What only one replica reads: whatever stands in it, what is meant for somebody reaches him."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import redis
from support.waiting import eventually

from shared.participant.service import open_context
from shared.participant.settings import Settings


async def test_nothing_that_stands_in_an_inbox_keeps_the_rest_from_being_read(
    settings: Settings, raw: redis.Redis, tmp_path: Path
) -> None:
    got: list[bytes] = []

    def notify(_id: str, fields: Mapping[bytes, bytes]) -> None:
        if fields.get(b"bad"):
            raise ValueError("nonsense")
        got.append(fields[b"number"])

    async with open_context("asker", settings) as context:
        context.on_inbox("note", notify)
        # in one read, whatever its order
        with raw.pipeline() as pipe:
            pipe.xadd(context.inbox, {"type": "nobody asks for this"})
            pipe.xadd(context.inbox, {"number": "without a type"})
            pipe.xadd(context.inbox, {"type": "note", "number": "1"})
            pipe.xadd(context.inbox, {"type": "note", "bad": "yes"})
            pipe.xadd(context.inbox, {"type": "note", "number": "2"})
            pipe.execute()
        await eventually(lambda: got == [b"1", b"2"])
        # who asks later for the same is the one who is told
        later: list[bytes] = []
        context.on_inbox("note", lambda _id, fields: later.append(fields[b"number"]))
        raw.xadd(context.inbox, {"type": "note", "number": "3"})
        await eventually(lambda: later == [b"3"])
        assert got == [b"1", b"2"]
        inbox = context.inbox
        await eventually(lambda: raw.xlen(inbox) == 0, what="nothing stays of what was read")
        # and it is there for the next one
        raw.xadd(inbox, {"type": "note", "number": "4"}, nomkstream=True)
        await eventually(lambda: later == [b"3", b"4"])
    await asyncio.sleep(0)
    assert not raw.exists(inbox)
