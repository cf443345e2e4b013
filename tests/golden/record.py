"""Record journals of real runs, and what clients get of them: `python tests/golden/record.py [NAME ...]`.

Each scenario runs the generator at the scripted model. With `--outputs` the journals stay, and only the outputs are
recorded again. With `--show NAME OUTPUT` an output is printed whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from golden.replaying import JOURNALS, Recorded, Replay, dump, load
from support.http_gateway import gateway_settings, serving
from support.made_files import pdf, png
from support.redis_servers import unsynced
from support.services import announced, running
from support.stack import Stage, respondent, stage
from support.waiting import eventually

from services.critic.service import app as critic
from services.critic.settings import CriticSettings
from services.generator.settings import GeneratorSettings
from services.memory.service import app as memory
from services.memory.settings import MemorySettings
from services.reward.service import app as reward
from services.reward.settings import RewardSettings
from shared.bus import Bus
from shared.bus.keys import grade_key, journal_key
from shared.contracts import USER_FEEDBACK, ClientTools, UserFeedback
from shared.records.journal import EntryType
from shared.telemetry.logging import configure
from shared.testing.script import Script

Rule = dict[str, Any]
PROBE = {"name": "probe", "args": {"text": "<<query>>"}}
DONE: Rule = {"respond": {"thinking": "Now I know.", "text": "It is done, at last."}}
LOOKING = {"thinking": "I should look.", "text": "One moment. ", "tool_calls": [PROBE]}


def calling(*calls: Rule, **respond: Any) -> Rule:
    return {"when": {"tool_results": 0}, "respond": {"tool_calls": list(calls), **respond}}


class Scenario:
    """A Redis of its own; `answered` runs one question at a stage with such rules."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder

    async def answered(self, rules: Any = (), query: str = "ping", *, probes: int = 0, **given: Any) -> str:
        """The id of a query that has ended; `given`: `stage` for settings, the rest is the question's."""
        values = given.pop("stage", {})
        async with stage(self.url, rules, probes=probes, **values) as on:
            query_id = await on.ask(query, "s1", **given)
            await on.ended(query_id)
            await on.idle()
            return query_id


Run = Callable[[Scenario], Awaitable[str]]


async def plain(on: Scenario) -> str:
    return await on.answered([{"respond": {"text": "Paris is the capital of France."}}])


async def thinking(on: Scenario) -> str:
    return await on.answered([{"respond": {"thinking": "Let me think about it.", "text": ["So", " it is.\n\n", "Ä"]}}])


async def tools(on: Scenario) -> str:
    """Text before calls, two rounds, an error, an unknown tool."""
    failing = {"name": "probe", "args": {"text": "bad", "fail": "it broke"}}
    again = {"respond": {"text": "Once more.", "thinking": "Hm.", "tool_calls": [{"name": "nothing", "args": {}}]}}
    rules = [
        {"when": {"tool_results": 0}, "respond": {**LOOKING, "tool_calls": [PROBE, failing]}},
        {**again, "times": 1},
        DONE,
    ]
    return await on.answered(rules, probes=1)


async def large_result(on: Scenario) -> str:
    large = {"name": "probe", "args": {"text": "much", "size": 70_000}}
    return await on.answered([calling(large, PROBE), DONE], probes=1, stage={"num_ctx": 500_000})


async def client_tools(on: Scenario) -> str:
    function = {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}}
    call = {"name": "weather", "args": {"city": "Paris"}}
    rules = [calling(PROBE, call, text="Both.", thinking="Both, I think."), DONE]
    offered = ClientTools(functions=[{"type": "function", "function": function}])
    return await on.answered(rules, probes=1, client_tools=offered)


async def committee(on: Scenario) -> str:
    names = ["Doubt one.", "Warmth one.", "Doubt two.", "Warmth two."]
    rules: list[Rule] = [{"times": 1, "respond": {"text": one, "thinking": "hm"}} for one in names]
    asked = {"mode": "committee", "personas": ["skeptic", "empath"], "rounds": 2}
    return await on.answered([*rules, calling(PROBE, text="A look. "), DONE], probes=1, **asked)


async def committee_at_once(on: Scenario) -> str:
    cut = {"times": 1, "respond": {"text": "one two three four", "pace": 0.02, "fault": {"kind": "cut", "after": 3}}}
    rules = [{"when": {"system": "=== INNER COMMITTEE"}, "respond": {"text": "So."}}, cut, {"respond": {"text": "No."}}]
    asked = {"mode": "committee", "personas": ["skeptic", "empath"], "rounds": 1}
    return await on.answered(rules, stage={"parallel": True}, **asked)


async def broken_off(on: Scenario) -> str:
    """The connection to the model breaks in the second round; its text begins again in the same way."""
    text = "one two three four five six seven"
    cut = {"thinking": "hm hm", "text": text, "pace": 0.03, "fault": {"kind": "cut", "after": 5}}
    rules = [
        calling(PROBE, text="I look."),
        {"times": 1, "respond": cut},
        {"respond": {"thinking": "hm", "text": text}},
    ]
    return await on.answered(rules, probes=1)


async def broken_off_twice(on: Scenario) -> str:
    """The text begins again in other words."""
    cut = {"text": "one two three four", "pace": 0.03, "fault": {"kind": "cut", "after": 3}}
    other = {"text": "one two and more", "pace": 0.03, "fault": {"kind": "no_done", "after": 3}}
    rules = [{"times": 1, "respond": cut}, {"times": 1, "respond": other}, {"respond": {"text": "Quite another one."}}]
    return await on.answered(rules)


async def half_written(on: Stage, query_id: str, claims: int) -> bool:
    kinds = await on.types(query_id)
    return kinds[-1] == "answer" and kinds.count("claimed") == claims


async def takeover(on: Scenario) -> str:
    """A second replica goes on after a tool call, in the middle of the text; it is stopped, a third one goes on."""
    stalled = {"thinking": "Now I", "text": "It is done, but", "pace": 0.03, "fault": {"kind": "stall", "after": 4}}
    first = [calling(PROBE, text="One moment. "), {"respond": stalled}]
    query_id = ""
    for claims in (1, 2):
        async with stage(on.url, first, probes=1) as one:
            query_id = query_id or await one.ask("ping", "s1")
            await one.server.wait_until(lambda server: len(server.requests) > 0 and server.requests[-1].chunks >= 4)
            await eventually(partial(half_written, one, query_id, claims), what="text is written")
    async with stage(on.url, [DONE], probes=1) as last:
        await last.answer(query_id)
        await last.idle()
    return query_id


async def loop_cut_back(on: Scenario) -> str:
    text = "It is Paris.\n" + "I am not quite sure about that. " * 2_000
    return await on.answered([{"respond": {"text": text, "thinking": "hm"}}])


async def cancelled(on: Scenario) -> str:
    hold = {
        "thinking": "let me think",
        "text": "one two three four",
        "pace": 0.01,
        "fault": {"kind": "stall", "after": 5},
    }
    async with stage(on.url, [calling(PROBE, text="Wait. "), {"respond": hold}], probes=1) as one:
        query_id = await one.ask("hold", "s1")
        await one.server.wait_until(lambda server: len(server.requests) == 2 and server.requests[1].chunks == 5)
        await asyncio.sleep(0.2)
        await one.cancel(query_id)
        await one.ended(query_id)
        await one.idle()
        return query_id


async def cancelled_in_committee(on: Scenario) -> str:
    stalled = {"respond": {"text": "one two three", "fault": {"kind": "stall", "after": 2}}}
    async with stage(on.url, [{"times": 1, "respond": {"text": "I doubt it."}}, stalled]) as one:
        query_id = await one.ask("Shall I?", "s1", mode="committee", personas=["skeptic", "empath"])
        await one.seen(query_id, EntryType.ANSWER, persona="Empath")
        await one.cancel(query_id)
        await one.ended(query_id)
        await one.idle()
        return query_id


async def failed(on: Scenario) -> str:
    return await on.answered([calling(PROBE), {"respond": {"status": 400, "error": "invalid option: foo"}}], probes=1)


async def deadline(on: Scenario) -> str:
    slow = {"thinking": "hm", "text": "one two three four", "pace": 0.05, "fault": {"kind": "stall", "after": 4}}
    return await on.answered([{"respond": slow}], deadline=1.0)


async def empty_answer(on: Scenario) -> str:
    return await on.answered([{"respond": {"text": ""}}], probes=1)


async def empty_at_first(on: Scenario) -> str:
    rules = [{"when": {"any_tools": True}, "respond": {"thinking": "hm", "text": ""}}, DONE]
    return await on.answered(rules, probes=1)


async def length(on: Scenario) -> str:
    return await on.answered([{"respond": {"text": "It is", "done_reason": "length"}}])


async def context_truncated(on: Scenario) -> str:
    async with stage(on.url, num_ctx=1_500, compact=False) as one:
        for number in range(4):
            await one.answer(await one.ask(f"{number}" + "x" * 900, "s1"))
        query_id = await one.ask("last", "s1")
        await one.answer(query_id)
        await one.idle()
        return query_id


async def halved_history(on: Scenario) -> str:
    async with stage(on.url) as one:
        for number in range(5):
            await one.answer(await one.ask(f"turn {number}", "s1"))
        overflow = {"times": 2, "respond": {"status": 400, "error": "the prompt exceeds the context length"}}
        one.server.set_rules([overflow, DONE])
        query_id = await one.ask("last", "s1")
        await one.answer(query_id)
        await one.idle()
        return query_id


async def without_tools(on: Scenario) -> str:
    script = Script.model_validate({"rules": [{"respond": {"text": "Alone."}}], "models": {"gemma4:e4b": ["thinking"]}})
    return await on.answered(script, probes=1)


async def attachments(on: Scenario) -> str:
    """A blind model: of an image only its name is sent again."""
    models = {"gemma4:e4b": ["tools", "thinking"], "seeing": ["tools", "vision"], "nomic-embed-text": ["embedding"]}
    script = Script.model_validate({"models": models, "rules": [{"respond": {"text": "I have read it."}}]})
    async with stage(on.url, script, num_ctx=16_000) as one:
        own = MemorySettings(redis_url=on.url, heartbeat=0.5, drain=0.5, data_dir=on.folder, ollama_host=one.server.url)
        async with running(memory, own), serving(gateway_settings(on.url, on.folder)) as site:
            await announced(on.url, "memory")
            ids = []
            for name, data in {
                "photo.png": png(3, 2),
                "paper.pdf": pdf("Water them."),
                "notes.md": b"# Notes\n",
            }.items():
                made = await site.http.post("/files", params={"name": name}, content=data)
                ids.append(made.json()["id"])

            async def read() -> bool:
                found = (await site.http.get("/files")).json()["files"]
                return all(file["state"] != "reading" for file in found)

            await eventually(read, 20)
            asked = {"query": "what is it?", "session_id": "s1", "attachments": ids, "model": "seeing"}
            assert (await site.http.post("/query", json=asked)).status_code == 200
            found = await site.http.post("/query", json={"query": "and now?", "session_id": "s1"})
            return str(found.json()["query_id"])


async def low_grade(on: Scenario) -> str:
    async with stage(on.url) as one:
        first = await one.ask("Why?", "s1")
        await one.answer(first)
        grade = b'{"score":2,"feedback":"It does not say why.","rubric":"realistic","attempts":1}'
        await one.bus.link.call("SET", grade_key(f"{first}:A"), grade)
        query_id = await one.ask("Thanks.", "s1")
        await one.answer(query_id)
        await one.idle()
        return query_id


async def judged(on: Scenario) -> str:
    """Critique, pairwise verdict and two votes, in whatever order they come."""
    rules: list[Rule] = [
        {"when": {"user": "(?s)###Response A:\\s*Well"}, "respond": {"text": "Warm. [RESULT] A"}},
        {"when": {"user": "(?s)###Response B:\\s*Well"}, "respond": {"text": "Warm. [RESULT] B"}},
        {"when": {"user": "###Score Rubrics"}, "respond": {"text": "Right. [RESULT] 3"}},
        {"when": {"model": "shadow"}, "respond": {"text": "Well: <<query>>"}},
        {"respond": {"text": "Plain: <<query>>"}},
    ]
    common: dict[str, Any] = {"redis_url": on.url, "heartbeat": 0.5, "drain": 0.5, "data_dir": on.folder}
    async with stage(on.url, rules) as one, contextlib.AsyncExitStack() as stack:
        b = GeneratorSettings(**one.settings.model_dump() | {"respondent_id": "B", "model": "shadow"})
        judge = CriticSettings(**common, ollama_host=one.server.url, model="judge")
        for service, own in ((respondent(b), b), (critic, judge), (reward, RewardSettings(**common))):
            await stack.enter_async_context(running(service, own))
        for name in ("respondent-b", "critic", "reward"):
            await announced(on.url, name)
        query_id = await one.ask("Why?", "s1", respondents=("A", "B"))
        await one.answer(query_id)
        await one.seen(query_id, EntryType.CRITIQUE, 30)
        await one.seen(query_id, EntryType.PAIRWISE, 30)
        for sentiment in ("positive", "negative"):
            vote = UserFeedback(query_id=query_id, session_id="s1", user_id=one.user, sentiment=sentiment)
            await one.bus.publish(USER_FEEDBACK.of(vote, correlation_id=query_id, session_id="s1", user_id=one.user))
            await one.seen(query_id, EntryType.REWARD, 30, sentiment=sentiment)
        return query_id


async def schema(on: Scenario) -> str:
    form = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    rules = [{"times": 1, "respond": {"text": "no object"}}, {"respond": {"text": '{"city": "Paris"}'}}]
    return await on.answered(rules, answer_schema=form)


SCENARIOS: dict[str, Run] = {
    run.__name__: run
    for run in (
        plain, thinking, tools, large_result, client_tools, committee, committee_at_once, broken_off, broken_off_twice,
        takeover, loop_cut_back, cancelled, cancelled_in_committee, failed, deadline, empty_answer, empty_at_first,
        length, context_truncated, halved_history, without_tools, attachments, low_grade, judged, schema,
    )
}  # fmt: skip


@contextlib.asynccontextmanager
async def place() -> AsyncIterator[Scenario]:
    with tempfile.TemporaryDirectory() as folder, unsynced(Path(folder) / "redis") as server:
        yield Scenario(server.url, Path(folder))


async def recorded(run: Run) -> list[Recorded]:
    """The journal of a scenario, as it stands in Redis."""
    async with place() as on:
        query_id = await run(on)
        async with Bus(on.url, "record/1") as bus:
            raw = await bus.range(journal_key(query_id, "A"))
    return [(one, {k.decode(): v.decode() for k, v in zip(f[::2], f[1::2], strict=True)}) for one, f in raw]


async def played(name: str, entries: list[Recorded]) -> Replay:
    async with place() as on, serving(gateway_settings(on.url, on.folder)) as site, Bus(on.url, "record/1") as bus:
        replay = Replay(site, bus, name, entries)
        await replay.run()
        return replay


async def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--show"]:
        entries, _ = load(JOURNALS / f"{arguments[1]}.json")
        print((await played(arguments[1], entries)).texts[arguments[2]])
        return
    again = arguments[:1] == ["--outputs"]
    for name in arguments[again:] or SCENARIOS:
        path = JOURNALS / f"{name}.json"
        entries = load(path)[0] if again else await recorded(SCENARIOS[name])
        replay = await played(name, entries)
        path.write_text(dump(entries, replay.outputs()), encoding="utf-8")
        print(name, len(entries), path.stat().st_size, flush=True)


if __name__ == "__main__":
    configure("error", "json")
    asyncio.run(main(sys.argv[1:]))
