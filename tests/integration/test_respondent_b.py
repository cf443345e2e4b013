"""The shadow on a real bus beside the generator: it comes second at the model, and can be left out."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from support.services import announced, running
from support.stack import Client, Stage, respondent, stage
from support.waiting import eventually

from services.generator.settings import GeneratorSettings
from shared.contracts import RESPONSE_GENERATION
from shared.participant.sampling import one_in
from shared.records import lanes
from shared.records.journal import EntryType

QUICK = {"when": {"user": "quick"}, "respond": {"text": "At once."}}
SLOW = {"when": {"user": "slow"}, "respond": {"text": "One word after the other", "pace": 0.2}}


@contextlib.asynccontextmanager
async def both(url: str, *rules: Any, **values: Any) -> AsyncIterator[Stage]:
    """A and B at one model server; `values` are settings of B."""
    async with stage(url, rules) as on:
        settings = on.settings.model_dump() | {"respondent_id": "B", "temperature": 0.5, **values}
        async with running(respondent(GeneratorSettings(**settings)), GeneratorSettings(**settings)):
            await announced(url, "respondent-b")
            yield on


async def ask(on: Client, query: str, session: str | None = None) -> str:
    return await on.ask(query, session, respondents=("A", "B"))


async def asked_of(on: Stage, respondent_temperature: float | None) -> list[Any]:
    return [r for r in on.server.requests if r.body["options"].get("temperature") == respondent_temperature]


async def test_the_shadow_begins_when_the_shown_answer_is_complete(redis_url: str) -> None:
    async with both(redis_url, SLOW) as on:
        query_id = await ask(on, "slow please")
        await on.answer(query_id)
        await on.answer(query_id, respondent="B")
        (a,), (b,) = await asked_of(on, None), await asked_of(on, 0.5)
    assert a.ended_at is not None
    assert b.at >= a.ended_at - 0.05


async def test_the_shadow_is_broken_off_for_another_query_and_answers_afterwards(redis_url: str) -> None:
    steady = {"when": {"user": "slow"}, "respond": {"text": "One word after the other", "pace": 0.6}}
    # long enough to be seen by whoever looks every 50 ms
    brief = {"when": {"user": "quick"}, "respond": {"text": "At once.", "delay": 0.5}}
    async with both(redis_url, brief, steady) as on:
        first = await ask(on, "slow please")
        await on.answer(first)
        await eventually(lambda: asked_of(on, 0.5), 5, "the shadow begins")
        second = await ask(on, "quick please")
        await on.answer(second)
        assert await on.answer(first, respondent="B") == "One word after the other"
        tries = [r.outcome for r in await asked_of(on, 0.5) if r.query == "slow please"]
        kinds = await on.types(first, "B")
    assert tries[0] == "aborted"
    assert tries[-1] == "done"
    assert "restarted" in kinds


async def test_a_stack_that_is_always_busy_does_not_keep_the_shadow_from_answering(redis_url: str) -> None:
    async with both(redis_url, SLOW, yield_seconds=0.2) as on:
        hours = {"when": {"user": "hours"}, "respond": {"text": "…", "delay": 30}}
        on.server.set_rules([hours, QUICK])
        endless = await on.ask("hours", "s1")
        await on.seen(endless, EntryType.STATE, action="START_GENERATION")
        query_id = await ask(on, "quick please", "s2")
        assert await on.answer(query_id, respondent="B") == "At once."
        await on.cancel(endless)
        await on.ended(endless)


async def test_a_shadow_that_never_waits_answers_beside(redis_url: str) -> None:
    async with both(redis_url, SLOW, yield_above=None) as on:
        query_id = await ask(on, "slow please")
        await on.answer(query_id)
        await on.answer(query_id, respondent="B")
        (a,), (b,) = await asked_of(on, None), await asked_of(on, 0.5)
    assert a.ended_at is not None
    assert b.at < a.ended_at


async def test_the_shadow_answers_a_sample_and_the_session_goes_on(redis_url: str) -> None:
    async with both(redis_url, QUICK, answer_one_in=2) as on:
        queries = [await ask(on, "quick please", "s1") for _ in range(12)]
        for query_id in queries:
            await on.answer(query_id)
        # one that is left out holds no place in the session either
        while one_in(2, last := await ask(on, "quick please", "s1")):
            await on.answer(last)
        await on.idle("respondent-b")
        assert await lanes.unfinished(on.bus, "s1", "B") == []
        responses = [(r.query_id, r.respondent_id) for r in await on.published(RESPONSE_GENERATION)]
    sample = [query_id for query_id in queries if one_in(2, query_id)]
    assert 0 < len(sample) < 12
    by_b = [query_id for query_id, respondent_id in responses if respondent_id == "B"]
    assert [query_id for query_id in by_b if query_id in queries] == sample


async def test_the_shadow_leaves_queries_out_while_many_wait(redis_url: str) -> None:
    async with both(redis_url, SLOW, leave_out_above=2) as on:
        queries = [await ask(on, "slow please", f"s{n}") for n in range(8)]
        await on.idle("respondent-b", timeout=20)
        for query_id in queries:
            await on.answer(query_id)
        responses = await on.published(RESPONSE_GENERATION)
        late = await ask(on, "slow please", "s1")
        await on.answer(late, respondent="B")
    answered = sum(r.respondent_id == "B" for r in responses)
    assert answered <= 3
