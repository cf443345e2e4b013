"""Work in the background at a model that has others to answer: when it begins, when it is cut, and when no more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import cast

import pytest

from shared.llm.adapter import WiredChatModel
from shared.llm.port import (
    ChatRequest,
    Delta,
    Finish,
    ModelFacts,
    ModelMissing,
    ModelOverloaded,
    TextDelta,
)
from shared.llm.preemption import Preempted, PreemptibleChatModel, PreemptionSettings

ASK = ChatRequest(model="m", messages=[{"role": "user", "content": "label this"}])


class Model:
    """Says its words when it is let; counts the calls that it was asked for and those that were closed early."""

    def __init__(self, slots: int | None = None) -> None:
        self.slots = slots
        self.let = asyncio.Event()
        self.begun = asyncio.Event()
        self.calls = self.cut = 0
        self.errors: list[Exception] = []

    async def stream(self, _request: ChatRequest) -> AsyncIterator[Delta]:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        try:
            yield TextDelta("one ")
            self.begun.set()
            await self.let.wait()
            yield TextDelta("two")
        except (GeneratorExit, asyncio.CancelledError):
            self.cut += 1
            raise
        yield Finish("stop", 1, 2, "m")

    async def facts(self, _model: str) -> ModelFacts:
        return ModelFacts(slots=self.slots)


class Users:
    """How many queries are being answered, and how often somebody looked."""

    def __init__(self, now: int = 0) -> None:
        self.now = now
        self.looks = 0
        self._looked = asyncio.Event()

    async def __call__(self) -> int:
        self.looks += 1
        self._looked.set()
        return self.now

    async def looked_at(self, times: int = 3) -> None:
        until = self.looks + times
        while self.looks < until:
            self._looked.clear()
            await asyncio.wait_for(self._looked.wait(), 20)


def preemptible(model: Model, users: Users, **values: float | None) -> PreemptibleChatModel:
    settings = PreemptionSettings.model_validate({"yield_rest": 0.0, **values})
    return PreemptibleChatModel(cast(WiredChatModel, model), users, lambda: settings)


async def said(model: PreemptibleChatModel, seconds: float = 20.0, patience: float = 0.0) -> str:
    return await model.say(ASK, seconds=seconds, patience=patience)


async def test_a_model_that_has_to_be_loaded_first_has_longer_for_its_first_word_alone() -> None:
    class Cold(Model):
        hangs = False

        async def stream(self, request: ChatRequest) -> AsyncGenerator[Delta, None]:
            await asyncio.sleep(0.5)
            yield TextDelta("loaded")
            if self.hangs:
                await asyncio.Event().wait()

    model = Cold()
    asked = preemptible(model, Users(), yield_above=None)
    assert await asked.say(ASK, seconds=0.3, patience=0, load=60) == "loaded"
    with pytest.raises(TimeoutError):
        await asked.say(ASK, seconds=0.3, patience=0)
    model.hangs = True
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asked.say(ASK, seconds=0.3, patience=0, load=600), 60)


async def test_a_call_waits_until_nobody_waits_for_an_answer() -> None:
    model, users = Model(), Users(1)
    model.let.set()
    saying = asyncio.create_task(said(preemptible(model, users)))
    await users.looked_at()
    assert model.calls == 0
    users.now = 0
    assert await saying == "one two"


async def test_a_call_is_cut_when_somebody_comes_and_made_again_afterwards() -> None:
    model, users = Model(), Users()
    asked = preemptible(model, users)
    saying = asyncio.create_task(said(asked))
    for cuts in range(1, 9):
        await asyncio.wait_for(model.begun.wait(), 20)
        model.begun.clear()
        users.now = 1
        while model.cut < cuts:
            await users.looked_at(1)
        # as long as he waits, nothing is asked of the model
        await users.looked_at()
        assert model.calls == cuts
        users.now = 0
    # however often: somebody who asks on and on does not wait for what nobody waits for
    model.let.set()
    assert await saying == "one two"
    assert asked.yielded == 8


async def test_who_streams_is_told_that_the_call_was_cut() -> None:
    model, users = Model(), Users()
    deltas = preemptible(model, users).stream(ASK)
    assert await anext(deltas) == TextDelta("one ")
    coming = asyncio.ensure_future(anext(deltas))
    users.now = 1
    with pytest.raises(Preempted):
        await asyncio.wait_for(coming, 20)
    assert model.cut == 1


async def test_what_was_put_off_for_long_enough_is_done_and_not_cut_any_more() -> None:
    model, users = Model(), Users(2)
    saying = asyncio.create_task(said(preemptible(model, users, yield_seconds=0.3)))
    await asyncio.wait_for(model.begun.wait(), 20)
    users.now = 5
    await asyncio.sleep(0.2)
    model.let.set()
    assert await saying == "one two"
    assert (model.calls, model.cut) == (1, 0)


async def test_a_call_that_has_begun_in_time_is_not_cut_after_it() -> None:
    model, users = Model(), Users()
    saying = asyncio.create_task(said(preemptible(model, users, yield_seconds=0.3)))
    await asyncio.wait_for(model.begun.wait(), 20)
    await asyncio.sleep(0.4)
    users.now = 5
    await asyncio.sleep(0.2)
    model.let.set()
    assert await saying == "one two"
    assert (model.calls, model.cut) == (1, 0)


async def test_a_request_says_how_long_it_may_still_be_put_off() -> None:
    model, users = Model(), Users(1)
    model.let.set()
    patience = ChatRequest(model="m", messages=[], patience=0.0)
    deltas = [delta async for delta in preemptible(model, users).stream(patience)]
    assert TextDelta("two") in deltas
    assert users.looks == 0


async def test_after_a_query_it_is_quiet_for_a_while_before_a_call_begins() -> None:
    model, users = Model(), Users(1)
    model.let.set()
    asked = preemptible(model, users, yield_rest=1.0)
    clock = asyncio.get_running_loop().time
    saying = asyncio.create_task(said(asked))
    await users.looked_at()
    users.now = 0
    ended = clock()
    assert await saying == "one two"
    assert clock() - ended >= 0.9
    # what comes at once after it has its rest behind it
    looks = users.looks
    assert await said(asked) == "one two"
    assert users.looks - looks < 5


async def test_a_question_in_the_rest_begins_it_anew() -> None:
    model, users = Model(), Users()
    model.let.set()
    clock = asyncio.get_running_loop().time
    saying = asyncio.create_task(said(preemptible(model, users, yield_rest=1.0)))
    await users.looked_at(2)
    users.now = 1
    await users.looked_at(2)
    users.now = 0
    ended = clock()
    await saying
    assert clock() - ended >= 0.9


@pytest.mark.parametrize(
    ("told", "values", "users", "begins"),
    [
        (None, {}, 1, False),
        (1, {}, 1, False),
        (4, {}, 3, True),
        (4, {}, 4, False),
        (None, {"slots": 4}, 3, True),
        # what is set counts over what the server says
        (8, {"slots": 2}, 2, False),
        (None, {"yield_above": 2}, 2, True),
        (None, {"yield_above": None}, 99, True),
        # with room for both there is no rest either
        (4, {"yield_rest": 600}, 1, True),
        (None, {"yield_rest": 600}, 0, False),
    ],
)
async def test_a_server_with_more_slots_has_room_for_more(
    told: int | None, values: dict[str, float | None], users: int, begins: bool
) -> None:
    model, counted = Model(told), Users(users)
    saying = asyncio.create_task(said(preemptible(model, counted, **values)))
    if begins:
        await asyncio.wait_for(model.begun.wait(), 20)
    else:
        await counted.looked_at()
        assert model.calls == 0
    saying.cancel()
    await asyncio.gather(saying, return_exceptions=True)


def test_what_ollama_is_told_of_its_slots_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_NUM_PARALLEL", "3")
    assert PreemptionSettings.load("critic").slots == 3
    monkeypatch.setenv("LOCAL2_CRITIC_SLOTS", "1")
    assert PreemptionSettings.load("critic").slots == 1


async def test_a_model_that_is_away_is_waited_for() -> None:
    model = Model()
    model.let.set()
    model.errors = [ModelOverloaded("busy"), ModelOverloaded("busy")]
    assert await said(preemptible(model, Users()), patience=60) == "one two"
    assert model.calls == 3
    model.errors = [ModelOverloaded("busy")]
    with pytest.raises(ModelOverloaded):
        await said(preemptible(model, Users()), patience=0)
    model.errors = [ModelMissing("not there")]
    with pytest.raises(ModelMissing):
        await said(preemptible(model, Users()), patience=60)


async def test_a_try_has_its_time_and_waiting_for_the_turn_does_not_count() -> None:
    model, users = Model(), Users(1)
    saying = asyncio.create_task(said(preemptible(model, users), seconds=0.3))
    await users.looked_at(4)
    assert model.calls == 0
    users.now = 0
    with pytest.raises(TimeoutError):
        await saying
    assert (model.calls, model.cut) == (1, 1)
