"""Knowledge when it dies at any step, and the store that it leaves behind."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from support.knowledge import KnowledgeClient, asking, knowledge_settings
from support.memories import response
from support.mortal import replica
from support.services import announced, running

from services.knowledge.service import app
from shared.contracts import DEAD_LETTER, MemoryForget
from shared.envelope import now_ms
from shared.testing.model_server import ScriptedModelServer

FACTS = orjson.dumps(
    {
        "facts": [
            {"subject": "Anna", "subject_kind": "person", "relation": "lives in", "object": "Lyon",
             "object_kind": "place", "holds": "is", "since": "", "until": ""},
            {"subject": "Anna", "subject_kind": "person", "relation": "plays", "object": "chess",
             "object_kind": "thing", "holds": "is", "since": "", "until": ""},
        ]
    }
).decode()  # fmt: skip
RULE = {"when": {"system": "You read turns"}, "respond": {"text": FACTS}}
SAID = "My sister Anna lives in Lyon and plays chess."


async def told(client: KnowledgeClient) -> list[tuple[str, int]]:
    """The facts with the numbers of their sources."""
    facts = (await client.manage("list"))["facts"]
    return sorted((fact["text"].split(" (said")[0], len(fact["sources"])) for fact in facts)


@pytest.mark.slow
@pytest.mark.parametrize("step", ["received", "read by rule", "read by the model", "merged"])
async def test_after_a_crash_at_any_step_nothing_is_lost_and_nothing_is_there_twice(
    redis_url: str, tmp_path: Path, step: str
) -> None:
    async with ScriptedModelServer([RULE]) as server, asking(redis_url, tmp_path, server) as client:
        with replica("knowledge", redis_url, tmp_path, server.url, step) as dying:
            await announced(redis_url, "knowledge", timeout=30)
            await client.publish(response(SAID, "I see."))
            await dying.died()
        async with running(app, knowledge_settings(redis_url, tmp_path, server.url, demo=False)):
            await client.idle(30)
            assert await told(client) == [("Anna lives in Lyon: IS true", 1), ("Anna plays chess: IS true", 1)]
            # what the model had said and was kept is not asked for again
            assert len(server.requests) == (2 if step == "read by the model" else 1)
            assert await client.bus.link.call("XLEN", DEAD_LETTER.stream) == 0


@pytest.mark.slow
async def test_a_deletion_that_was_cut_off_is_carried_out(redis_url: str, tmp_path: Path) -> None:
    async with ScriptedModelServer([RULE]) as server, asking(redis_url, tmp_path, server) as client:
        said = response(SAID, "I see.", session_id="s1")
        with replica("knowledge", redis_url, tmp_path, server.url, "forgotten") as dying:
            await announced(redis_url, "knowledge", timeout=30)
            await client.publish(said)
            await client.idle()
            await client.publish(MemoryForget(user_id="ann", session_id="s1", at=now_ms()))
            await dying.died()
        async with running(app, knowledge_settings(redis_url, tmp_path, server.url, demo=False)):
            await client.publish(said)
            await client.idle(30)
            assert await told(client) == []
