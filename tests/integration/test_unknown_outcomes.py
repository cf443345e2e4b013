"""Writes whose participant stops answering: the error says that their outcome is unknown."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

from support.http_gateway import gateway_settings, serving
from support.memories import memory_settings
from support.mortal import replica
from support.services import announced, running

from services.memory.service import app
from shared.testing.model_server import ScriptedModelServer

TOPIC = "/memory/topics/user.pet"
LIVES = {"subject": "me", "relation": "lives in", "object": "Graz"}
# Method, path, body, and whether the request writes.
ROUTES: list[tuple[str, str, Any, bool]] = [
    ("PUT", TOPIC, {"content": "A cat."}, True),
    ("DELETE", TOPIC, None, True),
    ("POST", "/memory/import", {"query": "q", "answer": "a"}, True),
    ("DELETE", "/memory/engrams/1-0:A", None, True),
    ("DELETE", "/memory?everything=true", None, True),
    ("POST", "/knowledge/facts", LIVES, True),
    ("PATCH", "/knowledge/facts/x", {"object": "Rome"}, True),
    ("DELETE", "/knowledge/facts/x", None, True),
    ("DELETE", "/files/x", None, True),
    ("GET", TOPIC, None, False),
    ("GET", "/memory?query=cat", None, False),
    ("GET", "/memory/engrams", None, False),
    ("GET", "/knowledge/facts", None, False),
    ("GET", "/files", None, False),
]


async def test_write_without_an_answer_has_an_unknown_outcome(redis_url: str, tmp_path: Path) -> None:
    async with ScriptedModelServer(()) as model, serving(gateway_settings(redis_url, tmp_path)) as site:
        with (
            replica("memory", redis_url, tmp_path / "memory", model.url) as memory,
            replica("knowledge", redis_url, tmp_path / "knowledge", model.url) as knowledge,
        ):
            for name in ("memory", "knowledge"):
                await announced(redis_url, name)
            assert (await site.http.put(TOPIC, json={"content": "A dog."})).status_code == 200
            for frozen in (memory, knowledge):
                frozen.process.send_signal(signal.SIGSTOP)
            asked = [site.http.request(method, path, json=body, timeout=60) for method, path, body, _ in ROUTES]
            answers = await asyncio.gather(*asked)
    for (method, path, _, writes), answer in zip(ROUTES, answers, strict=True):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"].endswith("_unavailable")) == (503, True), (method, path)
        assert (error.get("outcome") == "unknown") is writes, (method, path, error)
        assert ("read it again" in error["message"]) is writes, (method, path, error)


async def test_topic_whose_memory_died_after_the_write_is_there(redis_url: str, tmp_path: Path) -> None:
    async with ScriptedModelServer(()) as model, serving(gateway_settings(redis_url, tmp_path)) as site:
        with replica("memory", redis_url, tmp_path, model.url, "stored") as dying:
            await announced(redis_url, "memory")
            answer = await site.http.put(TOPIC, json={"content": "A cat."}, timeout=60)
            await dying.died()
        assert (answer.status_code, answer.json()["error"]["outcome"]) == (503, "unknown")
        async with running(app, memory_settings(redis_url, tmp_path, model.url)):
            await announced(redis_url, "memory")
            assert (await site.http.get(TOPIC)).json()["content"] == "A cat."
