"""`local2 eval answers` against a stack whose model and judge are scripted."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.backups import Place
from support.http_gateway import gateway_settings, serving
from support.services import announced, running
from support.stack import stage

from services.critic.service import app as critic_app
from services.critic.settings import CriticSettings


def says(text: str, **when: str) -> dict[str, Any]:
    return {"when": when, "respond": {"text": text}}


RULES = [
    says("It is right. [RESULT] A", user=r"(?s)###Response A:\s*good"),
    says("It is right. [RESULT] B", user=r"(?s)###Response B:\s*good"),
    # one that likes what stands first
    says("It is first. [RESULT] A", user=r"(?s)###Response A:\s*same"),
    says("Hm.", user="###Response A:"),
    says("Fair. [RESULT] 3", user="###Score Rubrics"),
    # the whole system has instructions, its model alone has none
    says("good", user="capital", system="Today's date"),
    says("bad", user="capital"),
    says("bad", user="colour", system="Today's date"),
    says("good", user="colour"),
    says("same", user="taste"),
    says("who knows", user="riddle"),
]


@pytest.fixture
async def stack(redis_url: str, tmp_path: Path) -> AsyncIterator[Place]:
    async with stage(redis_url, RULES) as on, serving(gateway_settings(redis_url, tmp_path)) as site:
        critic = CriticSettings(redis_url=redis_url, heartbeat=1.0, drain=0.2, ollama_host=on.server.url, yield_rest=0)
        async with running(critic_app, critic):
            await announced(redis_url, "critic")
            yield Place(site, on)


def questions(folder: Path, *lines: dict[str, str]) -> str:
    path = folder / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


CAPITAL = {"question": "Which is the capital?", "kind": "facts", "reference": "The right one."}
COLOUR = {"question": "Which colour?", "kind": "facts"}
TASTE = {"question": "A matter of taste?", "kind": "opinions"}
RIDDLE = {"question": "A riddle?", "kind": "opinions"}


async def test_the_whole_system_is_compared_with_its_model_alone_and_nothing_is_left(
    stack: Place, tmp_path: Path
) -> None:
    file = questions(tmp_path, CAPITAL, COLOUR, TASTE, RIDDLE)
    done = await stack.local2("eval", "answers", file, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output.splitlines()[-1])
    assert [(one["question"], one["outcome"]) for one in found["verdicts"]] == [
        (CAPITAL["question"], "won"),
        (COLOUR["question"], "lost"),
        (TASTE["question"], "tied"),
        (RIDDLE["question"], "failed"),
    ]
    assert "cannot be read" in found["verdicts"][3]["why"]
    assert (found["kinds"]["facts"]["share"], found["kinds"]["all"]["failed"]) == (0.5, 1)
    assert (await stack.site.http.get("/sessions")).json()["sessions"] == []
    # the judge alone is told what is right
    told = [json.dumps(request.body["messages"]) for request in stack.stage.server.requests]
    assert {"###Response A:" in text for text in told if "The right one." in text} == {True}


async def test_the_table_is_printed_with_intervals_and_as_many_questions_as_are_wanted(
    stack: Place, tmp_path: Path
) -> None:
    done = await stack.local2("eval", "answers", questions(tmp_path, CAPITAL, RIDDLE), "--limit", "1")
    assert done.exit_code == 0, done.output
    for part in ("1/1 won", "facts", "100%", "21% – 100%"):
        assert part in done.output, done.output
    assert "2/" not in done.output


async def test_nothing_that_could_be_compared_is_a_failure(stack: Place, tmp_path: Path) -> None:
    done = await stack.local2("eval", "answers", questions(tmp_path, RIDDLE))
    assert done.exit_code == 1
    assert "1/1 failed: " in done.output
    refused = await stack.local2("eval", "answers", questions(tmp_path, RIDDLE), key="nobody's")
    assert refused.exit_code == 1
    assert "the key is taken from" in refused.output
    # without having asked anything
    assert "1/1" not in refused.output
