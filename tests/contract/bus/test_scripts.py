"""Scripts: a server that forgot them, or that a script keeps busy, loses no work."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import redis
from contract.bus.observing import Recorder, add, eventually, pending
from contract.bus.servers import Server
from contract.bus.surface import STREAM, VISIBILITY_TIMEOUT, consuming, dead_letters, load_scripts, note, open_bus


async def test_flushed_scripts_lose_no_work(server: Server, client: redis.Redis) -> None:
    gated, other = Recorder(gated=True), Recorder()
    async with consuming(server, gated, name="owner"):
        held = add(client, 2)
        await eventually(lambda: gated.running == 2)
        async with consuming(server, other, name="other") as replica:
            for _ in range(3):
                server.everywhere("SCRIPT", "FLUSH")
                await load_scripts(replica.bus)
                await replica.bus.publish(note(once=f"once {_}"))
                await asyncio.sleep(VISIBILITY_TIMEOUT / 3)
            gated.gate.set()
            await eventually(lambda: pending(client) == 0 and len(gated.seen) + len(other.seen) == 5)
    assert not set(held) & set(other.seen)
    assert dead_letters(client) == []


async def test_reconnect_after_flush_finds_scripts_again(server: Server, client: redis.Redis) -> None:
    async with open_bus(server) as bus:
        first = await bus.publish(note(once="name"))
        server.everywhere("SCRIPT", "FLUSH")
        server.everywhere("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert await bus.publish(note(once="name")) == first
    assert client.xlen(STREAM) == 1


@contextlib.contextmanager
def busy(server: Server) -> Iterator[threading.Event]:
    """Keep the server of STREAM busy with an endless script; the event is set when the script was ended."""
    node = server.node_of(STREAM)
    node.client.config_set("busy-reply-threshold", 100)
    ended = threading.Event()

    def run() -> None:
        with redis.Redis(port=node.port, socket_timeout=60) as own, contextlib.suppress(redis.TimeoutError):
            with contextlib.suppress(redis.ResponseError):
                own.eval("while true do end", 1, STREAM)
            ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield ended
    finally:
        with contextlib.suppress(redis.RedisError), redis.Redis(port=node.port) as own:
            own.execute_command("SCRIPT", "KILL")
        thread.join(30)


async def test_endless_script_is_ended_and_work_goes_on(own_server: Server, own_client: redis.Redis) -> None:
    gated = Recorder(gated=True)
    async with consuming(own_server, gated, timeout=1.0):
        (held,) = add(own_client)
        await eventually(lambda: gated.running == 1)
        with busy(own_server) as ended:
            await eventually(ended.is_set, 20)
        gated.gate.set()
        (later,) = add(own_client)
        await eventually(lambda: later in gated.seen and pending(own_client) == 0)
    assert gated.seen == [held, later]
    assert dead_letters(own_client) == []
