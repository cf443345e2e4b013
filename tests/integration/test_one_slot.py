"""A model server with one slot, as Ollama is by default: what nobody waits for is out of the way of a question."""

from __future__ import annotations

from pathlib import Path

from support.memories import MemoryClient, asking, memory_settings, response
from support.services import announced, running
from support.stack import Client, respondent
from support.waiting import eventually

from services.generator.settings import GeneratorSettings
from services.memory.service import app as memory
from shared.contracts import MEMORY_CLASSIFY
from shared.testing.ollama_server import ScriptedOllama

LABELS = "You label one turn"
LABEL = '{"intent": "writing", "entities": ["Marie Curie"]}'
# a label that takes two minutes
SLOW = {"when": {"system": LABELS}, "respond": {"text": "word " * 400, "pace": 0.3}}
QUICK = {"when": {"system": LABELS}, "respond": {"text": LABEL}}
ANSWER = {"respond": {"text": "At once."}}


async def label_of(client: MemoryClient, engram_id: str) -> str | None:
    found = (await client.manage("get", id=engram_id))["engram"]
    return None if found is None else found["intent"]


async def test_a_question_cuts_the_label_that_holds_the_slot_and_the_label_is_made_later(
    redis_url: str, tmp_path: Path
) -> None:
    async with ScriptedOllama([SLOW, ANSWER]) as server, asking(redis_url, tmp_path, server) as client:
        settings = GeneratorSettings(redis_url=redis_url, heartbeat=0.2, drain=0.2, ollama_host=server.url)
        remembering = memory_settings(redis_url, tmp_path, server.url, classify="model", classify_timeout=300)
        async with running(respondent(settings), settings), running(memory, remembering):
            await announced(redis_url, "memory")
            said = response("Tell me about Pierre Curie.", "He was a physicist.")
            await client.publish(said)
            await server.wait_until(lambda one: one.streaming == 1, 30)
            user = Client(client.bus, "u1")
            for number in range(7):
                query_id = await user.ask(f"question {number}", "talk")
                await eventually(lambda query_id=query_id: user.types(query_id), 30, "the question is taken up")

                async def answered(query_id: str = query_id) -> bool:
                    return "completed" in await user.types(query_id)

                await eventually(answered, 60, "the question is answered")
            labels = [one for one in server.requests if LABELS in one.body["messages"][0]["content"]]
            answers = [one for one in server.requests if one not in labels]
            assert len(answers) == 7
            # each time the slot was free at once, however often that was
            assert labels[0].outcome == "aborted"
            assert not any(one.outcome == "done" for one in labels)
            # nothing is lost: when nobody asks any more, it is made
            server.set_rules([QUICK, ANSWER])

            async def through() -> bool:
                return await client.bus.backlog(MEMORY_CLASSIFY.stream, "memory") == 0

            await server.wait_until(lambda one: any(r.outcome in ("running", "done") for r in one.requests[-1:]), 60)
            second = await user.ask("the last question", "talk")

            async def last() -> bool:
                return "completed" in await user.types(second)

            await eventually(last, 60, "the last question is answered")
            await eventually(through, 60, "everything has been labelled")
            assert await label_of(client, said.response_id) == "writing"
            assert server.loads == [("gemma4:e4b", 32_000)], "nothing made the server load the model again"
