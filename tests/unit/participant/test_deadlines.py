"""Many limits of time with one timer."""

from __future__ import annotations

import asyncio

from shared.participant.deadlines import TICK, Deadlines


async def test_what_was_not_taken_back_expires_once_at_its_time() -> None:
    loop = asyncio.get_running_loop()
    expired: list[tuple[str, float]] = []
    limits: Deadlines[str] = Deadlines(lambda thing: expired.append((thing, loop.time())))
    now = loop.time()
    limits.add("late", now + 0.3)
    limits.add("soon", now + 0.1)
    limits.add("past", now - 5)
    gone, kept = limits.add("gone", now + 0.1), limits.add("with it", now + 0.1)
    limits.drop("gone", gone)
    # what is not there, or not there any more, is no error
    limits.drop("gone", gone)
    limits.drop("never", kept)
    limits.drop("never", 0)
    async with asyncio.timeout(10):
        while len(expired) < 4:
            await asyncio.sleep(0.01)
    assert [thing for thing, _ in expired] == ["past", "soon", "with it", "late"]
    for thing, after in (("soon", 0.1), ("late", 0.3)):
        assert dict(expired)[thing] >= now + after
    # nothing is left, and no timer runs for it
    assert limits._timer is None
    again = limits.add("again", loop.time() + TICK)
    limits.drop("again", again)
    async with asyncio.timeout(10):
        while limits._timer is not None:
            await asyncio.sleep(0.01)
    assert len(expired) == 4
