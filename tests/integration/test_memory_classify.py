"""Intent and names of a turn, by a model that answers, one that does not, and one that dies with its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.memories import MemoryClient, asking, memory_settings, remembering, response
from support.mortal import replica
from support.services import announced, running
from support.waiting import eventually

from services.memory.service import app
from shared.contracts import DEAD_LETTER, MEMORY_CLASSIFY
from shared.testing.model_server import ScriptedModelServer

LABEL = '{"intent": "writing", "entities": ["Marie Curie", "Sorbonne"]}'
SAID = ("Tell me about Pierre Curie.", "He was a physicist in Paris.")


def labelling(**respond: Any) -> dict[str, Any]:
    return {"when": {"system": "You label one turn"}, "respond": respond}


async def through(client: MemoryClient) -> None:
    """Waits until nothing is to be taken in and nothing waits for a label."""
    await client.idle()

    async def done() -> bool:
        return await client.bus.backlog(MEMORY_CLASSIFY.stream, "memory") == 0

    await eventually(done, 15, "everything has been labelled")


async def label(client: MemoryClient, engram_id: str) -> tuple[str, list[str]]:
    found = (await client.manage("get", id=engram_id))["engram"]
    return found["intent"], found["entities"]


async def test_the_models_label_replaces_that_of_the_rules(redis_url: str, tmp_path: Path) -> None:
    async with remembering(redis_url, tmp_path, [labelling(text=LABEL)], classify="auto") as client:
        said = response(*SAID)
        await client.publish(said)
        await through(client)
        assert await label(client, said.response_id) == ("writing", ["Marie Curie", "Sorbonne"])
        (asked,) = client.server.requests
        assert asked.body["format"]["properties"]["intent"]["enum"] == [
            "lookup", "remember", "recall", "code", "writing", "question", "chat"
        ]  # fmt: skip
        assert asked.body["options"]["num_ctx"] == 32_000
        # what is searched is what was said before too: the label changes nothing there
        hits = (await client.manage("search", query="Pierre Curie physicist"))["hits"]
        assert [(hit["id"], hit["intent"]) for hit in hits] == [(said.response_id, "writing")]
        # published again, it has its label and is not asked for once more
        await client.publish(said)
        await through(client)
        assert len(client.server.requests) == 1


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"classify": "model"}, labelling(text="I would say: a question.")),
        ({"classify": "model"}, labelling(text='{"intent": "dancing", "entities": []}')),
        ({"classify": "model"}, labelling(status=404, error="model 'gemma4:e4b' not found")),
        ({"classify": "model", "classify_timeout": 0.2}, labelling(text=LABEL, delay=20)),
        ({"classify": "rules"}, labelling(text=LABEL)),
        ({"classify": "auto", "demo": True}, labelling(text=LABEL)),
    ],
    ids=["no json", "no intent", "no model", "too slow", "rules", "demonstration model"],
)
async def test_without_a_models_label_that_of_the_rules_stays(
    redis_url: str, tmp_path: Path, settings: dict[str, Any], rule: dict[str, Any]
) -> None:
    async with remembering(redis_url, tmp_path, [rule], **settings) as client:
        said = response(*SAID)
        await client.publish(said)
        await through(client)
        intent, names = await label(client, said.response_id)
        assert (intent, set(names)) == ("question", {"Pierre Curie", "Paris"})
        assert len(client.server.requests) == (settings["classify"] == "model")
        assert await client.bus.range(DEAD_LETTER.stream, "-", "+", 1) == []


async def test_switched_off_there_is_no_label_at_all(redis_url: str, tmp_path: Path) -> None:
    async with remembering(redis_url, tmp_path, [labelling(text=LABEL)], classify="off") as client:
        said = response(*SAID)
        await client.publish(said)
        await through(client)
        assert (await client.manage("get", id=said.response_id))["engram"]["intent"] is None
        assert client.server.requests == []


async def test_a_label_that_was_being_made_in_a_crash_is_made_by_the_next(redis_url: str, tmp_path: Path) -> None:
    rules = [{**labelling(text=LABEL, delay=60), "times": 1}, labelling(text=LABEL)]
    async with ScriptedModelServer(rules) as server, asking(redis_url, tmp_path, server) as client:
        said = response(*SAID)
        with replica("memory", redis_url, tmp_path, server.url, memory_classify="model") as dying:
            await announced(redis_url, "memory", timeout=30)
            await client.publish(said)
            await server.wait_until(lambda one: one.streaming == 1, 15)
            dying.kill()
            await dying.died()
        async with running(app, memory_settings(redis_url, tmp_path, server.url, classify="model")):
            await through(client)
            assert await label(client, said.response_id) == ("writing", ["Marie Curie", "Sorbonne"])


async def test_what_is_deleted_while_it_waits_is_not_shown_to_the_model(redis_url: str, tmp_path: Path) -> None:
    rules = [{**labelling(text=LABEL, delay=1), "times": 1}, labelling(text=LABEL)]
    async with remembering(redis_url, tmp_path, rules, classify="model") as client:
        first, second = response(*SAID), response("My password is swordfish.", "Forget it.")
        await client.publish(first)
        await client.server.wait_until(lambda one: one.streaming == 1, 10)
        await client.publish(second)
        await client.idle()
        assert (await client.manage("delete", id=second.response_id))["found"]
        await through(client)
        assert list(await client.engrams()) == [first.response_id]
        assert len(client.server.requests) == 1
