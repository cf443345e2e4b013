"""Redis away, asleep, loading or a replica, and connections that lose replies: no command is lost, none runs twice."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from contract.bus.calling import HEARTBEAT, Asker, Callers, Effects
from contract.bus.servers import Server, alone, network
from contract.bus.surface import (
    BusUnavailable,
    ConnectionLost,
    call,
    call_all,
    connected,
    key,
    open_bus,
    transact,
    url_of,
)
from support.cluster import Node
from support.loopback import listening
from support.services import announced
from support.waiting import eventually

COUNT = key("count")


# ── commands in flight ───────────────────────────────────────────────────────────────────────────────────────────


async def test_command_not_repeatable_fails_and_ran_once(server: Server, client: redis.Redis) -> None:
    async with network(server) as net, open_bus(net, timeout=0.2) as bus:
        await connected(bus)
        net.lose_next_reply()
        with pytest.raises(ConnectionLost):
            await call(bus, "INCR", COUNT, repeat=False)
        assert await call(bus, "GET", COUNT) == b"1"


async def test_command_not_repeatable_unsent_agrees_with_outcome(server: Server, client: redis.Redis) -> None:
    """It fails and did not run, or succeeds and ran once."""
    async with network(server) as net, open_bus(net, timeout=0.2) as bus:
        await connected(bus)
        net.freeze()
        net.cut()
        broken = asyncio.create_task(call(bus, "GET", COUNT))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(call(bus, "INCR", COUNT, repeat=False))
        await asyncio.sleep(0)
        net.thaw()
        outcomes = await asyncio.gather(broken, waiting, return_exceptions=True)
        assert isinstance(outcomes[1], ConnectionLost) or outcomes[1] == 1
        assert int(client.get(COUNT) or 0) == (0 if isinstance(outcomes[1], ConnectionLost) else 1)


@pytest.mark.parametrize("how", ["cut", "client kill", "lost reply"])
async def test_command_repeatable_is_sent_again(how: str, server: Server) -> None:
    async with network(server) as net, open_bus(net, timeout=0.2) as bus:
        await call(bus, "SET", key("a"), "0")
        for number in range(3):
            if how == "cut":
                net.cut()
            elif how == "client kill":
                server.everywhere("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            else:
                net.lose_next_reply()
            async with asyncio.timeout(30):
                assert await call(bus, "SET", key("a"), number) == b"OK"
                assert await call(bus, "GET", key("a")) == b"%d" % number


@pytest.mark.parametrize("how", ["lost replies", "cut"])
async def test_lost_reply_shifts_no_reply_to_other_commands(how: str, server: Server) -> None:
    async with network(server) as net, open_bus(net, timeout=0.2) as bus:
        for number in range(40):
            await call(bus, "SET", key(f"n{number}"), number)
        opened, rng = net.connections, random.Random(3)
        net.set(drop_every=5 if how == "lost replies" else 0)
        done = asyncio.Event()

        async def ask(number: int) -> None:
            while not done.is_set():
                # most writes carry one command, so that a shifted reply would look like the right one
                await asyncio.sleep(rng.random() * 0.05)
                assert await call(bus, "GET", key(f"n{number}")) == b"%d" % number
                if rng.random() < 0.2:
                    replies = await call_all(bus, [("GET", key(f"n{other}")) for other in (number, 0, 39)])
                    assert replies == [b"%d" % number, b"0", b"39"]

        asking = [asyncio.create_task(ask(number)) for number in range(40)]
        while net.connections < opened + 10:
            if how == "cut":
                net.cut()
            await asyncio.sleep(0.02)
            assert not any(task.done() for task in asking)
        net.set()
        done.set()
        await asyncio.gather(*asking)


async def test_lost_reply_of_new_connection_is_recovered(server: Server) -> None:
    async with network(server) as net, open_bus(net, timeout=0.2) as bus:
        await connected(bus)
        for every in (1, 2, 3):
            before = net.dropped
            net.set(drop_every=every)
            net.cut()
            await eventually(lambda before=before: net.dropped > before)
            net.set()
            async with asyncio.timeout(30):
                assert await call(bus, "SET", key("a"), every) == b"OK"


async def test_transaction_cut_in_flight_is_whole(server: Server, client: redis.Redis) -> None:
    """All of its commands have run, each equally often."""
    names = [key("{t}a"), key("{t}b"), key("{t}c")]
    async with network(server) as net, open_bus(net, timeout=0.2) as bus:
        stop = asyncio.Event()

        async def write() -> None:
            while not stop.is_set():
                await transact(bus, [("INCR", name) for name in names])

        writing = asyncio.create_task(write())
        for number in range(1, 11):
            net.cut()
            reached = int(client.get(names[0]) or 0) + 5
            await eventually(lambda reached=reached: int(client.get(names[0]) or 0) > reached)
            if number % 3 == 0:
                net.lose_next_reply()
        stop.set()
        await writing
    assert len({client.get(name) for name in names}) == 1


async def test_bus_closes_at_any_moment_of_connecting(server: Server) -> None:
    """The server is silent, and each attempt to connect ends after 50 ms."""
    async with network(server) as net:
        net.freeze()
        for milliseconds in range(0, 120, 3):
            async with asyncio.timeout(10), open_bus(net, timeout=0.05):
                await asyncio.sleep(milliseconds / 1000)


async def test_command_on_closed_bus_fails(server: Server) -> None:
    async with network(server) as net:
        async with open_bus(net) as bus:
            await connected(bus)
            net.freeze()
            pending = [
                asyncio.create_task(call(bus, "GET", COUNT)),
                asyncio.create_task(transact(bus, [("SET", COUNT, 1)])),
            ]
            await asyncio.sleep(0)
        for waiting in (*pending, call(bus, "GET", COUNT)):
            with pytest.raises(BusUnavailable):
                await asyncio.wait_for(waiting, 10)


# ── a server that is away or asleep ──────────────────────────────────────────────────────────────────────────────


async def test_redis_restart_keeps_all_confirmed_commands(own_server: Server) -> None:
    confirmed = 0
    async with open_bus(own_server) as bus:
        stop = asyncio.Event()

        async def write(name: str) -> int:
            count = 0
            while not stop.is_set():
                await call(bus, "SADD", key(name), count)
                count += 1
            return count

        writing = [asyncio.create_task(write(f"w{n}")) for n in range(4)]
        for _ in range(2):
            await eventually(lambda: own_server.client.scard(key("w0")) > 50)
            await asyncio.to_thread(own_server.kill)
            await asyncio.to_thread(own_server.start)
            reached = own_server.client.scard(key("w0")) + 50
            await eventually(lambda reached=reached: own_server.client.scard(key("w0")) > reached)
        stop.set()
        counts = [await task for task in writing]
    for number, count in enumerate(counts):
        confirmed += count
        assert own_server.client.smembers(key(f"w{number}")) == {str(n) for n in range(count)}
    assert confirmed > 400


@contextlib.asynccontextmanager
async def calls_at_two_workers(callers: Callers, place: Any, effects: Effects, seconds: float) -> AsyncIterator[Asker]:
    """Run eight calls, which have begun when the block does. At its end, each is answered and has run once."""
    async with (
        callers.worker(place, concurrency=8),
        callers.worker(place, concurrency=8, replicas=2),
        callers.asker(place) as asker,
    ):
        calls = [asyncio.create_task(asker.ask(f"t{n}", f"c{n}", seconds=seconds, timeout=90)) for n in range(8)]
        await eventually(lambda: effects.client.hlen("effects") == 8)
        yield asker
        assert [(await call).result for call in calls] == [f"you said t{n}" for n in range(8)]
        assert effects.all_runs() == {f"t{n}": 1 for n in range(8)}


@pytest.mark.parametrize("heartbeats", [5, 12])
async def test_redis_restart_running_calls_run_once(
    heartbeats: int, own_server: Server, callers: Callers, effects: Effects
) -> None:
    async with calls_at_two_workers(callers, own_server, effects, 4.0):
        await asyncio.to_thread(own_server.kill)
        # the outage itself: longer than the visibility timeout
        await asyncio.sleep(heartbeats * HEARTBEAT)
        await asyncio.to_thread(own_server.start)


async def test_redis_paused_running_calls_run_once(own_server: Server, callers: Callers, effects: Effects) -> None:
    async with calls_at_two_workers(callers, own_server, effects, 4.0):
        own_server.pause()
        await asyncio.sleep(8 * HEARTBEAT)
        own_server.resume()


async def test_network_frozen_running_calls_run_once(server: Server, callers: Callers, effects: Effects) -> None:
    async with network(server) as net, calls_at_two_workers(callers, net, effects, 4.0):
        net.freeze()
        await asyncio.sleep(8 * HEARTBEAT)
        net.thaw()


@pytest.mark.parametrize("fault", ["lost replies", "cut"])
async def test_tool_calls_over_bad_network_run_once(
    fault: str, server: Server, callers: Callers, effects: Effects
) -> None:
    async with network(server) as net, asyncio.timeout(200):
        settings = {"concurrency": 32, "redis_timeout": 0.25}
        async with (
            callers.worker(net, **settings),
            callers.worker(net, replicas=2, **settings),
            callers.asker(net, redis_timeout=0.25) as asker,
        ):
            await eventually(asker.client.schemas)
            net.set(drop_every=10 if fault == "lost replies" else 0)
            opened = net.connections
            limit = asyncio.Semaphore(32)

            async def ask(number: int) -> str:
                async with limit:
                    return (await asker.ask(f"t{number}", f"c{number}", timeout=60)).result

            asking = asyncio.gather(*(ask(number) for number in range(150)))
            while not asking.done():
                if fault == "cut":
                    net.cut()
                await asyncio.wait({asking}, timeout=0.05)
            net.set()
            assert await asking == [f"you said t{number}" for number in range(150)]
            assert net.connections > opened + 3
    assert effects.all_runs() == {f"t{number}": 1 for number in range(150)}


async def test_redis_absent_at_start_is_waited_for(own_server: Server, callers: Callers) -> None:
    await asyncio.to_thread(own_server.kill)
    async with open_bus(own_server) as bus:
        waiting = asyncio.create_task(call(bus, "SET", key("a"), "b"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), 0.3)
        await asyncio.to_thread(own_server.start)
        assert await asyncio.wait_for(waiting, 30) == b"OK"


async def test_participant_starts_when_redis_comes_after_it(own_server: Server, callers: Callers) -> None:
    await asyncio.to_thread(own_server.kill)
    starting = asyncio.create_task(_served(callers, own_server))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(starting), 0.3)
    await asyncio.to_thread(own_server.start)
    assert await asyncio.wait_for(starting, 60) == "you said x"


async def _served(callers: Callers, server: Server) -> str:
    async with callers.both(server) as asker:
        return (await asker.ask("x")).result


async def test_scripts_flushed_are_loaded_again(server: Server, callers: Callers) -> None:
    async with callers.both(server) as asker:
        assert (await asker.ask("one", "c1")).error is None
        server.everywhere("SCRIPT", "FLUSH")
        assert (await asker.ask("two", "c2", attempt=2, timeout=60)).error is None


# ── replies about the server's state ─────────────────────────────────────────────────────────────────────────────


async def test_loading_server_is_waited_out(tmp_path: Path) -> None:
    # each key takes the server so many microseconds longer to load
    node = alone(tmp_path, key_load_delay="100", loading_process_events_interval_bytes="1024")
    try:
        node.start()
        async with open_bus(f"redis://{node.name}/0") as bus:
            await call_all(bus, [("SET", key(str(n)), "x") for n in range(20_000)])
            node.kill()
            restarting = asyncio.create_task(asyncio.to_thread(node.start))
            await eventually(lambda: answer_of(node).startswith(b"-LOADING"), what="the server answers LOADING")
            assert await asyncio.wait_for(call(bus, "GET", key("19999")), 60) == b"x"
            await restarting
    finally:
        node.close()


def answer_of(node: Node) -> bytes:
    """Return the beginning of the answer to a read; nothing while the server does not listen."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", node.port), timeout=5) as connection:
        connection.sendall(b"GET x\r\n")
        return connection.recv(100)
    return b""


async def test_replica_reply_readonly_write_waits_for_master(single: Node) -> None:
    async with open_bus(f"redis://{single.name}/0", timeout=0.5) as bus:
        assert await call(bus, "INCR", COUNT) == 1
        with _as_replica(single):
            writing = asyncio.create_task(call(bus, "INCR", COUNT))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(writing), 0.3)
        assert await asyncio.wait_for(writing, 30) == 2


@contextlib.contextmanager
def _as_replica(server: Node) -> Iterator[None]:
    """The server is a replica of a master that is away."""
    server.client.execute_command("REPLICAOF", "127.0.0.1", 9)
    try:
        yield
    finally:
        server.client.execute_command("REPLICAOF", "NO", "ONE")


async def test_wrong_password_is_named_in_the_log(own_server: Server, callers: Callers, tmp_path: Path) -> None:
    log = tmp_path / "log"
    own_server.everywhere("CONFIG", "SET", "requirepass", "right")
    url = url_of(own_server).replace("://", "://:wrongSecret1@")
    with callers.asker_process(url, "x", "c1", log=log) as starting:
        await eventually(lambda: log.exists() and "WRONGPASS" in log.read_text(), what="the log names the reason")
        assert starting.process.poll() is None
    assert "wrongSecret1" not in log.read_text()


# ── attempts to connect ──────────────────────────────────────────────────────────────────────────────────────────

# A connection of commands, one for heartbeats, one for group reads: each tries at most so often in two seconds.
WINDOW_S, MOST_ATTEMPTS = 2.0, 3 * 12


async def attempts(count: Callable[[], int], seconds: float) -> int:
    """Return how much a count grows in a time."""
    before, until = count(), time.monotonic() + seconds
    while time.monotonic() < until:
        await asyncio.sleep(0.05)
    return count() - before


@pytest.mark.parametrize("reply", [b"", b"-READONLY You can't write.\r\n", b"-LOADING Redis is loading.\r\n"])
async def test_server_that_hangs_up_is_tried_at_a_bounded_rate(reply: bytes) -> None:
    connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        if reply:
            await reader.read(65_536)
            writer.write(reply * 100)
            await writer.drain()

    async with listening(answer) as port, open_bus(f"redis://127.0.0.1:{port}/0", timeout=0.5) as bus:
        asking = asyncio.create_task(call(bus, "GET", COUNT))
        await eventually(lambda: connections >= 9)
        assert await attempts(lambda: connections, WINDOW_S) <= MOST_ATTEMPTS
        asking.cancel()


async def test_replica_is_tried_at_a_bounded_rate(single: Node) -> None:
    """Counted by the server itself."""

    def received() -> int:
        return int(single.client.info("stats")["total_connections_received"])

    async with open_bus(f"redis://{single.name}/0", timeout=0.5) as bus:
        await connected(bus)
        with _as_replica(single):
            writing = asyncio.create_task(call(bus, "INCR", COUNT))
            before = received()
            await eventually(lambda: received() > before + 2)
            assert await attempts(received, WINDOW_S) <= MOST_ATTEMPTS
        assert await asyncio.wait_for(writing, 30) == 1


async def test_server_that_answers_nonsense_is_left() -> None:
    came = 0

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal came
        came += 1
        writer.write(b"+OK\r\n" * 100)
        await writer.drain()

    async with listening(answer) as port, open_bus(f"redis://127.0.0.1:{port}/0", timeout=0.5):
        await eventually(lambda: came >= 9)


async def test_clients_of_worker_are_there_again_after_outage(own_server: Server, callers: Callers) -> None:
    """The number of connections is the same after each of three restarts."""

    def connections() -> int:
        return sum(len(node.client.client_list()) for node in own_server.nodes)

    async with callers.both(own_server) as asker:
        await asker.ask("x", "first")
        before = connections()
        for number in range(3):
            await asyncio.to_thread(own_server.kill)
            await asyncio.to_thread(own_server.start)
            await announced(url_of(own_server), "probe")
            assert (await asker.ask("x", f"c{number}", timeout=60)).error is None
            await eventually(lambda: connections() <= before)
