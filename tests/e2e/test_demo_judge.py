"""The real small model as a judge: it judges badly, and nothing breaks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from support.services import announced, running
from support.stack import Client
from support.waiting import eventually

from services.critic.service import app
from services.critic.settings import CriticSettings
from shared.bus import Bus
from shared.contracts import (
    CRITIQUE_RESULT,
    DEAD_LETTER,
    PAIRWISE_RESULT,
    RESPONSE_GENERATION,
    RespondentId,
    ResponseGeneration,
)

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(scope="module")
def model_url() -> Iterator[str]:
    """The demonstration model's server, as a process."""
    argv = [sys.executable, "-m", "services.demo_model", "--host", "127.0.0.1", "--port", "0"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def answered(query_id: str, respondent: RespondentId, query: str, answer: str) -> ResponseGeneration:
    return ResponseGeneration(
        query_id=query_id, response_id=f"{query_id}:{respondent}", session_id="s", user_id="u",
        respondent_id=respondent, generator_id="g", query=query, answer=answer, model="m", finish_reason="stop",
    )  # fmt: skip


async def test_the_pipeline_runs_with_a_small_model_as_judge(
    redis_url: str, model_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # it goes on for as long as it may
    monkeypatch.setattr("services.critic.judge._LONGEST", 48)
    settings = CriticSettings(
        redis_url=redis_url, heartbeat=0.5, ollama_host=model_url, model="smollm2-135m-demo", num_ctx=4096,
        grade_timeout=20, attempts=1, yield_rest=0,
    )  # fmt: skip
    responses = [
        answered("1-1", "A", "What is the capital of France?", "The capital of France is Paris."),
        answered("1-1", "B", "What is the capital of France?", "It is Lyon, I think."),
    ]
    async with Bus(redis_url, "test/judge") as bus, running(app, settings):
        await announced(redis_url, "critic", timeout=20)
        await bus.publish(*(RESPONSE_GENERATION.of(r, correlation_id=r.query_id) for r in responses))

        async def done() -> bool:
            return await bus.backlog(RESPONSE_GENERATION.stream, "critic") == 0

        await eventually(done, 280, "both answers are judged", every=0.2)
        client = Client(bus)
        critiques = await client.published(CRITIQUE_RESULT)
        verdicts = await client.published(PAIRWISE_RESULT)
        assert await bus.link.call("XLEN", DEAD_LETTER.stream) == 0
    assert sorted(c.response_id for c in critiques) == ["1-1:A", "1-1:B"]
    # a grade that is readable, or honestly none; whatever it is, the judge was reached and its words are there
    assert all(c.score in (None, 1, 2, 3, 4, 5) and c.feedback for c in critiques)
    assert not [c.feedback for c in critiques if "model" in c.feedback and "not found" in c.feedback]
    assert len(verdicts) <= 1
    assert all(v.winner in ("A", "B", "tie") and v.forward and v.swapped for v in verdicts)
