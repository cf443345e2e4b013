"""Memory, critic, reward and the second respondent on a Redis Cluster of three nodes, as clients see them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from support.backups import Place, place
from support.cluster import Cluster
from support.memories import memory_settings
from support.services import announced, running
from support.stack import respondent
from support.waiting import eventually

from services.critic.service import app as critic
from services.critic.settings import CriticSettings
from services.generator.settings import GeneratorSettings
from services.memory.service import app as memory
from services.reward.service import app as reward
from services.reward.settings import RewardSettings
from shared.bus.hash_slots import slot_of_key
from shared.bus.keys import PAIRS_WAITING
from shared.contracts import CRITIQUE_RESULT, DEAD_LETTER, PAIRWISE_RESULT, RESPONSE_GENERATION

# The judge prefers B, whose answers begin with "Well".
RULES: list[dict[str, Any]] = [
    {"when": {"user": "(?s)###Response A:\\s*Well"}, "respond": {"text": "Warm. [RESULT] A"}},
    {"when": {"user": "(?s)###Response B:\\s*Well"}, "respond": {"text": "Warm. [RESULT] B"}},
    {"when": {"user": "(?s)###Response to evaluate:\\s*Well"}, "respond": {"text": "Warm. [RESULT] 5"}},
    {"when": {"user": "###Score Rubrics"}, "respond": {"text": "Right. [RESULT] 3"}},
    {
        "when": {"user": "^recall (.*)", "tool_results": 0},
        "respond": {"tool_calls": [{"name": "search_memory", "args": {"query": "<<1>>"}}]},
    },
    {"when": {"user": "^recall"}, "respond": {"text": "<<result>>"}},
    {"when": {"model": "shadow"}, "respond": {"text": "Well: <<query>>"}},
    {"respond": {"text": "Plain: <<query>>"}},
]
_GROUPS = [
    *((RESPONSE_GENERATION, group) for group in ("critic", "reward", "memory")),
    *((subject, group) for subject in (CRITIQUE_RESULT, PAIRWISE_RESULT) for group in ("reward", "memory")),
]


@dataclass
class House:
    """The stack, and a user of it."""

    place: Place
    http: httpx.AsyncClient

    async def ask(self, query: str, session: str) -> dict[str, Any]:
        answer = await self.http.post("/query", json={"query": query, "session_id": session})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def engrams(self) -> dict[str, dict[str, Any]]:
        answer = await self.http.get("/memory/engrams", params={"limit": 200})
        # while slots move it may be told to come again
        assert answer.status_code in (200, 503), answer.text
        return {engram["id"]: engram for engram in answer.json().get("engrams", ())}

    async def known(self, number: int, *wanted: str) -> dict[str, dict[str, Any]]:
        """The engrams, when there are so many and each has a score and what else is wanted."""

        async def look() -> dict[str, dict[str, Any]] | None:
            found = await self.engrams()
            complete = [e for e in found.values() if all(e[name] is not None for name in ("score", *wanted))]
            return found if len(complete) == len(found) == number else None

        found: dict[str, dict[str, Any]] = await eventually(look, 30, f"{number} engrams with {wanted}", 0.1)
        return found

    async def settled(self) -> None:
        bus = self.place.stage.bus

        async def done() -> bool:
            return not any([await bus.backlog(subject.stream, group) for subject, group in _GROUPS])

        await eventually(done, 30, "everything is judged and remembered")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as formed:
        yield formed


@pytest.fixture
async def house(cluster: Cluster, tmp_path: Path) -> AsyncIterator[House]:
    cluster.flush()
    url = cluster.url
    async with place(url, tmp_path) as stack, contextlib.AsyncExitStack() as people:
        model = stack.stage.server
        model.set_rules(RULES)
        common: dict[str, Any] = {"redis_url": url, "heartbeat": 0.5, "drain": 0.5, "data_dir": tmp_path}
        b = GeneratorSettings(**stack.stage.settings.model_dump() | {"respondent_id": "B", "model": "shadow"})
        await people.enter_async_context(running(respondent(b), b))
        await people.enter_async_context(running(critic, CriticSettings(**common, yield_rest=0, ollama_host=model.url)))
        await people.enter_async_context(running(reward, RewardSettings(**common, samples=50)))
        await people.enter_async_context(running(memory, memory_settings(url, tmp_path, model.url)))
        for name in ("respondent-b", "critic", "reward", "memory"):
            await announced(url, name)
        ann = await people.enter_async_context(await stack.site.key("ann"))
        yield House(stack, ann)


async def test_answers_are_graded_compared_remembered_recalled_voted_on_and_ranked(house: House) -> None:
    asked = await house.ask("Who keeps the lighthouse?", "s1")
    assert (await house.http.post("/feedback", json={"query_id": asked["query_id"], "stars": 1})).status_code == 202
    known = await house.known(2, "winner")
    ids = {side: f"{asked['query_id']}:{side}" for side in "AB"}
    assert {side: known[ids[side]]["score"] for side in "AB"} == {"A": 3, "B": 5}
    assert {engram["winner"] for engram in known.values()} == {"B"}

    async def voted() -> bool:
        return (await house.engrams())[ids["A"]]["sentiment"] == "negative"

    await eventually(voted, 20, "the vote is on the engram")
    recalled = await house.ask("recall the lighthouse", "s2")
    assert "Who keeps the lighthouse?" in recalled["answer"]
    assert recalled["tool_calls"][0]["data"]["hits"][0]["score"] is not None
    await house.settled()
    board = (await house.place.site.http.get("/preferences/leaderboard")).json()
    assert [row["config"]["model"] for row in board["judge"]["rows"]] == ["shadow", "gemma4:e4b"]
    assert board["people"]["rows"]
    shown = (await house.http.get(f"/queries/{asked['query_id']}")).json()
    assert (shown["critique"]["score"], shown["pairwise"]["winner"], shown["reward"]["stars"]) == (3, "B", 1)
    exported = (await house.place.site.http.get("/preferences/export", params={"format": "dpo"})).text.splitlines()
    assert [orjson.loads(line)["chosen"][0]["content"] for line in exported] == ["Well: Who keeps the lighthouse?"]
    assert (await house.http.put("/memory/topics/user.lamp", json={"content": "Ann likes lamps."})).is_success
    assert (await house.http.get("/memory/topics/user.lamp")).json()["content"] == "Ann likes lamps."


async def test_with_its_session_an_answer_is_forgotten_by_memory_and_reward(house: House) -> None:
    for session in ("gone", "kept"):
        await house.ask(f"Which windmill is {session}?", session)
    single = (await house.ask("Which windmill is let go?", "kept"))["query_id"]
    known = await house.known(6, "winner")
    kept = {one for one in known if known[one]["session_id"] == "kept" and not one.startswith(single)}
    assert (await house.http.delete("/sessions/gone")).status_code == 200
    # with it goes what the other respondent said to the same question
    assert (await house.http.delete(f"/memory/engrams/{single}:B")).status_code == 200

    async def forgotten() -> bool:
        return set(await house.engrams()) == kept

    await eventually(forgotten, 20, "the session's engrams are gone, and those of the other question")
    assert len(kept) == 2
    hits = (await house.http.get("/memory", params={"query": "Which windmill is gone?"})).json()["hits"]
    assert {hit["session_id"] for hit in hits} <= {"kept"}

    async def only_the_other() -> bool:
        rows = (await house.place.site.http.get("/preferences/export", params={"format": "critiques"})).text
        # an engram that is deleted leaves the judge's word on the answer
        return len(rows.splitlines()) == 4 and "gone" not in rows

    await eventually(only_the_other, 20, "reward has forgotten the session")


async def test_a_backup_brings_sessions_memories_and_preferences_back(house: House, tmp_path: Path) -> None:
    for number in range(3):
        asked = await house.ask(f"What is drawer {number}?", f"s{number}")
    assert (await house.http.post("/feedback", json={"query_id": asked["query_id"], "stars": 1})).status_code == 202
    await house.known(6, "winner")
    await house.http.put("/memory/topics/user.language", json={"content": "Ann prefers Elixir."})

    async def voted() -> bool:
        return any(engram["sentiment"] == "negative" for engram in (await house.engrams()).values())

    await eventually(voted, 20, "the vote is on the engram")
    await house.settled()
    before = await _kept(house)
    file = tmp_path / "all.backup"
    made = await house.place.local2("backup", "--without=knowledge", str(file))
    assert made.exit_code == 0, made.output
    for number in range(3):
        assert (await house.http.delete(f"/sessions/s{number}")).status_code == 200
    assert (await house.http.delete("/memory", params={"everything": True})).status_code == 200
    await eventually(lambda: _empty(house), 20, "everything is gone")
    done = await house.place.local2("restore", "--replace", str(file))
    assert done.exit_code == 0, done.output
    assert await _kept(house) == before


async def _empty(house: House) -> bool:
    rows = (await house.place.site.http.get("/preferences/export", params={"format": "critiques"})).text
    return not rows and not await house.engrams()


async def _kept(house: House) -> dict[str, Any]:
    admin = house.place.site.http
    lines = (await house.http.get("/memory/export")).content.splitlines()
    rows = (await admin.get("/preferences/export", params={"format": "critiques"})).text.splitlines()
    return {
        "sessions": [(await house.http.get(f"/sessions/s{number}")).json() for number in range(3)],
        "engrams": sorted((e["id"], e["score"], e["winner"], e["reward"]) for e in (await house.engrams()).values()),
        "memories": sorted(lines),
        "critiques": sorted(rows),
        "leaderboard": (await admin.get("/preferences/leaderboard")).json(),
    }


async def test_each_pair_is_judged_once_and_remembered_while_slots_move(house: House, cluster: Cluster) -> None:
    def disturb() -> None:
        for key in (PAIRS_WAITING, RESPONSE_GENERATION.stream, CRITIQUE_RESULT.stream, PAIRWISE_RESULT.stream):
            target = next(node for node in cluster.masters() if node is not cluster.master(key))
            cluster.migrate(slot_of_key(key), target, pause=0.02)

    on = house.place.stage
    for subject in (CRITIQUE_RESULT, PAIRWISE_RESULT):
        # a group that reads nothing: everything stays there to be counted
        await on.bus.link.call("XGROUP", "CREATE", subject.stream, "audit", "0", "MKSTREAM")
    moving = asyncio.create_task(asyncio.to_thread(disturb))
    asked = await asyncio.gather(*(house.ask(f"What is drawer {number}?", f"move-{number}") for number in range(12)))
    await moving
    ids = [one["query_id"] for one in asked]
    known = await house.known(24, "winner")
    assert set(known) == {f"{query_id}:{side}" for query_id in ids for side in "AB"}
    await house.settled()
    critiques = Counter(critique.response_id for critique in await on.published(CRITIQUE_RESULT))
    assert critiques == Counter(set(known))
    assert Counter(verdict.original_query_id for verdict in await on.published(PAIRWISE_RESULT)) == Counter(ids)
    assert await on.bus.link.call("ZCARD", PAIRS_WAITING) == 0
    assert await on.bus.link.call("XLEN", DEAD_LETTER.stream) == 0
