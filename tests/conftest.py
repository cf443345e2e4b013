"""Fixtures for every test: a real Redis that the tests start themselves, settings with a fast heartbeat, a bus."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import redis
import uvloop

# `support` holds the helpers that are no tests themselves.
sys.path.insert(0, str(Path(__file__).parent))

from support.guard import guard
from support.redis_servers import unsynced
from support.virtual_time import VirtualLoop

from services.cli.launch.embedded_redis import EmbeddedRedis
from shared.bus import Bus
from shared.participant.settings import Settings
from shared.telemetry.logging import configure

HEARTBEAT = 0.2
# The bus is tried on the event loop that all participants run on.
_ON_UVLOOP = re.compile(r"/(integration/test_(bus|journal|registry)|unit/bus/|contract/bus/)")
# Pauses of these tests pass at once.
_IN_VIRTUAL_TIME = re.compile(r"/unit/generator/test_journal_steps")
# every process that a test starts, and every worker of pytest, would compile all of it anew
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# what is collected stays until the end
gc.disable()
# nobody reads the answers of a test before he asks on
os.environ.setdefault("LOCAL2_YIELD_REST", "0")
# what went wrong is in a failed test's output, without a line per message
configure("warning", "json")
# How long examples take says how busy the machine is. Other examples are tried in each run: few are enough.
hypothesis.settings.register_profile(
    "any machine", deadline=None, max_examples=40, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Which event loop a test runs on."""
    if _ON_UVLOOP.search(item.path.as_posix()):
        return {"uvloop": uvloop.new_event_loop}
    if _IN_VIRTUAL_TIME.search(item.path.as_posix()):
        return {"virtual": VirtualLoop}
    return {"asyncio": asyncio.new_event_loop}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: one that begins last would keep all other processes waiting at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _nothing_outlives_the_tests() -> None:
    guard()


@pytest.fixture(scope="session", autouse=True)
def _whoever_leaves_a_connection_open_is_named() -> Iterator[None]:
    """An event loop that ends with open connections fails its test; the collector would find them in a later one."""
    end = asyncio.SelectorEventLoop.close

    def close(loop: asyncio.SelectorEventLoop) -> None:
        left: list[asyncio.Transport] = []
        if not loop.is_closed():
            # what was closed in the last turn is lost in the next one
            loop.run_until_complete(asyncio.sleep(0))
            known: dict[int, Any] = vars(loop)["_transports"]
            left = [transport for transport in known.values() if transport._sock is not None]
        said = [
            f"{each.get_extra_info('sockname')} to {each.get_extra_info('peername')}, {each.get_protocol()!r}"
            for each in left
        ]
        for transport in left:
            transport.abort()
        if left:
            loop.run_until_complete(asyncio.sleep(0))
        end(loop)
        if said:
            raise ResourceWarning("left open: " + "; ".join(said))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.SelectorEventLoop, "close", close)
        yield


@pytest.fixture(scope="session")
def _shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with unsynced(tmp_path_factory.mktemp("redis") / "data") as server:
        yield server


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis of a module's own, whose tests share what stands in it."""
    with unsynced(tmp_path_factory.mktemp("redis") / "data") as server:
        yield server.url


@pytest.fixture
def redis_url(_shared_server: EmbeddedRedis) -> str:
    """An empty Redis, shared by the tests of this run one after the other."""
    with redis.Redis.from_url(_shared_server.url) as client:
        client.flushall()
    return _shared_server.url


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """A Redis of this test's own, to be killed (`kill`) and started again (`start`) on the same URL and data."""
    with unsynced(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def spoil(redis_server: EmbeddedRedis) -> Iterator[Callable[[bool], None]]:
    """Makes `redis_server` refuse writes because it cannot save to its disk (MISCONF), or take them again."""
    with redis.Redis.from_url(redis_server.url) as raw:
        target = Path(raw.config_get("dir")["dir"]) / raw.config_get("dbfilename")["dbfilename"]

        def set_to(broken: bool) -> None:
            if broken:
                raw.config_set("save", "3600 1")
                raw.config_set("stop-writes-on-bgsave-error", "yes")
                # a folder in the place of the file
                target.mkdir()
                (target / "x").touch()
                raw.bgsave()
                while raw.info("persistence")["rdb_last_bgsave_status"] != "err":
                    pass
            else:
                shutil.rmtree(target)
                raw.config_set("save", "")

        yield set_to


@pytest.fixture
def raw(redis_url: str) -> Iterator[redis.Redis]:
    """A plain client on `redis_url`, to look at things from outside."""
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def settings(redis_url: str, tmp_path: Path) -> Settings:
    """Participants' settings on `redis_url`: a dead replica is noticed after 0.6 s."""
    return Settings(redis_url=redis_url, data_dir=tmp_path, heartbeat=HEARTBEAT, drain=2.0)


@pytest.fixture
async def bus(redis_url: str) -> AsyncIterator[Bus]:
    """A connected bus on `redis_url`."""
    async with Bus(redis_url, "test/1") as opened:
        yield opened
