"""A Redis server in cluster mode: all keys share one hash slot, and the bus follows the node that has it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.crc import key_slot
from support.cluster import Cluster, wait_for
from support.scripted_redis import ScriptedRedis

from shared.bus import Bus
from shared.errors import SettingsError

PREFIX = "{local2}:"
STREAM, EFFECTS = f"{PREFIX}work", f"{PREFIX}effects"
WORKER = Path(__file__).parents[1] / "support" / "cluster_worker.py"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster", replicas=1) as running:
        yield running


@pytest.fixture
def worker(cluster: Cluster) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, str(WORKER), cluster.url], env={**os.environ, "LOCAL2_KEY_PREFIX": PREFIX}
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def publish(cluster: Cluster, start: int) -> None:
    for number in range(start, start + 50):
        wait_for(lambda number=number: cluster.ask("XADD", STREAM, "*", "payload", number), 30, "an entry is accepted")


def handled(cluster: Cluster, count: int) -> None:
    """Wait until each of the first `count` payloads is among the effects."""
    wanted = {str(number) for number in range(count)}
    wait_for(lambda: set(cluster.ask("LRANGE", EFFECTS, 0, -1)) == wanted, 30, "every entry is handled")


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("how", ["asked", "killed", "moved"])
def test_work_continues_on_the_node_that_gets_the_slot(how: str, cluster: Cluster) -> None:
    publish(cluster, 0)
    handled(cluster, 50)
    old = cluster.master(STREAM)
    if how == "moved":
        target = next(node for node in cluster.masters() if node is not old)
        cluster.migrate(key_slot(STREAM.encode()), target, pause=0.01)
    else:
        rows = old.client.info("replication")
        replica = next(node for node in cluster.nodes if node.port == rows["slave0"]["port"])
        if how == "asked":
            replica.client.execute_command("CLUSTER", "FAILOVER")
        else:
            old.kill()
    wait_for(lambda: cluster.master(STREAM) is not old, 30, "another node has the slot")
    publish(cluster, 50)
    handled(cluster, 100)


async def test_prefix_without_braces_is_refused_in_cluster_mode() -> None:
    server = ScriptedRedis(HELLO=[b"server", b"redis", b"mode", b"cluster"])
    async with server.listening() as url, Bus(url, "test/1") as bus:
        with pytest.raises(SettingsError, match=r"LOCAL2_KEY_PREFIX to \{local2\}:"):
            await bus.link.call("PING")
