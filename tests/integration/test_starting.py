"""Participants that start while Redis refuses writes: they wait, and serve when Redis accepts writes again."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from support.apps import ProbeSettings, probe
from support.proxy import Proxy
from support.redis_servers import UNSYNCED
from support.services import announced, running
from support.stack import respondent
from support.waiting import always, eventually

from services.cli.launch.embedded_redis import EmbeddedRedis
from services.critic.service import app as critic
from services.critic.settings import CriticSettings
from services.generator.settings import GeneratorSettings
from services.knowledge.service import app as knowledge
from services.knowledge.settings import KnowledgeSettings
from services.mcp.service import app as mcp
from services.mcp.settings import McpSettings
from services.memory.service import app as memory
from services.memory.settings import MemorySettings
from services.reward.service import app as reward
from services.reward.settings import RewardSettings
from services.web_fetch.service import WebFetchSettings
from services.web_fetch.service import app as web_fetch
from services.web_search.service import WebSearchSettings
from services.web_search.service import app as web_search

# No server listens there: participants start without their model server.
AWAY = "http://127.0.0.1:9"
PARTICIPANTS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "generator": (respondent(GeneratorSettings()), GeneratorSettings),
    "respondent-b": (
        respondent(GeneratorSettings(respondent_id="B")),
        lambda **values: GeneratorSettings(**values, respondent_id="B"),
    ),
    "memory": (memory, MemorySettings),
    "knowledge": (knowledge, KnowledgeSettings),
    "critic": (critic, CriticSettings),
    "reward": (reward, RewardSettings),
    "mcp": (mcp, McpSettings),
    "web_search": (web_search, lambda **values: WebSearchSettings(**values, provider="mock")),
    "web_fetch": (web_fetch, WebFetchSettings),
    "probe": (probe, ProbeSettings),
}
# A word in the complete description of a participant's settings.
COMPLETED = {"generator": b"Skeptic", "respondent-b": b"Skeptic", "critic": b"enumDescriptions"}
Refuse = Callable[[bool], None]


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """A server that reloads its data on command, slowly enough for requests meanwhile."""
    loading = {"enable-debug-command": "local", "loading-process-events-interval-bytes": "1024"}
    with EmbeddedRedis(tmp_path / "redis", extra={**UNSYNCED, **loading}) as server:
        yield server


@pytest.fixture(params=["OOM", "MISCONF", "NOREPLICAS", "READONLY", "LOADING"])
def refuse(request: pytest.FixtureRequest, redis_server: EmbeddedRedis, spoil: Refuse) -> Iterator[Refuse]:
    """Yield a function that makes `redis_server` refuse commands with this error, or accept them again."""
    with redis.Redis.from_url(redis_server.url) as raw, redis.Redis.from_url(redis_server.url) as reloading:
        reload = threading.Thread(target=lambda: reloading.execute_command("DEBUG", "RELOAD"))

        def load(begins: bool) -> None:
            if not begins:
                return reload.join()
            for n in range(500):
                raw.set(f"filler:{n}", "x" * 1_000)
            raw.config_set("key-load-delay", 2_000)
            reload.start()
            with contextlib.suppress(redis.exceptions.BusyLoadingError):
                while True:
                    raw.ping()

        ways: dict[str, Refuse] = {
            "OOM": lambda on: raw.config_set("maxmemory", int(on)),
            "MISCONF": spoil,
            "NOREPLICAS": lambda on: raw.config_set("min-replicas-to-write", int(on)),
            "READONLY": lambda on: raw.replicaof(*("127.0.0.1", "9") if on else ("NO", "ONE")),
            "LOADING": load,
        }
        yield ways[request.param]


@pytest.mark.parametrize("name", PARTICIPANTS)
async def test_participant_starting_in_refusing_redis_waits(
    name: str, refuse: Refuse, redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    """The refusals begin as soon as the participant's inbox exists: Redis refuses its next write."""
    app, settings = PARTICIPANTS[name]
    begun = asyncio.Event()
    with redis.Redis.from_url(redis_server.url) as raw:

        async def arrives(_commands: bytes) -> None:
            if not begun.is_set() and raw.keys(f"local2:inbox:{name}:*"):
                begun.set()
                refuse(True)

        common = {"data_dir": tmp_path / "data", "ollama_host": AWAY, "heartbeat": 0.2, "drain": 0.5}
        known = {key: value for key, value in common.items() if key in type(settings()).model_fields}
        async with (
            Proxy(redis_server.url, before=arrives) as proxy,
            running(app, settings(redis_url=proxy.url, **known)) as task,
        ):
            await eventually(begun.is_set)
            await always(lambda: not task.done(), 0.5)
            await asyncio.to_thread(refuse, False)
            await announced(redis_server.url, name)
            described = f"local2:settings-schema:{name}"
            await eventually(lambda: COMPLETED.get(name, b"") in (raw.get(described) or b""))
