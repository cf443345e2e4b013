"""A knowledge inside the test, with the scripted model server, and a client that speaks to it."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from support.memories import response
from support.services import announced, running
from support.waiting import PATIENCE, eventually

from services.knowledge.service import app
from services.knowledge.settings import KnowledgeSettings
from shared.bus import Bus
from shared.contracts import (
    KNOWLEDGE_FORGET,
    KNOWLEDGE_READ,
    MEMORY_FORGET,
    QUERY_FORGET,
    RESPONSE_GENERATION,
    KnowledgeForget,
    MemoryForget,
    QueryForget,
    ResponseGeneration,
    ToolResultMessage,
)
from shared.participant.service import Context, open_context
from shared.participant.settings import Settings
from shared.participant.tool_client import Caller, ToolClient
from shared.testing.model_server import ScriptedModelServer

HEARTBEAT = 0.5
_READ = (RESPONSE_GENERATION, KNOWLEDGE_READ, MEMORY_FORGET, QUERY_FORGET, KNOWLEDGE_FORGET)


class KnowledgeClient:
    """Publishes what other participants would, and asks as the gateway and the generator do."""

    def __init__(self, context: Context[Any], server: ScriptedModelServer) -> None:
        self.bus: Bus = context.bus
        self.registry = context.registry
        self.server = server
        self._tools = ToolClient(context)

    async def say(self, query: str, answer: str = "I see.", **fields: Any) -> ResponseGeneration:
        """Publishes a response, and returns it when nothing is left to be read."""
        said = response(query, answer, **fields)
        await self.publish(said)
        await self.idle()
        return said

    async def publish(self, *payloads: Any) -> None:
        for payload in payloads:
            match payload:
                case ResponseGeneration():
                    headers = {"user_id": payload.user_id, "session_id": payload.session_id}
                    await self.bus.publish(RESPONSE_GENERATION.of(payload, **headers))
                case MemoryForget():
                    await self.bus.publish(MEMORY_FORGET.of(payload))
                case QueryForget():
                    await self.bus.publish(QUERY_FORGET.of(payload))
                case KnowledgeForget():
                    await self.bus.publish(KNOWLEDGE_FORGET.of(payload))

    async def idle(self, timeout: float = 20.0) -> None:
        async def done() -> bool:
            return not sum([await self.bus.backlog(subject.stream, "knowledge") for subject in _READ])

        await eventually(done, timeout, "knowledge has finished everything")

    async def search(self, *people: str, places: tuple[str, ...] = (), user: str = "ann") -> list[str]:
        """The lines that a model reads."""
        found = await self.tool("search_knowledge_graph", user, people=list(people), locations=list(places))
        assert found.error is None, found.error
        return found.result.splitlines()

    async def tool(self, name: str, user: str = "ann", **args: Any) -> ToolResultMessage:
        caller = Caller(query_id="1-1", session_id="s9", user_id=user)
        return await self._tools.call(name, args, call_id=uuid.uuid4().hex, caller=caller, timeout=20 * PATIENCE)

    async def manage(self, op: str, user: str = "ann", **args: Any) -> dict[str, Any]:
        answer = await self.managed(op, user, **args)
        assert answer.error is None, answer.error
        found: dict[str, Any] = answer.data
        return found

    async def managed(self, op: str, user: str = "ann", call_id: str = "", **args: Any) -> ToolResultMessage:
        caller = Caller(query_id="1-1", user_id=user)
        return await self._tools.call(
            "knowledge_manage", {"op": op, **args}, call_id=call_id or uuid.uuid4().hex, caller=caller,
            timeout=20 * PATIENCE, internal=True,
        )  # fmt: skip

    async def facts(self, user: str = "ann") -> dict[str, str]:
        """Each fact's line, by its id."""
        return {fact["id"]: fact["text"] for fact in (await self.manage("list", user, limit=500))["facts"]}

    async def forget_all(self, *users: str) -> None:
        await self.idle()
        for user in users:
            await self.manage("clear", user)


def knowledge_settings(url: str, folder: Path, model_url: str, **values: Any) -> KnowledgeSettings:
    common: dict[str, Any] = {
        "redis_url": url,
        "data_dir": folder,
        "heartbeat": HEARTBEAT,
        "drain": 1.0,
        "demo": True,
        "yield_rest": 0,
    }
    return KnowledgeSettings(**{**common, "ollama_host": model_url, **values})


@contextlib.asynccontextmanager
async def asking(url: str, folder: Path, server: ScriptedModelServer) -> AsyncIterator[KnowledgeClient]:
    settings = Settings(redis_url=url, data_dir=folder, heartbeat=HEARTBEAT)
    async with open_context("asker", settings) as context:
        yield KnowledgeClient(context, server)


@contextlib.asynccontextmanager
async def knowing(url: str, folder: Path, rules: Any = (), **values: Any) -> AsyncIterator[KnowledgeClient]:
    """Serves until the block ends. `values` are settings of knowledge; the rules read unless `demo` is False."""
    async with (
        ScriptedModelServer(rules) as server,
        running(app, knowledge_settings(url, folder, server.url, **values)),
        asking(url, folder, server) as client,
    ):
        await announced(url, "knowledge")
        yield client
