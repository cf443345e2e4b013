"""Stacks to be backed up: a gateway and a generator inside the test, each with a Redis of its own, and `local2`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from support.http_gateway import ADMIN_KEY, Site, client, gateway_settings, serving
from support.services import announced, running
from support.stack import Stage, stage
from typer.testing import CliRunner

from services.cli.app import app
from services.knowledge.service import app as knowledge_app
from services.knowledge.settings import KnowledgeSettings
from services.memory.service import app as memory_app
from services.memory.settings import MemorySettings
from services.reward.service import app as reward_app
from services.reward.settings import RewardSettings
from shared.errors import Local2Error

# of a stack without the participants whose data these are
WITHOUT = ("--without=memories", "--without=files", "--without=preferences", "--without=knowledge")
BACKUP = ("backup", *WITHOUT)


@dataclass(frozen=True)
class Said:
    exit_code: int
    output: str


@dataclass
class Place:
    """A stack: `site` is its gateway, `stage` its generator with the scripted model."""

    site: Site
    stage: Stage

    async def local2(self, *args: str, key: str = ADMIN_KEY) -> Said:
        """The command line against this stack; `exit_code` and `output` as in a terminal."""
        return await asyncio.to_thread(run_local2, self.site.url, key, *args)

    async def ask(self, query: str, session: str, key: str = ADMIN_KEY) -> dict[str, Any]:
        async with client(self.site.url, key) as http:
            answer = await http.post("/query", json={"query": query, "session_id": session})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


def run_local2(url: str, key: str, *args: str) -> Said:
    """What a failed command says is part of `output`, as `main` prints it; an error that is no sentence is raised."""
    env = {name: None for name in os.environ if name.startswith("LOCAL2_")}
    result = CliRunner().invoke(app, list(args), env={**env, "LOCAL2_API_URL": url, "LOCAL2_API_KEY": key})
    if result.exception is not None and not isinstance(result.exception, SystemExit | Local2Error):
        raise result.exception
    told = f"local2: {result.exception}" if isinstance(result.exception, Local2Error) else ""
    return Said(result.exit_code, result.output + told)


@contextlib.asynccontextmanager
async def place(redis_url: str, folder: Path, **gateway: Any) -> AsyncIterator[Place]:
    async with (
        stage(redis_url, [{"respond": {"text": "You asked: <<query>>"}}]) as generator,
        serving(gateway_settings(redis_url, folder, **gateway)) as site,
    ):
        yield Place(site, generator)


@contextlib.asynccontextmanager
async def remembering(stack: Place, redis_url: str, folder: Path) -> AsyncIterator[None]:
    """A memory, a reward and a knowledge in a stack, with stores of their own."""
    common: dict[str, Any] = {"redis_url": redis_url, "heartbeat": 0.5, "drain": 0.5, "data_dir": folder}
    host = stack.stage.server.url
    memory = MemorySettings(**common, ollama_host=host, classify="rules", chroma_path=folder / "chroma")
    async with (
        running(memory_app, memory),
        running(reward_app, RewardSettings(**common)),
        running(knowledge_app, KnowledgeSettings(**common, ollama_host=host, demo=True)),
    ):
        await announced(redis_url, "memory")
        await announced(redis_url, "reward")
        await announced(redis_url, "knowledge")
        yield


async def key_of(stack: Place, user: str, role: str = "user") -> str:
    made = await stack.site.http.post("/keys", json={"name": f"{user}'s", "user_id": user, "role": role})
    key: str = made.json()["key"]
    return key


def said(user: str, number: int, turn: int) -> str:
    return f"{user} {number}.{turn} – naïve “quotes” \u2028 \U0001f600 \x00"


async def fill(stack: Place) -> dict[str, str]:
    """Conversations of three users, settings of two participants; the users' keys."""
    keys = {"ann": await key_of(stack, "ann"), "bob": await key_of(stack, "bob", "admin"), "admin": ADMIN_KEY}
    for user, key in keys.items():
        for number in range(2):
            for turn in range(3):
                await stack.ask(said(user, number, turn), f"{user}-{number}", key)
    for participant, values in (
        ("generator", {"temperature": 0.25, "max_tool_iterations": 2}),
        ("gateway", {"max_backlog": 77}),
    ):
        changed = await stack.site.http.patch(f"/participants/{participant}/settings", json=values)
        assert changed.status_code == 200, changed.text
    return keys


async def seen(stack: Place, keys: dict[str, str]) -> dict[str, Any]:
    """Everything that a client can see of what is kept."""
    found: dict[str, Any] = {"keys": {}, "sessions": {}}
    listed = (await stack.site.http.get("/keys")).json()["keys"]
    found["keys"] = [key for key in listed if key["name"] != "start key"]
    for user, key in keys.items():
        async with client(stack.site.url, key) as http:
            infos = (await http.get("/sessions")).json()["sessions"]
            found["sessions"][user] = [(await http.get(f"/sessions/{info['session_id']}")).content for info in infos]
    for participant in ("generator", "gateway"):
        found[participant] = (await stack.site.http.get(f"/participants/{participant}/settings")).json()["values"]
    return found


def kept(url: str) -> dict[str, Any]:
    """What Redis itself holds of it, byte for byte."""
    with redis.Redis.from_url(url) as raw:
        found: dict[str, Any] = {}
        for pattern in ("local2:session:*", "local2:settings:*", "local2:sessions:*"):
            for key in raw.scan_iter(pattern):
                kind = raw.type(key)
                if key.endswith(b":deleted"):
                    continue
                found[key.decode()] = (
                    raw.hgetall(key) if kind == b"hash" else dict(raw.zrange(key, 0, -1, withscores=True))
                )
        return found


def names(folder: Path, pattern: str) -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))


async def backed_up(stack: Place, file: Path, *, plain: bool = True) -> Path:
    """plain: without the sections of participants that are not there."""
    done = await stack.local2(*(BACKUP if plain else ["backup"]), str(file))
    assert done.exit_code == 0, done.output
    return file
