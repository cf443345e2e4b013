"""Redis is filled up to its limit while the stack works, and made empty again."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
from load import Load, Outcome
from stack import Stack, docker

BALLAST = Path(__file__).resolve().parent / "ballast.py"
SESSIONS = 3
# Longer than the bus tries an entry that fails: five deliveries, three heartbeats each.
SECONDS = 25.0


def limits(stack: Stack) -> tuple[int, int]:
    """Redis' own limit and its container's, in bytes."""
    (container,) = stack.containers("redis")
    info = docker("exec", container.id, "redis-cli", "--user", "core", "--no-auth-warning", "INFO", "memory")
    (own,) = [int(line.partition(":")[2]) for line in info.splitlines() if line.startswith("maxmemory:")]
    return own, container.raw["HostConfig"]["Memory"]


async def fill(stack: Stack, redis_url: str) -> tuple[Outcome, list[str], list[str]]:
    """Under load: what became of it, what a client was told while Redis was full, and what was wrong with that."""
    network = f"{stack.name}_bus"
    (before,) = await asyncio.to_thread(stack.containers, "redis")
    async with Load(stack, SESSIONS) as load:
        await asyncio.sleep(3)
        await asyncio.to_thread(stack.python, network, BALLAST, "fill", LOCAL2_REDIS_URL=redis_url)
        try:
            told, wrong = await asks(stack, load.outcome.queries[0]["id"])
            await asyncio.sleep(SECONDS)
        finally:
            await asyncio.to_thread(stack.python, network, BALLAST, "drop", LOCAL2_REDIS_URL=redis_url)
        await asyncio.sleep(4)
    await asyncio.to_thread(stack.up)
    (after,) = await asyncio.to_thread(stack.containers, "redis")
    if before.pid != after.pid:
        wrong.append("Redis was restarted")
    return load.outcome, told, wrong


async def asks(stack: Stack, earlier: str) -> tuple[list[str], list[str]]:
    """What the API says while Redis is full, and what of it is not as it should be."""
    told, wrong = [], []
    (url, *_) = await asyncio.to_thread(stack.urls)
    headers = {"authorization": f"Bearer {stack.admin_key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=15) as http:
        answers: dict[str, httpx.Response] = {
            "POST /query": await http.post("/query?wait=false", json={"query": "load plain 0"}),
            "POST /feedback": await http.post("/feedback", json={"query_id": earlier, "sentiment": "positive"}),
            "GET /queries/{id}": await http.get(f"/queries/{earlier}"),
            "GET /health": await http.get("/health"),
            "GET /ready": await http.get("/ready"),
        }
    for what, answer in answers.items():
        told.append(f"{what}: {answer.status_code} {_said(answer)}")
        writes = what.startswith("POST")
        if writes and (answer.status_code != 503 or "retry-after" not in answer.headers):
            wrong.append(f"{what} should be refused for now: {told[-1]}")
        if not writes and answer.status_code != 200 and what != "GET /ready":
            wrong.append(f"{what} should go on: {told[-1]}")
    return told, wrong


def _said(answer: httpx.Response) -> str:
    value: dict[str, Any] = answer.json()
    return json.dumps(value.get("error") or value.get("state") or value.get("parts") or value)[:300]
