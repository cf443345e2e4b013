"""A committee on a real bus: who speaks, what each is told, and what comes of it."""

from __future__ import annotations

from typing import Any

import pytest
from support.stack import stage

from services.generator.committee import load_identities
from shared.contracts import RESPONSE_GENERATION
from shared.records.journal import EntryType


def saying(text: str, **when: Any) -> dict[str, Any]:
    return {"times": 1, **({"when": when} if when else {}), "respond": {"text": text}}


async def test_members_speak_in_turn_and_the_self_who_has_heard_them_answers(redis_url: str) -> None:
    rules = [saying("Doubt one."), saying("Warmth one."), saying("Doubt two."), saying("Warmth two."), saying("So.")]
    async with stage(redis_url, rules, temperature=0.3) as on:
        query_id = await on.ask("Shall I?", "s1", mode="committee", personas=["skeptic", "empath"], rounds=2)
        assert await on.answer(query_id) == "So."
        requests = [request.body for request in on.server.requests]
        journal = await on.journal(query_id)
        (generation,) = await on.published(RESPONSE_GENERATION, query_id)
        assert [turn.answer for turn in await on.turns("s1")] == ["So."]
    identities = load_identities(None)
    prompts = [body["messages"][0]["content"] for body in requests]
    for prompt, persona in zip(prompts, ("skeptic", "empath", "skeptic", "empath"), strict=False):
        assert identities.personas[persona] in prompt
        assert identities.self_identity not in prompt
    # each hears those before
    said = ["Doubt one.", "Warmth one.", "Doubt two.", "Warmth two."]
    for number, prompt in enumerate(prompts):
        assert [text in prompt for text in said] == [n < number for n in range(4)], number
    assert identities.self_identity in prompts[-1]
    assert on.settings.system_prompt in prompts[-1]
    assert on.settings.system_prompt not in prompts[0]
    assert all(body["messages"][-1] == {"role": "user", "content": "Shall I?"} for body in requests)
    assert {body["options"]["temperature"] for body in requests} == {0.3}
    told = [
        (entry.type.value, entry.value()["persona"], entry.value()["round"])
        for entry in journal
        if entry.type in (EntryType.PERSONA_WORKING, EntryType.PERSONA_DONE)
    ]
    assert told == [
        (kind, who, number)
        for number in (1, 2)
        for who in ("skeptic", "empath")
        for kind in ("persona.working", "persona.done")
    ]
    done = [entry.value()["response"] for entry in journal if entry.type is EntryType.PERSONA_DONE]
    assert done == said
    assert [(one.persona, one.response) for one in generation.deliberations] == [
        ("skeptic", "Doubt one."), ("empath", "Warmth one."), ("skeptic", "Doubt two."), ("empath", "Warmth two."),
    ]  # fmt: skip
    assert journal[-1].value()["deliberations"] == [one.model_dump(mode="json") for one in generation.deliberations]


async def test_all_members_speak_when_nobody_is_named_in_as_many_rounds_as_are_set(redis_url: str) -> None:
    async with stage(redis_url, rounds=1) as on:
        query_id = await on.ask("Shall I?", "s1", mode="committee")
        await on.answer(query_id)
        journal = await on.journal(query_id)
    who = [entry.value()["persona"] for entry in journal if entry.type is EntryType.PERSONA_DONE]
    assert who == list(load_identities(None).personas)


async def test_an_unknown_member_is_told_by_its_name(redis_url: str) -> None:
    async with stage(redis_url) as on:
        query_id = await on.ask("Shall I?", mode="committee", personas=["pirate", "empath", "clown"])
        end = await on.ended(query_id)
        assert on.server.requests == []
    assert (end.type, end.value()["code"]) == (EntryType.FAILED, "unknown_persona")
    assert end.value()["message"].startswith("unknown personas: clown, pirate; there are ")


@pytest.mark.parametrize(("tools", "offered"), [(None, []), (["probe"], [])])
async def test_members_are_offered_the_tools_of_memory_only(
    tools: list[str] | None, offered: list[str], redis_url: str
) -> None:
    async with stage(redis_url, probes=1) as on:
        query_id = await on.ask("Shall I?", mode="committee", personas=["skeptic"], rounds=1, tools=tools)
        await on.answer(query_id)
        member, final = (request.body for request in on.server.requests)
    assert [tool["function"]["name"] for tool in member.get("tools", [])] == offered
    assert "probe" in [tool["function"]["name"] for tool in final["tools"]]
