"""A memory inside the test, with the scripted model server for its vectors, and a client that speaks to it."""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from support.services import announced, running
from support.waiting import PATIENCE, eventually

from services.memory.service import app
from services.memory.settings import MemorySettings
from shared.bus import Bus
from shared.contracts import (
    CRITIQUE_RESULT,
    PAIRWISE_RESULT,
    RESPONSE_GENERATION,
    REWARD_EVENT,
    CritiqueResult,
    PairwiseResult,
    ResponseGeneration,
    RewardEvent,
    Subject,
    ToolResultMessage,
)
from shared.participant.service import Context, open_context
from shared.participant.settings import Settings
from shared.participant.tool_client import Caller, ToolClient
from shared.testing.model_server import ScriptedModelServer

# Longer than in other tests: the store's threads compete with the loop for the processor.
HEARTBEAT = 0.5
_queries = itertools.count(1_700_000_000_000, 1_000)
SUBJECTS: tuple[Subject[Any], ...] = (RESPONSE_GENERATION, CRITIQUE_RESULT, PAIRWISE_RESULT, REWARD_EVENT)


def new_query() -> str:
    return f"{next(_queries)}-0"


def response(query: str, answer: str, **fields: Any) -> ResponseGeneration:
    query_id = fields.pop("query_id", None) or new_query()
    respondent = fields.pop("respondent_id", "A")
    values: dict[str, Any] = {
        "query_id": query_id,
        "response_id": f"{query_id}:{respondent}",
        "session_id": "s1",
        "user_id": "ann",
        "respondent_id": respondent,
        "generator_id": "GeneratorAgent",
        "query": query,
        "answer": answer,
        "model": "gemma4:e4b",
        "finish_reason": "stop",
        **fields,
    }
    return ResponseGeneration(**values)


def critique(of: ResponseGeneration, score: int | None, feedback: str = "fine") -> CritiqueResult:
    return CritiqueResult(
        query_id=of.query_id,
        response_id=of.response_id,
        session_id=of.session_id,
        respondent_id=of.respondent_id,
        score=score,
        feedback=feedback,
        rubric="realistic",
        query=of.query,
        answer=of.answer,
    )


def verdict(query_id: str, winner: Any) -> PairwiseResult:
    return PairwiseResult(
        original_query_id=query_id,
        query_id_a=f"{query_id}:A",
        query_id_b=f"{query_id}:B",
        winner=winner,
        score_a=4,
        score_b=3,
        reason="clearer",
        config_a={},
        config_b={},
        session_id="s1",
    )


def reward(of: ResponseGeneration, value: float, vote_id: str = "") -> RewardEvent:
    return RewardEvent(
        query_id=of.query_id,
        response_id=of.response_id,
        respondent_id=of.respondent_id,
        reward=value,
        source="user.feedback",
        config={},
        vote_id=vote_id,
    )


class MemoryClient:
    """Publishes what other participants would, and asks as the gateway and the generator do."""

    def __init__(self, context: Context[Any], server: ScriptedModelServer) -> None:
        self.bus: Bus = context.bus
        self.registry = context.registry
        self.server = server
        self._tools = ToolClient(context)

    async def publish(self, *payloads: Any) -> None:
        for payload in payloads:
            subject = next(one for one in SUBJECTS if one.payload is type(payload))
            headers = {"user_id": payload.user_id} if isinstance(payload, ResponseGeneration) else {}
            await self.bus.publish(subject.of(payload, session_id=getattr(payload, "session_id", ""), **headers))

    async def idle(self, timeout: float = 20.0) -> None:
        """Returns when everything published has been taken in."""

        async def done() -> bool:
            return not sum([await self.bus.backlog(subject.stream, "memory") for subject in SUBJECTS])

        await eventually(done, timeout, "memory has finished everything")

    async def tool(
        self, name: str, user: str = "ann", session: str = "s9", zone: str = "", **args: Any
    ) -> ToolResultMessage:
        call_id = uuid.uuid4().hex
        caller = Caller(query_id="1-1", session_id=session, user_id=user, time_zone=zone)
        return await self._tools.call(name, args, call_id=call_id, caller=caller, timeout=10)

    async def manage(self, op: str, user: str = "ann", **args: Any) -> dict[str, Any]:
        answer = await self.managed(op, user, **args)
        assert answer.error is None, answer.error
        found: dict[str, Any] = answer.data
        return found

    async def managed(self, op: str, user: str = "ann", **args: Any) -> ToolResultMessage:
        return await self.operated("memory_manage", user, op=op, **args)

    async def operated(self, operation: str, user: str = "ann", **args: Any) -> ToolResultMessage:
        call_id, caller = uuid.uuid4().hex, Caller(query_id="1-1", user_id=user)
        return await self._tools.call(
            operation, args, call_id=call_id, caller=caller, timeout=20 * PATIENCE, internal=True
        )

    async def engrams(self, user: str = "ann") -> dict[str, dict[str, Any]]:
        found = await self.manage("list", user, limit=500)
        return {engram["id"]: engram for engram in found["engrams"]}

    async def forget_all(self, *users: str) -> None:
        """Empties the memory of users, and what it knows of deletions: ids and sessions may be used again."""
        await self.idle()
        for user in users:
            await self.manage("delete_user", user)
        for pattern in ("local2:memory:*", "local2:session*"):
            if keys := await self.bus.link.call("KEYS", pattern):
                await self.bus.link.call("DEL", *keys)

    async def exported(self, user: str = "ann", **args: Any) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        cursor = None
        while True:
            page = await self.manage("export", user, cursor=cursor, limit=1, **args)
            lines += page["lines"]
            cursor = page["cursor"]
            if cursor is None:
                return lines

    async def facts(self) -> dict[str, Any]:
        """What the replica that was started last says of itself."""
        replicas = [one for one in await self.registry.replicas(fresh=True) if one.participant == "memory"]
        return max(replicas, key=lambda one: one.started).facts if replicas else {}

    async def indexed(self, since: int = 0) -> None:
        """Waits for a replica started since then (ms) to have read its store."""

        async def ready() -> bool:
            replicas = await self.registry.replicas(fresh=True)
            found = [r for r in replicas if r.participant == "memory" and r.started >= since and r.state == "ready"]
            return any(one.facts.get("indexed") for one in found)

        await eventually(ready, 15, "the store is read")


def memory_settings(url: str, folder: Path, model_url: str, **values: Any) -> MemorySettings:
    common: dict[str, Any] = {
        "redis_url": url,
        "data_dir": folder,
        "heartbeat": HEARTBEAT,
        "drain": 1.0,
        "classify": "rules",
        "yield_rest": 0,
    }
    return MemorySettings(**{**common, "ollama_host": model_url, **values})


@contextlib.asynccontextmanager
async def asking(url: str, folder: Path, server: ScriptedModelServer) -> AsyncIterator[MemoryClient]:
    settings = Settings(redis_url=url, data_dir=folder, heartbeat=HEARTBEAT)
    async with open_context("asker", settings) as context:
        yield MemoryClient(context, server)


@contextlib.asynccontextmanager
async def remembering(
    url: str, folder: Path, rules: Any = (), *, model_server: ScriptedModelServer | None = None, **values: Any
) -> AsyncIterator[MemoryClient]:
    """Serves until the block ends. `values` are settings of memory."""
    async with (
        model_server or ScriptedModelServer(rules) as server,
        running(app, memory_settings(url, folder, server.url, **values)),
        asking(url, folder, server) as client,
    ):
        await announced(url, "memory")
        await client.indexed()
        yield client
