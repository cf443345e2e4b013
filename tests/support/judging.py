"""Judging under fire: answers of A and B to many queries, critics killed at random, reward and memory away for a while.

Everything but the model is real and a process of its own. Afterwards it is counted what each of them knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.redis_servers import unsynced
from support.services import announced
from support.stack import Client, Participant, Participants
from support.waiting import PATIENCE, eventually

from shared.bus import Bus
from shared.contracts import (
    CRITIQUE_RESULT,
    DEAD_LETTER,
    PAIRWISE_RESULT,
    RESPONSE_GENERATION,
    REWARD_EVENT,
    USER_FEEDBACK,
    RespondentId,
    ResponseGeneration,
    UserFeedback,
)
from shared.participant.registry import Registry
from shared.participant.service import open_context
from shared.participant.settings import Settings
from shared.participant.tool_client import Caller, ToolClient
from shared.testing.model_server import Rules, ScriptedModelServer

USER = "judged"
_PACE = {"delay": 0.1}
# The judge tells the two apart by their words, wherever they stand.
RULES: Rules = [
    {"when": {"user": "(?s)###Response A:\\s*good"}, "respond": {"text": "It is right. [RESULT] A", **_PACE}},
    {"when": {"user": "(?s)###Response B:\\s*good"}, "respond": {"text": "It is right. **[RESULT]** B", **_PACE}},
    {"when": {"user": "(?s)###Response to evaluate:\\s*good"}, "respond": {"text": "Right. [RESULT] (5)", **_PACE}},
    {"when": {"user": "###Score Rubrics"}, "respond": {"text": "Wrong. [RESULT] 2/5", **_PACE}},
]
_WATCHED = (CRITIQUE_RESULT, PAIRWISE_RESULT, REWARD_EVENT)


@dataclass
class Count:
    """What came of it. `wrong` is empty when nothing was lost, twice or mixed up."""

    pairs: int
    seconds: float = 0.0
    kills: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    details: list[str] = field(default_factory=list)
    # how often the judge was asked, those included that a kill cut off
    judged: int = 0

    def check(self, what: str, seen: Any, wanted: Any) -> None:
        if seen != wanted:
            self.wrong[what] += 1
            self.details.append(f"{what}: {seen!r}, not {wanted!r}")


def _good(number: int) -> str:
    """Which respondent answers this one well."""
    return "A" if number % 3 == 0 else "B"


def generation(number: int, respondent: RespondentId, began: int) -> ResponseGeneration:
    query_id = f"{began + number}-0"
    return ResponseGeneration(
        query_id=query_id,
        response_id=f"{query_id}:{respondent}",
        session_id=f"s{number // 4}",
        user_id=USER,
        respondent_id=respondent,
        generator_id="g",
        query=f"What is number {number}?",
        answer=f"{'good' if _good(number) == respondent else 'bad'} answer {number} of {respondent}",
        model=f"model-{respondent}",
        options={"temperature": 0.5},
        finish_reason="stop",
    )


async def _publish(bus: Bus, pairs: int, began: int, rng: random.Random) -> None:
    """The answers of both respondents in any order, then a vote on each of A's, changed for every fifth."""
    sides: tuple[RespondentId, ...] = ("A", "B")
    answers = [generation(number, side, began) for number in range(pairs) for side in sides]
    rng.shuffle(answers)
    votes = [(number, _good(number) == "A") for number in range(pairs)]
    votes += [(number, _good(number) != "A") for number in range(0, pairs, 5)]
    for start in range(0, len(answers), 20):
        await bus.publish(
            *(
                RESPONSE_GENERATION.of(
                    r, correlation_id=r.query_id, session_id=r.session_id, user_id=USER, respondent_id=r.respondent_id
                )
                for r in answers[start : start + 20]
            )
        )
    for number, good in votes:
        query_id, session_id = f"{began + number}-0", f"s{number // 4}"
        sentiment: Any = "positive" if good else "negative"
        vote = UserFeedback(query_id=query_id, session_id=session_id, user_id=USER, sentiment=sentiment)
        await bus.publish(USER_FEEDBACK.of(vote, correlation_id=query_id, session_id=session_id, user_id=USER))


async def _kill_critics(people: Participants, registry: Registry, every: float, rng: random.Random, c: Count) -> None:
    """Kills a critic that is at work, again and again, while another one is; starts a new one in its place."""
    while True:
        await asyncio.sleep(every * rng.uniform(0.5, 1.5))
        ready = {int(info.replica.rsplit("-", 2)[1]) for info in await registry.replicas(fresh=True)}
        at_work = [one for one in people.alive("critic") if one.pid in ready]
        if len(at_work) < 2:
            continue
        rng.choice(at_work).kill()
        c.kills["critic"] += 1
        people.start("critic")


async def _send_away(people: Participants, keepers: dict[str, Participant], away: float, c: Count) -> None:
    """Kills reward and memory, and starts them again after a while."""
    for keeper in keepers.values():
        keeper.kill()
        c.kills[keeper.name] += 1
    await asyncio.sleep(away)
    for name in keepers:
        keepers[name] = people.start(name)


async def judging(pairs: int, *, every: float, away: float, seed: int, seconds: float) -> Count:
    """every: seconds between two kills of a critic. away: how long reward and memory are missing. seconds: at most."""
    count, rng, began = Count(pairs), random.Random(seed), int(time.time() * 1000)
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="local2-judging-")))
        server = stack.enter_context(unsynced(folder / "redis"))
        model = await stack.enter_async_context(ScriptedModelServer(RULES))
        bus = await stack.enter_async_context(Bus(server.url, "test/judging"))
        for subject in _WATCHED:
            # a group that reads nothing: everything stays there to be counted
            await bus.link.call("XGROUP", "CREATE", subject.stream, "audit", "0", "MKSTREAM")
        people = stack.enter_context(
            Participants(server.url, model.url, folder / "data", heartbeat=0.5, memory_classify="off",
                         critic_pairwise_buffer=2 * pairs, critic_leave_ungraded_above=20 * pairs)
        )  # fmt: skip
        client, start = Client(bus), time.monotonic()
        keepers = {name: people.start(name) for name in ("reward", "memory")}
        for _ in range(2):
            people.start("critic")
        for name, number in (("critic", 2), ("reward", 1), ("memory", 1)):
            await announced(server.url, name, number, 60)
        await _publish(bus, pairs, began, rng)
        registry = Registry(bus, 0.0)
        killing = asyncio.create_task(_kill_critics(people, registry, every, rng, count))
        try:
            third = pairs * 2 // 3
            await eventually(lambda: _length(bus, CRITIQUE_RESULT.stream, third), seconds, "a third is graded", 0.1)
            await _send_away(people, keepers, away, count)
            await _finished(bus, seconds)
        except AssertionError as exc:
            count.wrong["not done in time"] += 1
            count.details.append(str(exc))
        finally:
            killing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await killing
        count.seconds = time.monotonic() - start
        count.judged = sum("###Task Description" in (request.query or "") for request in model.requests)
        for name in keepers:
            await announced(server.url, name, 1, 60)
        await _audit(client, count, began, server.url)
    return count


async def _length(bus: Bus, stream: str, least: int) -> bool:
    return int(await bus.link.call("XLEN", stream)) >= least


async def _finished(bus: Bus, seconds: float) -> None:
    reads = [(RESPONSE_GENERATION, ("critic", "reward", "memory")), (CRITIQUE_RESULT, ("reward", "memory")),
             (PAIRWISE_RESULT, ("reward", "memory")), (USER_FEEDBACK, ("reward",)),
             (REWARD_EVENT, ("memory",))]  # fmt: skip

    async def done() -> bool:
        left = [await bus.backlog(subject.stream, group) for subject, groups in reads for group in groups]
        return not any(left)

    await eventually(done, seconds, "everything is handled", every=0.1)


async def _audit(client: Client, count: Count, began: int, url: str) -> None:
    """What is on the bus, in reward's database and on the engrams must be exactly what was judged and voted."""
    pairs = range(count.pairs)
    ids = {number: f"{began + number}-0" for number in pairs}
    critiques = Counter(c.response_id for c in await client.published(CRITIQUE_RESULT))
    count.check("critiques", critiques, Counter({f"{ids[n]}:{side}": 1 for n in pairs for side in "AB"}))
    scores = {c.response_id: c.score for c in await client.published(CRITIQUE_RESULT)}
    verdicts = await client.published(PAIRWISE_RESULT)
    count.check("verdicts", Counter(v.original_query_id for v in verdicts), Counter(ids.values()))
    wanted = {f"{ids[n]}:{side}": 5 if _good(n) == side else 2 for n in pairs for side in "AB"}
    count.check("scores", scores, wanted)
    count.check("winners", {v.original_query_id: v.winner for v in verdicts}, {ids[n]: _good(n) for n in pairs})
    count.check(
        "scores of verdicts",
        {v.original_query_id: (v.score_a, v.score_b) for v in verdicts},
        {ids[n]: (wanted[f"{ids[n]}:A"], wanted[f"{ids[n]}:B"]) for n in pairs},
    )
    count.check("dead letters", await client.bus.link.call("XLEN", DEAD_LETTER.stream), 0)
    last = {ids[n]: (_good(n) == "A") != (n % 5 == 0) for n in pairs}
    rewards = {event.query_id: event.reward > 0 for event in await client.published(REWARD_EVENT)}
    count.check("rewards", rewards, last)
    async with open_context("auditor", Settings(redis_url=url)) as context:
        tools = ToolClient(context)
        tables: dict[str, list[dict[str, Any]]] = {}
        for table in ("responses", "critiques", "pairs", "votes"):
            tables[table] = await _pages(tools, "reward_manage", "rows", op="dump", table=table)
        count.check("reward's answers", len(tables["responses"]), 2 * count.pairs)
        count.check("reward's grades", {r["response_id"]: r["score"] for r in tables["critiques"]}, wanted)
        count.check("reward's verdicts", {r["query_id"]: r["winner"] for r in tables["pairs"]},
                    {ids[n]: _good(n) for n in pairs})  # fmt: skip
        count.check("reward's votes", {r["query_id"]: r["reward"] > 0 for r in tables["votes"]}, last)
        engrams = await _pages(tools, "memory_manage", "engrams", op="list", limit=200)
    count.check("engrams' grades", {e["response_id"]: e["score"] for e in engrams}, wanted)
    count.check("engrams' winners", {e["response_id"]: e["winner"] for e in engrams},
                {f"{ids[n]}:{side}": _good(n) for n in pairs for side in "AB"})  # fmt: skip
    count.check(
        "engrams' votes", {e["query_id"]: e["sentiment"] == "positive" for e in engrams if e["sentiment"]}, last
    )


async def _pages(tools: ToolClient, tool: str, name: str, **args: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    cursor: str | None = ""
    while cursor is not None:
        call_id = f"audit-{tool}-{args}-{cursor}"
        asked = {**args, "cursor": cursor} if cursor else args
        caller = Caller(call_id, user_id=USER)
        outcome = await tools.call(tool, asked, call_id=call_id, caller=caller, timeout=20 * PATIENCE, internal=True)
        assert outcome.error is None, outcome.error
        found += outcome.data[name]
        cursor = outcome.data["cursor"]
    return found
