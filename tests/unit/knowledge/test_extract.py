"""Asking the model: turns that wait together share a call, and one that confuses it does not take the others along."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import orjson

from services.knowledge.claims import Turn
from services.knowledge.extract import MOST_TURNS, Extractor
from services.knowledge.settings import KnowledgeSettings
from shared.llm.port import ChatRequest
from shared.llm.preemption import PreemptibleChatModel
from shared.testing.script import STORIES, Asked, Director, load_script


class Model:
    """Answers when it is let; what it is asked is kept."""

    def __init__(self, *unreadable: int) -> None:
        self.asked: list[str] = []
        self.free = asyncio.Event()
        self._unreadable = unreadable

    async def say(self, request: ChatRequest, *, seconds: float, patience: float, load: float = 0.0) -> str:
        self.asked.append(str(request.messages[1]["content"]))
        await self.free.wait()
        turns = self.asked[-1].count("Turn ")
        if turns in self._unreadable:
            return "no json"
        facts = [
            {"turn": number, "subject": "Anna", "relation": "plays", "object": "chess", "holds": "is"}
            for number in range(1, turns + 1)
        ]
        return orjson.dumps({"facts": facts}).decode()


def extractor(model: Model, folder: Path) -> Extractor:
    settings = KnowledgeSettings(redis_url="redis://nowhere", data_dir=folder)
    return Extractor(cast(PreemptibleChatModel, model), lambda: settings)


def turn(number: int, user: str = "ann") -> Turn:
    return Turn(f"r{number}", user, "s", 1_700_000_000_000, f"Anna plays chess, said {number} times.")


async def asking(found: Extractor, model: Model, turns: list[Turn]) -> list[Any]:
    """Asks for the first alone, and for the others while it is read."""
    tasks = [asyncio.create_task(found.read(turns[0]))]
    while not model.asked:
        await asyncio.sleep(0)
    tasks += [asyncio.create_task(found.read(one)) for one in turns[1:]]
    await asyncio.sleep(0)
    model.free.set()
    return await asyncio.gather(*tasks)


async def test_turns_that_wait_together_are_read_in_one_call(tmp_path: Path) -> None:
    model = Model()
    turns = [turn(number) for number in range(MOST_TURNS + 2)]
    found = await asking(extractor(model, tmp_path), model, turns)
    assert [claims[0].source for claims in found] == [one.source for one in turns]
    assert [asked.count("Turn ") for asked in model.asked] == [1, MOST_TURNS, 1]


async def test_turns_of_two_users_do_not_meet_in_one_prompt(tmp_path: Path) -> None:
    model = Model()
    await asking(extractor(model, tmp_path), model, [turn(0), turn(1), turn(2, "bob"), turn(3)])
    assert [asked.count("Turn ") for asked in model.asked] == [1, 2, 1]


async def test_a_call_that_cannot_be_read_is_made_again_for_each_turn_alone(tmp_path: Path) -> None:
    model = Model(3, 2)
    found = await asking(extractor(model, tmp_path), model, [turn(0), turn(1), turn(2), turn(3)])
    assert [len(claims) for claims in found] == [1, 1, 1, 1]
    model = Model(1)
    assert await asking(extractor(model, tmp_path), model, [turn(0)]) == [None]


class Forgetful(Model):
    """Notes what the first turn of each call says, and nothing of the others."""

    async def say(self, request: ChatRequest, *, seconds: float, patience: float, load: float = 0.0) -> str:
        said = orjson.loads(await super().say(request, seconds=seconds, patience=patience, load=load))
        return orjson.dumps({"facts": said["facts"][:1]}).decode()


async def test_a_turn_of_which_a_shared_call_notes_nothing_is_read_alone_where_the_rules_found_something(
    tmp_path: Path,
) -> None:
    model = Forgetful()
    plain = Turn("r2", "ann", "s", 1_700_000_000_000, "I live in Lyon. Anna plays chess.")
    found = await asking(extractor(model, tmp_path), model, [turn(0), turn(1), plain, turn(3)])
    # the rules say nothing of turn 3 either
    assert [[claim.source for claim in claims] for claims in found] == [["r0"], ["r1"], ["r2"], []]
    assert [asked.count("Turn ") for asked in model.asked] == [1, 3, 1]


class Inventive(Model):
    """Notes what nobody has said."""

    async def say(self, request: ChatRequest, *, seconds: float, patience: float, load: float = 0.0) -> str:
        return (await super().say(request, seconds=seconds, patience=patience, load=load)).replace("chess", "golf")


async def test_facts_of_which_none_stands_in_the_turn_are_no_reading_of_it(tmp_path: Path) -> None:
    model = Inventive()
    assert await asking(extractor(model, tmp_path), model, [turn(0), turn(1)]) == [None, None]


class Scripted(Model):
    """Answers as the stories' scripted model does."""

    async def say(self, request: ChatRequest, *, seconds: float, patience: float, load: float = 0.0) -> str:
        messages = cast(list[dict[str, str]], list(request.messages))
        self.asked.append(messages[1]["content"])
        await self.free.wait()
        director = Director(load_script(STORIES.read_text(encoding="utf-8")))
        return str(director.choose(Asked(request.model, messages, (), think=False, stream=False)).respond.text)


async def test_the_stories_model_overlooks_no_turn_that_waits_beside_another(tmp_path: Path) -> None:
    model = Scripted()
    said = ("Hello.", "My sister Anna lives in Lyon.", "Anna moved to Porto in May.")
    turns = [Turn(f"r{number}", "ann", "s", 1_700_000_000_000, query) for number, query in enumerate(said)]
    _, first, second = await asking(extractor(model, tmp_path), model, turns)
    assert any(claim.object == "Lyon" for claim in first)
    assert any(claim.object == "Porto" for claim in second)
