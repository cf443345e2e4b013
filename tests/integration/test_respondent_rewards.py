"""Respondents hear of their rewards: each vote once, the last one on an answer, also those cast while nobody ran."""

from __future__ import annotations

import asyncio
from typing import Any

from support.proxy import Proxy
from support.services import running
from support.stack import Stage, respondent, stage
from support.waiting import eventually

from services.generator.rewards import Rewards
from services.generator.settings import GeneratorSettings
from shared.bus import Bus
from shared.contracts import MEMORY_FORGET, REWARD_EVENT, RespondentId, RewardEvent
from shared.participant.registry import Registry

CONFIG = {"model": "m1", "options": {"temperature": 0.5}, "prompt_version": "abc"}


def event(number: int, reward: float, vote: int, respondent_id: RespondentId = "A", **fields: Any) -> RewardEvent:
    values: dict[str, Any] = {
        "query_id": f"{number}-1", "response_id": f"{number}-1:{respondent_id}", "respondent_id": respondent_id,
        "reward": reward, "source": "thumbs", "config": CONFIG, "intent": "question", "vote_id": f"{vote}-0",
    }  # fmt: skip
    return RewardEvent(**{**values, **fields})


async def publish(bus: Bus, *events: RewardEvent) -> None:
    await bus.publish(*(REWARD_EVENT.of(one) for one in events))


async def shown(on: Stage, participant: str = "generator") -> list[list[dict[str, Any]]]:
    """What each replica says in the registry."""
    return [info.facts.get("rewards", []) for info in await Registry(on.bus, 0.0).live(participant)]


async def told(on: Stage, *wanted: tuple[int, float], participant: str = "generator") -> None:
    """Waits until every replica shows these counts and means."""

    async def same() -> bool:
        found = await shown(on, participant)
        return bool(found) and all([(row["count"], row["mean"]) for row in rows] == list(wanted) for rows in found)

    await eventually(same, 10, f"rewards {wanted}")


async def test_votes_are_counted_by_configuration_and_intent_once_however_many_replicas(redis_url: str) -> None:
    async with stage(redis_url, replicas=2) as on:
        await publish(on.bus, event(1, 1.0, 1), event(2, -1.0, 2), event(3, 0.5, 3, intent="code"))
        # the other respondent's, and one that came twice
        await publish(on.bus, event(4, -1.0, 4, "B"), event(1, 1.0, 1))
        await told(on, (2, 0.0), (1, 0.5))
        (rows, again) = await shown(on)
    assert rows == again
    assert (rows[0]["config"], rows[0]["intent"], rows[1]["intent"]) == (CONFIG, "question", "code")


async def test_a_connection_that_breaks_meanwhile_is_no_fault_of_whoever_follows(redis_url: str) -> None:
    async with Proxy(redis_url) as proxy, Bus(proxy.url, "test/far") as bus:
        rewards = Rewards(bus, "generator", "A", 60)
        await rewards.position()
        proxy.freeze()
        serving = asyncio.create_task(rewards.serve())
        # so that it is on its way
        await asyncio.sleep(0.05)
        proxy.cut()
        proxy.thaw()
        await asyncio.wait_for(serving, 60)


async def test_the_last_vote_on_an_answer_counts(redis_url: str) -> None:
    async with stage(redis_url) as on:
        await publish(on.bus, event(1, 1.0, 10), event(2, 1.0, 11))
        await told(on, (2, 1.0))
        await publish(on.bus, event(1, -1.0, 12), event(2, -1.0, 9))
        await told(on, (2, 0.0))
        # an answer that turns out to be of another kind leaves nothing of the first one behind
        await publish(on.bus, event(1, 0.5, 13, intent="code"), event(2, 0.5, 14, intent="code"))
        await told(on, (2, 0.5))
        # one that is withdrawn counts no more, also when it comes again, and can be given anew
        gone = event(1, 0.0, 16, withdrawn=True)
        await publish(on.bus, gone, event(1, 1.0, 15), gone)
        await told(on, (1, 0.5))
        await publish(on.bus, event(1, -0.5, 17, intent="code"))
        await told(on, (2, 0.0))


async def test_votes_cast_while_no_respondent_ran_are_counted_later(redis_url: str) -> None:
    async with stage(redis_url) as on:
        await publish(on.bus, event(1, 1.0, 1))
        await told(on, (1, 1.0))
    async with Bus(redis_url, "test/away") as bus:
        # another reader of the stream has finished everything, and the stream is trimmed
        await bus.link.call("XGROUP", "CREATE", REWARD_EVENT.stream, "memory", "$")
        await publish(bus, event(2, -1.0, 2))
        await bus.link.call("XGROUP", "SETID", REWARD_EVENT.stream, "memory", "$")
        await bus.trim(REWARD_EVENT)
        await bus.trim(MEMORY_FORGET)
    async with stage(redis_url) as on:
        await told(on, (2, 0.0))
        # what has been counted is not kept for it
        await on.bus.trim(REWARD_EVENT)
        assert await on.bus.link.call("XLEN", REWARD_EVENT.stream) == 0


async def test_the_shadow_counts_its_own(redis_url: str) -> None:
    async with stage(redis_url) as on:
        settings = GeneratorSettings(**on.settings.model_dump() | {"respondent_id": "B"})
        async with running(respondent(settings), settings):
            await publish(on.bus, event(1, 1.0, 1, "B"), event(1, -1.0, 2))
            await told(on, (1, -1.0))
            await told(on, (1, 1.0), participant="respondent-b")


async def test_a_malformed_event_is_passed_over(redis_url: str) -> None:
    async with stage(redis_url) as on:
        await on.bus.link.call("XADD", REWARD_EVENT.stream, "*", "payload", "{}")
        await publish(on.bus, event(1, 1.0, 1))
        await told(on, (1, 1.0))


async def test_so_many_kinds_are_told_apart_and_the_rest_is_one(redis_url: str) -> None:
    async with Bus(redis_url, "test/kinds") as bus:
        rewards = Rewards(bus, "generator", "A", 60)
        await rewards.position()
        await publish(bus, *(event(n, 1.0, n, config={"model": f"m{n}"}) for n in range(1, 411)))
        for entry in await bus.range(REWARD_EVENT.stream):
            await rewards.count(entry)
        rows = await rewards.statistics()
        kinds = await bus.link.call("HLEN", "local2:rewards:{local2:reward.event}:A:counts")
    assert (rows[0]["intent"], rows[0]["count"], kinds) == ("other", 10, 401)
