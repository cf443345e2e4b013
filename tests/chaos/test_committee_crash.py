"""A committee goes on where its generator died: members who have spoken are not asked again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from support.stack import Client, Participants

from shared.bus import Bus
from shared.contracts import RESPONSE_GENERATION
from shared.records.journal import EntryType
from shared.testing.model_server import ScriptedModelServer


def saying(text: str, **respond: Any) -> dict[str, Any]:
    return {"name": text, "times": 1, "respond": {"text": text, **respond}}


async def test_a_committee_continues_after_the_last_member_who_has_spoken(redis_url: str, tmp_path: Path) -> None:
    rules = [
        saying("The skeptic doubts."),
        saying("Lost.", fault={"kind": "stall", "after": 0}),
        saying("The empath feels."),
        saying("So be it."),
    ]
    async with ScriptedModelServer(rules) as server, Bus(redis_url, "test/client") as bus:
        with Participants(redis_url, server.url, tmp_path) as processes:
            for _ in range(2):
                processes.start("generator")
            await processes.ready("generator", 2)
            client = Client(bus)
            query_id = await client.ask("Shall I?", "s1", mode="committee", personas=["skeptic", "empath"])
            await client.seen(query_id, EntryType.PERSONA_DONE, persona="Skeptic")
            await server.wait_until(lambda s: s.streaming == 1)
            (await processes.owner(await client.seen(query_id, EntryType.CLAIMED))).kill()
            assert await client.answer(query_id) == "So be it."
            journal = await client.journal(query_id)
            (generation,) = await client.published(RESPONSE_GENERATION, query_id)
    assert [request.rule for request in server.requests] == [rule["name"] for rule in rules]
    assert Counter(
        (entry.type.value, entry.value()["persona"])
        for entry in journal
        if entry.type in (EntryType.PERSONA_WORKING, EntryType.PERSONA_DONE)
    ) == Counter([(kind, who) for who in ("Skeptic", "Empath") for kind in ("persona.working", "persona.done")])
    assert [(said.persona, said.response) for said in generation.deliberations] == [
        ("Skeptic", "The skeptic doubts."),
        ("Empath", "The empath feels."),
    ]
    assert journal[-1].value()["deliberations"] == [said.model_dump(mode="json") for said in generation.deliberations]
