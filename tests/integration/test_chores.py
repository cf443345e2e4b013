"""What a program asks of itself, for a title or tags, comes after every person's question."""

from __future__ import annotations

import pytest
from support.services import announced, running
from support.stack import Client, respondent, stage
from support.waiting import eventually

from services.generator.settings import GeneratorSettings
from shared.bus import Bus
from shared.bus.keys import CHORES
from shared.errors import Fenced
from shared.llm.preemption import background_call
from shared.records.journal import EntryType

# not the same again and again: a model that goes in circles is stopped
WORDS = [f"word{number} " for number in range(500)]
TITLE = {"when": {"user": "a title"}, "respond": {"text": "A title"}}
SLOW_TITLE = {"when": {"user": "a title"}, "respond": {"text": ["A ", *WORDS], "pace": 0.03}}
SLOW = {"when": {"user": "slow"}, "respond": {"text": ["One ", *WORDS[:100]], "pace": 0.02}}


async def chore(client: Client) -> str:
    return await client.ask("a title", messages=[], plain=True)


async def test_a_title_waits_for_a_question_and_keeps_nobody_from_asking(redis_url: str) -> None:
    # one place: a chore that held it would keep the second question out
    async with stage(redis_url, [TITLE, SLOW, {"respond": {"text": "Yes."}}], concurrency=1) as on:
        first = await on.ask("slow")
        await on.seen(first, EntryType.ANSWER)
        titles = [await chore(on), await chore(on)]
        second = await on.ask("and you?")
        assert await on.answer(second, 30) == "Yes."
        assert [await on.answer(title, 30) for title in titles] == ["A title", "A title"]
        asked = [one.body["messages"][-1]["content"] for one in on.server.requests]
        assert asked == ["slow", "and you?", "a title", "a title"]

        async def over() -> bool:
            return await on.bus.link.call("ZCARD", CHORES) == 0

        await eventually(over)


async def test_a_title_gives_way_to_a_question_that_comes(redis_url: str) -> None:
    async with stage(redis_url, [SLOW_TITLE, SLOW]) as on:
        title = await chore(on)
        await on.seen(title, EntryType.ANSWER)
        assert (await on.answer(await on.ask("slow"))).startswith("One ")
        # what had been said of it is void
        await on.seen(title, EntryType.RESTARTED)
        on.server.set_rules([TITLE])
        await on.server.wait_until(lambda server: len(server.requests) >= 3, 30)
        assert on.server.requests[0].outcome == "aborted"
        await on.cancel(title)
        await on.ended(title)


async def test_a_title_alone_is_made_at_once(redis_url: str) -> None:
    # nobody rests for it: whoever reads an answer may be waiting for it
    async with stage(redis_url, [TITLE], yield_rest=600) as on:
        assert await on.answer(await chore(on)) == "A title"


async def test_a_title_that_was_taken_over_stays_a_chore_when_its_first_owner_wakes_up(bus: Bus) -> None:
    later = bus.now_ms() + 60_000

    async def wakes_up() -> None:
        async with background_call(bus, "1-0", later), background_call(bus, "2-0", later):
            raise Fenced("it was taken over")

    with pytest.raises(Fenced):
        await wakes_up()
    async with background_call(bus, "2-0", later):
        pass
    assert await bus.link.call("ZRANGE", CHORES, 0, -1) == [b"1-0"]


async def test_a_shadow_that_passes_a_title_by_leaves_it_a_chore(redis_url: str) -> None:
    # it would wait for itself, as for a question
    async with stage(redis_url, [SLOW_TITLE]) as on:
        shadow = GeneratorSettings(**on.settings.model_dump() | {"respondent_id": "B"})
        async with running(respondent(shadow), shadow):
            await announced(redis_url, "respondent-b")
            title = await chore(on)
            await on.idle("respondent-b")
            await on.seen(title, EntryType.ANSWER)
            assert await on.bus.link.call("ZRANGE", CHORES, 0, -1) == [title.encode()]
            await on.cancel(title)
            await on.ended(title)
