"""A Redis Cluster, and a master with a replica behind sentinels, of the embedded server's binary: thrown away after."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import RedisError
from support.guard import READABLE
from support.redis_servers import UNSYNCED

from services.cli.launch.redis_servers import server_binary
from tests.support.waiting import PATIENCE

# With 10,000 more they are still below the ports from which systems take those of outgoing connections.
_PORTS = (10_000, 22_700)


def wait_for(fact: Callable[[], Any], timeout: float, what: str) -> Any:
    """The first true value of `fact`; an error of Redis is none."""
    deadline = time.monotonic() + PATIENCE * timeout
    while True:
        with contextlib.suppress(RedisError, OSError):
            if value := fact():
                return value
        assert time.monotonic() < deadline, f"did not happen within {PATIENCE * timeout:g} s: {what}"
        time.sleep(0.02)


def hold_port() -> tuple[int, list[socket.socket]]:
    """A port whose number plus 10,000, where nodes speak to each other, is free too; nobody else is given either until
    the sockets are closed, and only a server that reuses addresses, as Redis does, can listen there."""
    while True:
        port = random.randint(*_PORTS)
        held = [socket.socket(), socket.socket()]
        try:
            for one, number in zip(held, (port, port + 10_000), strict=True):
                one.bind(("127.0.0.1", number))
                # after the bind: before it, it would take what another one holds
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return port, held
        except OSError:
            for one in held:
                one.close()


class Node:
    """One server process. `start` after `kill` or `stop` keeps its port and data.

    binary: the server program; None for the one that other tests use.
    """

    def __init__(self, folder: Path, *, sentinel: bool = False, binary: Path | None = None, **config: str) -> None:
        self.folder = folder
        self._binary = binary
        self.port, self._held = hold_port()
        self._sentinel = sentinel
        self._config = {name.replace("_", "-"): value for name, value in config.items()}
        self._process: subprocess.Popen[bytes] | None = None
        self.client = redis.Redis(
            port=self.port, password=config.get("requirepass"), socket_timeout=5, decode_responses=True
        )

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        values = {"port": str(self.port), "bind": "127.0.0.1", "dir": str(self.folder), **READABLE, **self._config}
        config = self.folder / "server.conf"
        # a sentinel keeps what it learns in this file
        if not (self._sentinel and config.exists()):
            config.write_text("".join(f"{name} {value}\n" for name, value in values.items()), encoding="utf-8")
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._binary or server_binary(), str(config), *(("--sentinel",) if self._sentinel else ())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_for(self.client.ping, 10, f"{self.name} answers: {self.folder}")

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """Ends it as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        self.kill()
        self.client.close()
        for one in self._held:
            one.close()


class Cluster:
    """`masters` nodes that share the slots, each with so many replicas. `url` is what participants are given."""

    def __init__(
        self,
        folder: Path,
        *,
        masters: int = 3,
        replicas: int = 0,
        password: str = "",
        binary: Path | None = None,
        **config: str,
    ) -> None:
        values = {
            "cluster_enabled": "yes",
            "cluster_config_file": "nodes.conf",
            "cluster_node_timeout": "1000",
            "cluster_replica_validity_factor": "0",
            "appendonly": "yes",
            **UNSYNCED,
            "save": '""',
            **({"requirepass": password, "masterauth": password} if password else {}),
            **config,
        }
        self._password = password
        self._masters = masters
        self.nodes = [Node(folder / f"node-{n}", binary=binary, **values) for n in range(masters * (1 + replicas))]

    @property
    def url(self) -> str:
        login = f":{self._password}@" if self._password else ""
        return f"redis+cluster://{login}{','.join(node.name for node in self.nodes[: self._masters])}/"

    def __enter__(self) -> Self:
        try:
            for node in self.nodes:
                node.start()
            self._form()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        for node in self.nodes:
            node.close()

    def _form(self) -> None:
        masters, replicas = self.nodes[: self._masters], self.nodes[self._masters :]
        for n, node in enumerate(masters):
            first, end = (REDIS_CLUSTER_HASH_SLOTS * m // len(masters) for m in (n, n + 1))
            node.client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
            node.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", n + 1)
        wait_for(self._met, 20, "all have met")
        for n, node in enumerate(replicas):
            master = masters[n % len(masters)]
            master_id = master.client.execute_command("CLUSTER", "MYID")
            node.client.execute_command("CLUSTER", "REPLICATE", master_id)
        wait_for(lambda: all(self._ok(node) for node in self.nodes), 20, "the cluster is whole")
        for node in replicas:
            wait_for(lambda node=node: node.client.info("replication")["master_link_status"] == "up", 20, "replicas")

    def _met(self) -> bool:
        strangers = [node for node in self.nodes if len(self._known(node)) < len(self.nodes)]
        for node in strangers:
            # an introduction that takes longer than a second is forgotten: it is made again
            for other in self.nodes:
                if other is not node:
                    node.client.execute_command("CLUSTER", "MEET", "127.0.0.1", other.port)
        return not strangers

    def _known(self, node: Node) -> list[str]:
        raw = node.client.execute_command("CLUSTER", "NODES")
        lines = raw if isinstance(raw, dict) else str(raw).splitlines()
        return [line for line in lines if "handshake" not in str(line)]

    def _ok(self, node: Node) -> bool:
        info = node.client.execute_command("CLUSTER", "INFO")
        return (info.get("cluster_state") if isinstance(info, dict) else "cluster_state:ok" in info) in ("ok", True)

    def whole(self) -> bool:
        """Whether every node that answers says that all slots are served."""
        found = []
        for node in self.nodes:
            with contextlib.suppress(RedisError, OSError):
                found.append(self._ok(node))
        return bool(found) and all(found)

    # ── looking from outside ─────────────────────────────────────────────────────────────────────────────────

    def master(self, key: str) -> Node:
        """The node that serves a key now, as the first node that answers sees it."""
        slot = key_slot(key.encode())
        for node in self.nodes:
            with contextlib.suppress(RedisError, OSError):
                for row in _rows(node.client.execute_command("CLUSTER", "SLOTS")):
                    if row[0] <= slot <= row[1]:
                        return next(one for one in self.nodes if one.port == row[2])
        raise AssertionError(f"nobody serves {key}")

    def ask(self, *command: Any, key: str | None = None) -> Any:
        """A command at the node of its key (the first argument, unless named)."""
        return self.master(key or str(command[1])).client.execute_command(*command)

    def masters(self) -> list[Node]:
        """The nodes that have slots now."""
        ports = {row[2] for row in _rows(self._any().client.execute_command("CLUSTER", "SLOTS"))}
        return [node for node in self.nodes if node.port in ports]

    def _any(self) -> Node:
        for node in self.nodes:
            with contextlib.suppress(RedisError, OSError):
                node.client.ping()
                return node
        raise AssertionError("no node answers")

    def flush(self) -> None:
        for node in self.masters():
            node.client.flushall()

    # ── moving a slot ────────────────────────────────────────────────────────────────────────────────────────

    def migrate(self, slot: int, target: Node, *, pause: float = 0.0) -> None:
        """Moves a slot key by key while it is being used; `pause` seconds between two keys."""
        (source,) = [
            next(one for one in self.nodes if one.port == row[2])
            for row in _rows(self._any().client.execute_command("CLUSTER", "SLOTS"))
            if row[0] <= slot <= row[1]
        ]
        if source is target:
            return
        ids = {node: node.client.execute_command("CLUSTER", "MYID") for node in (source, target)}
        target.client.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
        source.client.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        time.sleep(pause)
        auth = ("AUTH", self._password) if self._password else ()
        while keys := source.client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 1):
            migrate = ("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, *auth, "KEYS", *keys)
            source.client.execute_command(*migrate)
            time.sleep(pause)
        for node in (target, source, *(one for one in self.masters() if one not in (source, target))):
            node.client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[target])


def _rows(reply: Any) -> list[tuple[int, int, int]]:
    """First slot, last slot, port, of CLUSTER SLOTS in either form that redis-py gives it."""
    if isinstance(reply, dict):
        return [(int(first), int(last), int(row["primary"][1])) for (first, last), row in reply.items()]
    return [(int(row[0]), int(row[1]), int(row[2][1])) for row in reply]


class Watched:
    """A master with a replica and three sentinels."""

    def __init__(self, folder: Path, *, sentinel_password: str = "", password: str = "") -> None:
        common = {
            "appendonly": "yes",
            **UNSYNCED,
            "save": '""',
            **({"requirepass": password, "masterauth": password} if password else {}),
        }
        self.servers = [Node(folder / f"server-{n}", **common) for n in range(2)]
        self._password, self._sentinel_password = password, sentinel_password
        self.sentinels = [
            Node(
                folder / f"sentinel-{n}",
                sentinel=True,
                **({"requirepass": sentinel_password} if sentinel_password else {}),
            )
            for n in range(3)
        ]

    @property
    def url(self) -> str:
        login = f":{self._password}@" if self._password else ""
        options = f"?sentinel_password={self._sentinel_password}" if self._sentinel_password else ""
        return f"redis+sentinel://{login}{','.join(one.name for one in self.sentinels)}/mymaster/0{options}"

    def __enter__(self) -> Self:
        try:
            for server in self.servers:
                server.start()
            self.servers[1].client.execute_command("REPLICAOF", "127.0.0.1", self.servers[0].port)
            for sentinel in self.sentinels:
                sentinel.start()
                ask = sentinel.client.execute_command
                ask("SENTINEL", "MONITOR", "mymaster", "127.0.0.1", self.servers[0].port, 2)
                values = {"down-after-milliseconds": 800, "failover-timeout": 1000}
                if self._password:
                    values["auth-pass"] = self._password
                for name, value in values.items():
                    ask("SENTINEL", "SET", "mymaster", name, value)
            wait_for(self._whole, 20, "the sentinels know each other and the replica")
        except BaseException:
            self.__exit__()
            raise
        return self

    def _whole(self) -> bool:
        master = self.master()
        for sentinel in self.sentinels:
            state = sentinel.client.sentinel_master("mymaster")
            if state["num-other-sentinels"] != len(self.sentinels) - 1 or int(state["port"]) != master.port:
                return False
        (other,) = (server for server in self.servers if server is not master)
        seen = other.client.info("replication")
        return bool(seen["role"] == "slave" and seen["master_link_status"] == "up")

    def __exit__(self, *_exc: object) -> None:
        for node in (*self.sentinels, *self.servers):
            node.close()

    def master(self) -> Node:
        """Who is master, as the first sentinel says."""
        _, port = self.sentinels[0].client.sentinel_get_master_addr_by_name("mymaster")
        return next(server for server in self.servers if server.port == int(port))
