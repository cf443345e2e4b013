"""The whole stack as processes on a Redis Cluster of three masters with a replica each, over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.cluster import Cluster
from support.http_gateway import gateway_settings, serving
from support.http_stack import (
    HEARTBEAT,
    SSE,
    HttpStack,
    ModelProcess,
    Rules,
    answer_in,
    event_types,
    follow,
    parsed,
)
from support.memories import memory_settings
from support.services import announced, running
from support.stack import Participants, respondent
from support.waiting import eventually

from services.critic.service import app as critic
from services.critic.settings import CriticSettings
from services.generator.settings import GeneratorSettings
from services.knowledge.service import app as knowledge
from services.knowledge.settings import KnowledgeSettings
from services.memory.service import app as memory
from services.reward.service import app as reward
from services.reward.settings import RewardSettings
from services.web_search.service import app as web_search
from shared.bus import Bus, Command, Link, ReplyError
from shared.bus.hash_slots import name_of, slot_of, slot_of_key
from shared.bus.keys import FAMILIES, Family, record_key
from shared.testing.model_server import ScriptedModelServer

WORDS = " ".join(f"word{number}" for number in range(20))
RULES: Rules = [
    {
        "when": {"user": "^research", "tool_results": 0},
        "respond": {"tool_calls": [{"name": "web_search", "args": {"query": "LoCAL2"}}], "pace": 0.01},
    },
    {"when": {"user": "^research", "tool_results": 1}, "respond": {"text": WORDS, "pace": 0.01}},
    {"when": {"user": "^hold"}, "respond": {"text": WORDS, "pace": 1.0}},
    {"when": {"user": "###Response B:"}, "respond": {"text": "The first. [RESULT] A"}},
    {"when": {"user": "###Score Rubrics"}, "respond": {"text": "Right. [RESULT] 4"}},
    {"respond": {"text": "Hello."}},
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), replicas=1) as formed:
        yield formed


@pytest.fixture(scope="module")
def stack(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpStack]:
    folder: Path = tmp_path_factory.mktemp("stack")
    model = ModelProcess(folder / "model.log")
    try:
        model.start()
        model.play(RULES)
        with Participants(cluster.url, model.url, folder / "people", heartbeat=HEARTBEAT) as people:
            made = HttpStack(cluster, model, people, 2)  # type: ignore[arg-type]
            made.start(generators=2)
            yield made
    finally:
        model.close()


async def test_a_query_with_a_tool_is_streamed_and_resumed_on_another_gateway(stack: HttpStack) -> None:
    async with stack.http(0) as first, stack.http(1) as second:
        accepted = await first.post("/query?wait=false", json={"query": "research it", "session_id": "s1"})
        assert accepted.status_code == 202, accepted.text
        query_id = accepted.json()["query_id"]
        seen = await follow([first, second], query_id, itertools.cycle([3, 7]))
        full = (await second.get(f"/queries/{query_id}/events")).content
        assert seen == full
        assert answer_in(full) == WORDS
        kinds = event_types(full)
        assert kinds.count("tool.request") == kinds.count("tool.result") == 1
        turns = (await second.get("/sessions/s1")).json()["turns"]
        assert [turn["answer"] for turn in turns] == [WORDS]
        assert (await first.delete("/sessions/s1")).status_code == 200
        assert (await second.get("/sessions/s1")).status_code == 404


async def test_a_cancel_stops_the_answer_within_a_second(stack: HttpStack) -> None:
    async with stack.http(0) as first, stack.http(1) as second:
        accepted = await first.post("/query?wait=false", json={"query": "hold on"})
        query_id = accepted.json()["query_id"]

        async def begun() -> bool:
            return bool((await second.get(f"/queries/{query_id}")).json()["state"] == "running")

        await eventually(begun)
        assert (await second.post(f"/queries/{query_id}/cancel")).status_code == 200

        async def over() -> bool:
            return bool((await first.get(f"/queries/{query_id}")).json()["state"] == "cancelled")

        await eventually(over, 1.5, "the query is cancelled")


async def test_a_run_time_setting_reaches_every_replica(stack: HttpStack) -> None:
    async with stack.http(0) as first:
        changed = await first.patch("/participants/generator/settings", json={"temperature": 0.25})
        assert changed.status_code == 200, changed.text

        async def applied() -> bool:
            stack.model.http.delete("/script/requests")
            await asyncio.gather(*(first.post("/query", json={"query": f"hello {n}"}) for n in range(4)))
            asked = await asyncio.to_thread(stack.model.requests)
            return bool(asked) and all(one["body"]["options"].get("temperature") == 0.25 for one in asked)

        await eventually(applied, 5)
        described = (await first.get("/participants/generator/settings")).json()
        assert described["values"]["temperature"] == 0.25


async def test_what_operators_look_at_is_there(stack: HttpStack) -> None:
    async with stack.http(0) as first:
        ready = await first.get("/ready")
        assert ready.status_code == 200, ready.text
        streams = {row["subject"]: row for row in (await first.get("/bus/streams")).json()["streams"]}
        assert {group["name"] for group in streams["query.received"]["groups"]} == {"generator"}
        called = await first.post("/tools/web_search/call", json={"args": {"query": "x"}})
        assert called.json()["error"] is None, called.text
        assert (await first.get("/metrics")).status_code == 200


async def test_everything_accepted_is_answered_while_slots_move_nodes_change_and_generators_die(
    stack: HttpStack, cluster: Cluster
) -> None:
    answers: dict[str, list[str]] = {}
    refused = 0

    async def one(http: httpx.AsyncClient, number: int) -> None:
        nonlocal refused
        for turn in range(6):
            body = {"query": f"research {number} {turn}", "session_id": f"load-{number}"}
            asked = await http.post("/query?wait=false", json=body)
            if asked.status_code in (429, 503):
                refused += 1
                await asyncio.sleep(0.3)
                continue
            assert asked.status_code == 202, asked.text
            query_id = asked.json()["query_id"]
            answers[query_id] = []
            stream = await http.get(f"/queries/{query_id}/events", headers=SSE, timeout=60)
            for block in stream.content.split(b"\n\n")[:-1]:
                if block.startswith(b"id:"):
                    _, kind, data = parsed(block + b"\n\n")
                    if kind in ("completed", "failed", "cancelled"):
                        answers[query_id].append(data.get("answer") or kind)

    def disturb() -> None:
        for key in ("local2:query.received", "local2:tool.request.web_search", "local2:session:{load-1}"):
            target = next(node for node in cluster.masters() if node is not cluster.master(key))
            cluster.migrate(slot_of_key(key), target, pause=0.02)
        stack.running("generator")[0].send(signal.SIGKILL)
        # a master steps down in good order, another one dies
        for replica, how in zip(_replicas(cluster)[:2], ("asked", "killed"), strict=True):
            node = _master_of(cluster, replica)
            if how == "asked":
                replica.client.execute_command("CLUSTER", "FAILOVER")
            else:
                node.kill()
            _until(lambda replica=replica: replica in cluster.masters())
            if how == "killed":
                node.start()
            _until(cluster.whole)

    async with stack.http(0, timeout=60) as first, stack.http(1, timeout=60) as second, asyncio.timeout(90):
        asking = [asyncio.create_task(one((first, second)[n % 2], n)) for n in range(8)]
        await eventually(lambda: len(answers) > 8, 20)
        await asyncio.to_thread(disturb)
        await asyncio.gather(*asking)
        await asyncio.to_thread(stack.mend)
    assert len(answers) >= 8 * 6 - refused > 24
    assert {query_id: found for query_id, found in answers.items() if found != [WORDS]} == {}


def _replicas(cluster: Cluster) -> list[Any]:
    return [node for node in cluster.nodes if node.client.info("replication")["role"] == "slave"]


def _master_of(cluster: Cluster, replica: Any) -> Any:
    port = int(replica.client.info("replication")["master_port"])
    return next(node for node in cluster.nodes if node.port == port)


def _until(fact: Any) -> None:
    from support.cluster import wait_for

    wait_for(fact, 20, "the cluster has changed")


async def whole_run(
    redis_url: str, tmp_path: Path, tidied: Callable[[], bool], looked: Callable[[], Awaitable[None]]
) -> None:
    """Everybody on one server, doing a bit of everything, until a janitor has come by. `looked` is called when there is
    most to be seen, and at the end."""
    async with ScriptedModelServer(RULES) as model:
        common: dict[str, Any] = {"redis_url": redis_url, "heartbeat": 0.2, "drain": 0.5, "data_dir": tmp_path}
        generator = GeneratorSettings(**common, yield_rest=0, ollama_host=model.url)
        shadow = GeneratorSettings(**generator.model_dump() | {"respondent_id": "B"})
        searching = web_search.settings_cls(**common, provider="mock")
        async with (
            running(respondent(generator), generator),
            running(respondent(shadow), shadow),
            running(web_search, searching),
            running(critic, CriticSettings(**common, yield_rest=0, ollama_host=model.url)),
            running(reward, RewardSettings(**common)),
            running(memory, memory_settings(redis_url, tmp_path, model.url)),
            running(knowledge, KnowledgeSettings(**common, ollama_host=model.url, demo=True)),
            serving(gateway_settings(redis_url, tmp_path)) as site,
        ):
            for name in ("generator", "respondent-b", "web_search", "critic", "reward", "memory", "knowledge"):
                await announced(redis_url, name)
            headers = {"Idempotency-Key": "k"}
            for _ in range(2):
                body = {"query": "research", "session_id": "s"}
                assert (await site.http.post("/query", json=body, headers=headers)).json()["answer"] == WORDS
            held = (await site.http.post("/query?wait=false", json={"query": "hold", "session_id": "s"})).json()
            await site.http.post(f"/queries/{held['query_id']}/cancel")
            await site.http.patch("/participants/generator/settings", json={"temperature": 0.5})
            for path in ("/sessions", "/sessions/s", "/participants", "/bus/streams", "/dead-letters", "/metrics"):
                assert (await site.http.get(path)).status_code == 200, path
            judged = (await site.http.post("/query", json={"query": "hello", "session_id": "s"})).json()["query_id"]
            await site.http.post("/feedback", json={"query_id": judged, "stars": 5})

            async def known() -> bool:
                """Graded, compared, voted on and remembered."""
                engram = (await site.http.get(f"/memory/engrams/{judged}:A")).json()
                return all(engram.get(name) is not None for name in ("score", "winner", "reward"))

            await eventually(known, 20, "the answer is judged and remembered")
            await site.http.put("/memory/topics/user.lamp", json={"content": "Ann likes lamps."})
            for path in ("/memory?query=hello", "/memory/export", "/preferences/leaderboard"):
                assert (await site.http.get(path)).status_code == 200, path
            lines = (await site.http.get("/memory/export")).content
            assert (await site.http.post("/memory/import", content=lines)).is_success
            assert (await site.http.get("/backup")).status_code == 200
            await looked()
            assert (await site.http.delete(f"/memory/engrams/{judged}:A")).status_code == 200
            assert (await site.http.post("/keys/link")).status_code == 201
            assert (await site.http.delete("/memory?everything=true")).status_code == 200
            assert (await site.http.delete("/sessions/s")).status_code == 200
            # the janitor of one of them
            await eventually(tidied, 5)
            await looked()


async def test_every_command_of_a_whole_run_keeps_to_one_slot(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one server, where nothing would refuse it: what Redis itself takes for the keys is what we route by."""
    sent: dict[tuple[str, int], Command] = {}
    submit = Link.submit

    def noting(self: Link, commands: Any, *args: Any, **kwargs: Any) -> Any:
        for command in commands:
            # one of each kind and length: keys stand where they stand
            sent.setdefault(
                (f"{name_of(command)} {command[1] if len(command) > 1 else ''}"[:60], len(command)), command
            )
        return submit(self, commands, *args, **kwargs)

    monkeypatch.setattr(Link, "submit", noting)

    async def looked() -> None:
        """It is what was sent that matters."""

    await whole_run(redis_url, tmp_path, lambda: any(kind.startswith("XTRIM") for kind, _ in sent), looked)
    assert len(sent) > 60
    monkeypatch.undo()
    async with Bus(redis_url, "test/keys") as bus:
        for command in sent.values():
            if name_of(command) in {"MULTI", "EXEC", "TIME", "INFO", "CLIENT"}:
                # a cluster has stages in the place of transactions, the clock of one node and what it says of itself,
                # and ends a read where that waits
                continue
            (keys,) = await bus.link.pipe_raw([("COMMAND", "GETKEYS", *command)])
            if name_of(command) in {"PING", "SCAN", "SCRIPT"}:
                # every master is asked
                assert isinstance(keys, ReplyError), command
                continue
            assert not isinstance(keys, ReplyError), command
            if name_of(command) in ("XREAD", "XREADGROUP"):
                # those are taken apart, stream by stream
                assert slot_of_key(keys[0]) == slot_of(command), command
            else:
                assert {slot_of_key(key) for key in keys} == {slot_of(command)}, command


# What nobody has a reason to touch in it, unless it takes long.
_NOT_NEEDED = {
    "local2:memory:reembedding", "local2:restore:lock", "local2:letters-seen", "local2:memory:document-vectors",
    "local2:mcp:pins", "local2:chores:{local2:query.received}",
}  # fmt: skip


async def test_every_key_of_a_whole_run_is_of_one_family_and_stays_as_long_as_the_table_says(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: set[Command] = set()
    found: dict[str, tuple[str, bool]] = {}
    submit = Link.submit

    def noting(self: Link, commands: Any, *args: Any, **kwargs: Any) -> Any:
        sent.update(commands)
        return submit(self, commands, *args, **kwargs)

    async def looked() -> None:
        """Which keys there are, of what type, and whether they stay."""
        async for raw in bus.scan("*"):
            page = [key.decode() for key in raw]
            for key in page:
                kind, left = await bus.link.pipe([("TYPE", key), ("PTTL", key)])
                family = family_of(key)
                if left == -1 and not family.lasting:
                    # an inbox has its time to live with the next command
                    await asyncio.sleep(0.1)
                    left = await bus.link.call("PTTL", key)
                if left != -2:
                    found[key] = (kind.decode().replace("zset", "sorted set"), left == -1)

    async with Bus(redis_url, "test/keys") as bus:
        with monkeypatch.context() as patch:
            patch.setattr(Link, "submit", noting)
            await whole_run(redis_url, tmp_path, lambda: any(name_of(one) == "XTRIM" for one in sent), looked)
        for key, (kind, stays) in found.items():
            family = family_of(key)
            assert (key, kind, stays) == (key, family.kind, family.lasting)
        commands = list(sent)
        named = await bus.link.pipe_raw([("COMMAND", "GETKEYS", *command) for command in commands])
        keys = {key.decode() for one in named if not isinstance(one, ReplyError) for key in one}
    assert len(keys) > 100
    # a script is given what keys begin with: it adds the id
    seen = {family_of(key + "0-0" if key == record_key("") else key).pattern for key in keys}
    assert seen | _NOT_NEEDED == {family.pattern for family in FAMILIES}


def family_of(key: str) -> Family:
    (family,) = [family for family in FAMILIES if family.parts(key) is not None] or [None]
    assert family is not None, f"{key} is of no family"
    return family
