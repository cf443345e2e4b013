"""The judge's tools on the bus: beside grading, and while people's queries keep grading waiting."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from support.services import announced, running
from support.stack import Client
from support.waiting import eventually

from services.critic.service import app
from services.critic.settings import CriticSettings
from services.gateway.http.bus_state import read_bus
from shared.bus import Bus
from shared.contracts import CRITIQUE_RESULT, RESPONSE_GENERATION, TOOL_RESULT, ResponseGeneration
from shared.participant.service import Context, open_context
from shared.participant.settings import Settings
from shared.participant.tool_client import Caller, ToolClient
from shared.testing.model_server import ScriptedModelServer
from shared.testing.script import Script

GRADE = {"when": {"user": "###Score Rubrics"}, "respond": {"text": "Plain and right. [RESULT] 4"}}
PREFERS_GOOD = {"when": {"user": "(?s)###Response A:\\s*good"}, "respond": {"text": "It is right. [RESULT] A"}}
PREFERS_SECOND = {"when": {"user": "###Response B:"}, "respond": {"text": "It is right. [RESULT] B"}}


class Asker(Client):
    def __init__(self, bus: Bus, context: Context[Any], server: ScriptedModelServer) -> None:
        super().__init__(bus)
        self.server = server
        self.context = context
        self._tools = ToolClient(context)

    async def call(self, tool: str, **args: Any) -> Any:
        caller = Caller(query_id="q", user_id="u1", deadline=self.bus.now_ms() + 20_000)
        return await self._tools.call(tool, args, call_id=f"{tool}:{len(args)}", caller=caller, timeout=20, attempt=1)


@contextlib.asynccontextmanager
async def court(url: str, rules: Any, **values: Any) -> AsyncIterator[Asker]:
    common: dict[str, Any] = {"redis_url": url, "heartbeat": 0.2, "drain": 0.2}
    context: Context[Any]
    async with ScriptedModelServer(rules) as server, Bus(url, "test/client") as bus:
        settings = CriticSettings(**common, ollama_host=server.url, **values)
        async with running(app, settings), open_context("asker", Settings(**common)) as context:
            await announced(url, "critic", 1)
            yield Asker(bus, context, server)


async def test_who_asks_the_judge_does_not_wait_behind_what_is_graded_in_the_background(redis_url: str) -> None:
    async with court(redis_url, [GRADE, PREFERS_GOOD, PREFERS_SECOND]) as on:
        # a person waits for an answer: nothing is graded meanwhile, and all that may be held of it is held
        query_id = await on.ask("Is it right?")
        held = ResponseGeneration(
            query_id="1-1", response_id="1-1:A", session_id="s1", user_id="u1", respondent_id="A", generator_id="g",
            query="Is it right?", answer="good", model="m", options={}, finish_reason="stop",
        )  # fmt: skip
        await on.bus.publish(RESPONSE_GENERATION.of(held, correlation_id="1-1"))

        async def taken() -> bool:
            groups = (await read_bus(on.bus)).groups
            return any(
                (one.stream, one.group, one.pending) == (RESPONSE_GENERATION.stream, "critic", 1) for one in groups
            )

        await eventually(taken)
        graded = await on.call("grade_answer", question="Why?", answer="Because.")
        compared = await on.call("compare_answers", question="Why?", answer_a="good", answer_b="bad")
        assert (graded.result, graded.error) == ("Score: 4/5\nPlain and right.", None)
        assert graded.data["score"] == 4
        assert (compared.result, compared.data["winner"]) == ("Winner: A\nIt is right.", "A")
        assert await on.published(CRITIQUE_RESULT) == []
        assert [told.tool for told in await on.published(TOOL_RESULT.for_tool("grade_answer"))] == ["grade_answer"]
        assert query_id
        # models are offered them
        offered = await on.context.registry.tools()
        assert {"grade_answer", "compare_answers"} <= offered.keys()
        assert offered["grade_answer"]["function"]["parameters"]["required"] == ["question", "answer"]


async def test_a_judge_that_is_not_there_is_said_at_once(redis_url: str) -> None:
    script = Script.model_validate({"rules": [], "models": {"another": []}})
    async with court(redis_url, script, yield_rest=0) as on:
        for tool, args in (("grade_answer", {"answer": "x"}), ("compare_answers", {"answer_a": "x", "answer_b": "y"})):
            result = await on.call(tool, question="Why?", **args)
            assert (result.result, result.error) == ("[tool error: judge unavailable]", "judge unavailable")
        wrong = await on.call("grade_answer", question=" ", answer="x", reference="")
        assert "question" in wrong.error
        assert on.server.streaming == 0
