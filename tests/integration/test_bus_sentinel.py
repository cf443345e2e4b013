"""A master with a replica behind three sentinels: who is master is asked anew with every connection."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import Watched
from support.consuming import Recorder, consuming
from support.waiting import eventually

from shared.bus import Bus, JournalSubscriber, Script, StreamTailer, open_subscriber

STREAM = "local2:work"


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Watched]:
    """For a fail-over: afterwards it takes the sentinels a while to be ready for the next."""
    with Watched(tmp_path / "watched", password="secret") as running:
        yield running


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """For everything else."""
    folder = tmp_path_factory.mktemp("watched")
    with Watched(folder, password="secret", sentinel_password="another") as running:
        yield running


@pytest.mark.parametrize("how", ["killed", "hung", "asked"])
async def test_the_work_goes_on_with_the_new_master(how: str, fresh: Watched) -> None:
    recorder, accepted, followed, rung, working = Recorder(0.001), list[str](), list[str](), list[str](), True
    old = fresh.master()

    async def publish(bus: Bus) -> None:
        while working:
            accepted.append((await bus.link.call("XADD", STREAM, "*", "payload", "x")).decode())
            await asyncio.sleep(0.003)

    async def follow(feed: StreamTailer | JournalSubscriber, into: list[str]) -> None:
        follower = feed.follow(STREAM)
        while True:
            into.extend([entry_id for entry_id, _ in await follower.next()])

    async with (
        consuming(fresh.url, recorder, timeout=0.5),
        Bus(fresh.url, "test/publisher", timeout=0.5) as bus,
        open_subscriber(bus) as bell,
        asyncio.timeout(40),
    ):
        tail = StreamTailer(bus)
        background = [
            asyncio.create_task(tail.run()),
            asyncio.create_task(follow(tail, followed)),
            asyncio.create_task(follow(bell, rung)),
        ]
        publishing = asyncio.create_task(publish(bus))
        await eventually(lambda: len(accepted) > 100)
        match how:
            case "killed":
                old.kill()
            case "hung":
                old.send(signal.SIGSTOP)
            case _:
                fresh.sentinels[0].client.execute_command("SENTINEL", "FAILOVER", "mymaster")
        await eventually(lambda: fresh.master() is not old, 20, "the sentinels have chosen")
        count = len(accepted)
        await eventually(lambda: len(accepted) > count + 100, 20, "publishing goes on")
        working = False
        await publishing
        if how == "hung":
            old.send(signal.SIGCONT)
        kept = await _kept(fresh)
        # all that the new master has is handled and followed
        await eventually(lambda: set(recorder.seen) >= kept & set(accepted), 10, "what is there is handled")
        await eventually(lambda: followed and followed[-1] == accepted[-1], 10, "the follower is there")
        await eventually(lambda: rung and rung[-1] == accepted[-1], 10, "so is the one of the bell")
        await eventually(
            lambda: fresh.master().client.execute_command("PUBSUB", "SHARDCHANNELS") == [STREAM],
            10,
            "the subscription is at the new master",
        )
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
    # replication is asynchronous: the old master may have confirmed what it never sent on
    lost = set(accepted) - kept - set(recorder.seen)
    assert len(lost) <= (200 if how == "asked" else 2), f"{len(lost)} of {len(accepted)} are lost"


async def _kept(watched: Watched) -> set[str]:
    rows = await asyncio.to_thread(watched.master().client.xrange, STREAM)
    return {entry_id for entry_id, _ in rows}


async def test_a_master_that_was_replaced_is_left_before_it_knows_of_it(fresh: Watched) -> None:
    """The sentinels tell it ten seconds later. What it confirms until then is lost."""
    old = fresh.master()
    async with Bus(fresh.url, "test/1", timeout=0.5) as bus:
        await bus.link.call("SET", "before", 1)
        async with bus.dedicated("tail") as line:
            fresh.sentinels[0].client.execute_command("SENTINEL", "FAILOVER", "mymaster")
            await eventually(lambda: fresh.master() is not old, 20, "the sentinels have chosen")
            links = [bus.link, bus.heartbeat_link, bus.reader, line]
            await eventually(lambda: all(link.generation == 2 for link in links), 2, "all have left")
            assert old.client.info("replication")["role"] == "master"
            await bus.link.call("SET", "after", 1)
    assert (old.client.exists("after"), fresh.master().client.exists("after")) == (0, 1)


async def test_a_write_to_a_master_that_has_become_a_replica_is_sent_again(watched: Watched) -> None:
    script = Script("return redis.call('INCR', KEYS[1])")
    master = watched.master()
    (other,) = (server for server in watched.servers if server is not master)
    async with Bus(watched.url, "test/1", timeout=0.5) as bus, asyncio.timeout(20):
        assert await bus.link.call(*script(("a",))) == 1
        generation = bus.link.generation
        # connections stay open; a write is answered with READONLY, and the role is looked at before the next one
        master.client.execute_command("REPLICAOF", "127.0.0.1", other.port)
        writing = asyncio.create_task(bus.link.call(*script(("a",))))
        await asyncio.sleep(0.3)
        assert not writing.done()
        master.client.execute_command("REPLICAOF", "NO", "ONE")
        assert await writing == 2
        assert bus.link.generation > generation


async def test_a_sentinel_that_is_away_does_not_matter(watched: Watched) -> None:
    watched.sentinels[0].kill()
    try:
        async with Bus(watched.url, "test/1", timeout=0.5) as bus:
            assert await asyncio.wait_for(bus.link.call("SET", "away", 1), 5) == b"OK"
    finally:
        watched.sentinels[0].start()


async def test_nothing_is_sent_while_no_sentinel_knows_the_master(watched: Watched) -> None:
    url = watched.url.replace("/mymaster/", "/nosuch/")
    async with Bus(url, "test/1", timeout=0.5) as bus:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(bus.link.call("SET", "never", 1), 0.5)
    assert watched.master().client.exists("never") == 0
