"""Reading turns by a model: one call for each turn, one call at a time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import orjson
import pytest

from services.knowledge.claims import Turn
from services.knowledge.extract import Extractor
from services.knowledge.settings import KnowledgeSettings
from shared.llm.port import ChatRequest
from shared.llm.preemption import PreemptibleChatModel
from shared.testing.script import STORIES, Asked, Director, load_script


class Model:
    """Answers with one fact; keeps the prompts, and the highest number of calls at a time."""

    def __init__(self, answer: str = "") -> None:
        self.asked: list[str] = []
        self.most = self._running = 0
        fact = {"subject": "Anna", "relation": "plays", "object": "chess", "holds": "is"}
        self._answer = answer or orjson.dumps({"facts": [fact]}).decode()

    async def say(self, request: ChatRequest, *, seconds: float, patience: float, load: float = 0.0) -> str:
        self._running += 1
        self.most = max(self.most, self._running)
        messages = cast(list[dict[str, str]], list(request.messages))
        self.asked.append(messages[1]["content"])
        await asyncio.sleep(0)
        self._running -= 1
        return self.answer(request.model, messages)

    def answer(self, _model: str, _messages: list[dict[str, str]]) -> str:
        return self._answer


class Scripted(Model):
    """Answers as the stories' scripted model does."""

    def answer(self, model: str, messages: list[dict[str, str]]) -> str:
        director = Director(load_script(STORIES.read_text(encoding="utf-8")))
        return str(director.choose(Asked(model, messages, (), think=False, stream=False)).respond.text)


def extractor(model: Model, folder: Path) -> Extractor:
    settings = KnowledgeSettings(redis_url="redis://nowhere", data_dir=folder)
    return Extractor(cast(PreemptibleChatModel, model), lambda: settings)


def turn(number: int, query: str = "") -> Turn:
    return Turn(f"r{number}", "ann", "s", 1_700_000_000_000, query or f"Anna plays chess, said {number} times.")


async def test_extractor_reads_each_turn_in_a_call_of_its_own(tmp_path: Path) -> None:
    model = Model()
    reader = extractor(model, tmp_path)
    found = await asyncio.gather(*(reader.read(turn(number)) for number in range(5)))
    assert [[claim.source for claim in claims or ()] for claims in found] == [[f"r{number}"] for number in range(5)]
    assert [asked.count("User: ") for asked in model.asked] == [1] * 5
    assert model.most == 1


@pytest.mark.parametrize(
    "answer",
    ["no json", '{"facts": [{"subject": "Anna", "relation": "plays", "object": "golf"}]}'],
    ids=["no JSON", "invented"],
)
async def test_unusable_answer_is_no_reading(answer: str, tmp_path: Path) -> None:
    assert await extractor(Model(answer), tmp_path).read(turn(0)) is None


async def test_empty_answer_is_a_reading_without_claims(tmp_path: Path) -> None:
    assert await extractor(Model('{"facts": []}'), tmp_path).read(turn(0)) == []


async def test_stories_model_reads_the_turns_of_s10(tmp_path: Path) -> None:
    reader = extractor(Scripted(), tmp_path)
    first, second = (
        await reader.read(turn(1, "My sister Anna lives in Lyon.")),
        await reader.read(turn(2, "Anna moved to Porto in May.")),
    )
    assert any(claim.object == "Lyon" for claim in first or ())
    assert any(claim.object == "Porto" for claim in second or ())
