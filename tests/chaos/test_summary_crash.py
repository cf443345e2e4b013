"""A summary whose generator is killed is made by another one, once."""

from __future__ import annotations

from pathlib import Path

from support.stack import Client, Participants
from support.waiting import eventually

from shared.bus import Bus
from shared.contracts import SESSION_SUMMARISE
from shared.records.summaries import Summaries, Summary
from shared.testing.model_server import ScriptedModelServer

LONG = "word " * 480


async def test_a_summary_is_made_once_though_its_maker_dies(redis_url: str, tmp_path: Path) -> None:
    about = {"system": "running summary"}
    rules = [
        {"name": "lost", "when": about, "times": 1, "respond": {"text": "x", "fault": {"kind": "stall", "after": 0}}},
        {"name": "made", "when": about, "respond": {"text": "They counted."}},
        {"respond": {"text": "I see."}},
    ]
    settings = {"num_ctx": 4_096, "yield_rest": 0}
    async with ScriptedModelServer(rules) as server, Bus(redis_url, "test/client") as bus:
        with Participants(redis_url, server.url, tmp_path) as processes:
            makers = [processes.start("generator", **settings)]
            await processes.ready("generator", 1)
            client = Client(bus)
            for _ in range(12):
                await client.answer(await client.ask(LONG, "s1"))
                # it stays there as long as it is not made
                if await bus.backlog(SESSION_SUMMARISE.stream, "generator"):
                    break
            await server.wait_until(lambda s: any(r.rule == "lost" for r in s.requests), 15)
            makers[0].kill()
            processes.start("generator", **settings)
            found = await eventually(lambda: Summaries(bus).read("s1"), 30, "a summary")

            async def done() -> bool:
                return await bus.backlog(SESSION_SUMMARISE.stream, "generator") == 0

            await eventually(done)
    assert isinstance(found, Summary)
    assert found.text == "They counted."
    assert [r.rule for r in server.requests if r.rule in ("lost", "made")] == ["lost", "made"]
