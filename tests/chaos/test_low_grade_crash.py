"""Who takes a query over tells the model the same of its last grade as who died."""

from __future__ import annotations

from pathlib import Path

import orjson
from support.stack import Client, Participants

from shared.bus import Bus
from shared.bus.keys import grade_key
from shared.records.journal import EntryType
from shared.testing.model_server import ScriptedModelServer


async def test_the_same_note_is_told_after_a_crash_whatever_became_of_the_grade(redis_url: str, tmp_path: Path) -> None:
    rules = [
        {"times": 1, "respond": {"text": "First."}},
        {"times": 1, "respond": {"text": "Lost.", "fault": {"kind": "stall", "after": 0}}},
        {"respond": {"text": "Second."}},
    ]
    async with ScriptedModelServer(rules) as server, Bus(redis_url, "test/client") as bus:
        with Participants(redis_url, server.url, tmp_path) as processes:
            for _ in range(2):
                processes.start("generator")
            await processes.ready("generator", 2)
            client = Client(bus)
            first = await client.ask("Why?", "s1")
            await client.answer(first)
            key = grade_key(f"{first}:A")
            await bus.link.call("SET", key, orjson.dumps({"score": 2, "feedback": "Too short."}))
            query_id = await client.ask("And?", "s1")
            await client.seen(query_id, EntryType.NOTICE, code="low_grade")
            await server.wait_until(lambda s: s.streaming == 1)
            await bus.link.call("SET", key, orjson.dumps({"score": 5, "feedback": "Judged again."}))
            (await processes.owner(await client.seen(query_id, EntryType.CLAIMED))).kill()
            assert await client.answer(query_id) == "Second."
            await client.answer(await client.ask("So?", "s1"))
            journal = await client.journal(query_id)
    died, taken_over, later = (request.body["messages"][0]["content"] for request in server.requests[1:])
    assert died == taken_over
    assert "Too short." in died
    assert "graded" not in later
    assert [entry.type for entry in journal].count(EntryType.NOTICE) == 1
