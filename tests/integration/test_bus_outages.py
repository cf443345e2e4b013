"""Redis away, asleep, full or odd: healthy replicas keep their work, and nothing runs twice because of it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
import uvloop
from support.apps import ProbeSettings, probe
from support.consuming import GROUP, STREAM
from support.loopback import listening
from support.services import announced, running
from support.slots import nothing_to_end, uncounted
from support.waiting import always, eventually

from shared.bus import Bus, Delivery
from shared.bus.claims import Claims
from shared.bus.server import Server
from shared.bus.slots import Slots
from shared.bus.visibility import Visibility

HEARTBEAT = 0.2


def probing(url: str, folder: Path, **more: Any) -> ProbeSettings:
    return ProbeSettings(redis_url=url, data_dir=folder, heartbeat=HEARTBEAT, drain=1.0, concurrency=8, **more)


class Sleepers:
    """Replicas of a group, of which each holds two entries, and a time that passes when it is told to: entries grow
    older and the server's clock goes on, in seconds, which are heartbeats."""

    def __init__(self, bus: Bus, raw: redis.Redis, names: Sequence[str]) -> None:
        self._raw = raw
        self._bus = bus
        self._skew = 0
        raw.xgroup_create(STREAM, GROUP, "0", mkstream=True)
        seen = SimpleNamespace(
            link=bus.link, heartbeat_link=SimpleNamespace(call=self._call, pipe_raw=bus.heartbeat_link.pipe_raw)
        )
        self.replicas: dict[str, tuple[Claims, Slots]] = {}
        self.taken: list[tuple[str, str]] = []
        for name in names:
            slots = Slots(10, {STREAM: None}, 5, nothing_to_end, uncounted)
            for _ in range(2):
                entry_id = raw.xadd(STREAM, {"payload": name}).decode()
                raw.xreadgroup(GROUP, name, {STREAM: ">"})
                slots.add(Delivery(STREAM, entry_id, [], 1, slots))
            self.replicas[name] = Claims(seen, GROUP, name, [STREAM], Visibility(1.0)), slots  # type: ignore[arg-type]

    async def _call(self, *command: Any) -> Any:
        reply = await self._bus.heartbeat_link.call(*command)
        return [reply[0] + self._skew, *reply[1:]]

    def passes(self, seconds: int) -> None:
        self._skew += seconds * 1000
        for row in self._raw.xpending_range(STREAM, GROUP, "-", "+", 100):
            idle = row["time_since_delivered"] + seconds * 1000
            self._raw.xclaim(STREAM, GROUP, row["consumer"], 0, [row["message_id"]], idle=idle, justid=True)

    async def reclaims(self, name: str) -> None:
        claims, slots = self.replicas[name]
        for found in await claims.reclaim(STREAM, 10, slots):
            slots.add(found)
            self.taken.append((name, found.fields[1].decode()))

    async def beats(self, awake: Iterable[str]) -> None:
        """Everybody who is awake lives through a second."""
        for name in awake:
            claims, slots = self.replicas[name]
            assert await claims.renew(slots) == []
            if claims.reclaimable:
                claims.reclaimable.clear()
                await self.reclaims(name)
        self.passes(1)


@pytest.mark.parametrize(
    ("away", "delays"),
    [
        # Redis wakes up last: everybody else is there when it does
        (36_000, (0, 0, 0)),
        # or one after the other, in any order; nobody knows who is still to come
        (36_000, (0, 1, 25)),
        (36_000, (30, 0, 12)),
        (600, (7, 29, 0)),
        (20, (4, 19, 0)),
        (5, (0, 6, 3)),
        (3, (4, 0, 5)),
    ],
)
async def test_whoever_wakes_up_later_than_others_keeps_his_work_and_who_is_dead_does_not(
    bus: Bus, raw: redis.Redis, away: int, delays: tuple[int, int, int]
) -> None:
    sleepers = Sleepers(bus, raw, ["a", "b", "c", "dead"])
    for _ in range(2):
        await sleepers.beats("abc")
    sleepers.passes(away)
    for second in range(max(delays) + 1):
        await sleepers.beats(name for name, delay in zip("abc", delays, strict=True) if delay <= second)
    # a machine that is very busy is a pause of its own, so that it may take longer
    seconds = max(delays)
    while not sleepers.taken and seconds < 130:
        await sleepers.beats("abc")
        seconds += 1
    assert len(sleepers.taken) == 2
    assert {owner for _, owner in sleepers.taken} == {"dead"}
    assert seconds >= min(away, 30)
    for _ in range(5):
        await sleepers.beats("abc")
    assert len(sleepers.taken) == 2


async def test_what_was_found_silent_before_everybody_slept_proves_nothing_afterwards(
    bus: Bus, raw: redis.Redis
) -> None:
    """It is seen that there is something to take over, and everybody sleeps before it is taken."""
    sleepers = Sleepers(bus, raw, ["a", "b"])
    for _ in range(5):
        await sleepers.beats("ab")
    sleepers.passes(600)
    await sleepers.reclaims("a")
    assert sleepers.taken == []
    await sleepers.beats("ab")
    for _ in range(2):
        await sleepers.beats("ab")
    assert sleepers.taken == []


# ── full ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_participant_that_starts_while_redis_is_full_waits(
    redis_url: str, raw: redis.Redis, tmp_path: Path
) -> None:
    try:
        raw.config_set("maxmemory", 1)
        async with running(probe, probing(redis_url, tmp_path)) as serving:
            await always(lambda: not serving.done(), 1.0)
            raw.config_set("maxmemory", 0)
            await announced(redis_url, "probe")
    finally:
        raw.config_set("maxmemory", 0)


# ── odd servers ──────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.asynccontextmanager
async def serving(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """The URL of something that takes connections; each is closed when it has been answered, and all at the end."""
    async with listening(answer) as port:
        yield f"redis://127.0.0.1:{port}/0"


async def test_connection_without_password_reports_the_servers_words(raw: redis.Redis, redis_url: str) -> None:
    raw.config_set("requirepass", "secret")
    try:
        async with Bus(redis_url, "test/1", timeout=0.5) as bus:
            await eventually(lambda: "NOAUTH" in bus.link.trouble)
    finally:
        raw.config_set("requirepass", "")


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_unsent_bytes_of_a_closed_connection_never_arrive(runner: Callable[..., Any]) -> None:
    """They are sent again over the next connection; the first copy would arrive later, out of order."""

    async def main() -> int:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.setblocking(False)
            # so that most of it waits at the sender
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8_192)
            connection = Server(f"redis://127.0.0.1:{listening.getsockname()[1]}").unconnected()
            await connection.connect()
            there, _address = await loop.sock_accept(listening)
            with there:
                sending = asyncio.create_task(connection.send_command("SET", "key", b"x" * 1_500_000))
                await asyncio.sleep(0)
                await connection.disconnect()
                await asyncio.gather(sending, return_exceptions=True)
                # The event loop closes the socket after that.
                await asyncio.sleep(0.01)
                arrived = 0
                with contextlib.suppress(ConnectionError):
                    while data := await loop.sock_recv(there, 65_536):
                        arrived += len(data)
                return arrived

    assert runner(main()) < 1_500_000
