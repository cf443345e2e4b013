"""The whole stack on a Redis server in cluster mode (three masters), over HTTP."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster import Cluster
from support.forked import ROOT
from support.local2_run import Stack, eventually, running, scripted_model

pytestmark = pytest.mark.slow
PREFIX = "{local2}:"
WORDS = " ".join(f"word{number}" for number in range(20))
RULES: list[dict[str, Any]] = [
    {
        "when": {"user": "^research", "tool_results": 0},
        "respond": {"tool_calls": [{"name": "web_search", "args": {"query": "LoCAL2"}}]},
    },
    {"when": {"user": "^research"}, "respond": {"text": WORDS}},
    {"when": {"user": "^hold"}, "respond": {"text": WORDS, "pace": 1.0}},
    {"when": {"user": "###Response B:"}, "respond": {"text": "The first. [RESULT] A"}},
    {"when": {"user": "###Score Rubrics"}, "respond": {"text": "Right. [RESULT] 4"}},
    {"respond": {"text": "I see."}},
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as formed:
        yield formed


@pytest.fixture(scope="module")
def stack(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    with (
        scripted_model(folder, RULES) as model,
        running(ROOT, folder / "data", model, redis_url=cluster.url, key_prefix=PREFIX) as started,
    ):
        yield started


def pids(stack: Stack, name: str) -> set[int]:
    """Return the process ids of the replicas of a participant that are ready."""
    rows = stack.call("GET", "/participants")["participants"]
    replicas = next((row["replicas"] for row in rows if row["name"] == name), [])
    return {int(one["replica"].rsplit("-", 2)[1]) for one in replicas if one["state"] == "ready"}


def state(stack: Stack, query_id: str) -> str:
    return str(stack.call("GET", f"/queries/{query_id}")["state"])


def test_query_with_tool_call_is_answered_judged_and_deleted(stack: Stack) -> None:
    assert stack.call("POST", "/query", {"query": "research it", "session_id": "s1"})["answer"] == WORDS
    # answers that used a tool are not judged
    asked = stack.call("POST", "/query", {"query": "My sister Anna lives in Lyon.", "session_id": "s1"})
    stack.call("POST", "/feedback", {"query_id": asked["query_id"], "stars": 5})
    assert len(stack.call("GET", "/sessions/s1")["turns"]) == 2

    def judged() -> bool:
        engrams = {one["id"]: one for one in stack.call("GET", "/memory/engrams")["engrams"]}
        engram = engrams.get(f"{asked['query_id']}:A", {})
        return all(engram.get(name) is not None for name in ("score", "winner", "reward"))

    eventually(judged, "memory has the answer with its grades")
    eventually(lambda: "Lyon" in str(stack.call("GET", "/knowledge/facts")), "knowledge has the fact")
    stack.call("DELETE", "/sessions/s1")
    assert "s1" not in str(stack.call("GET", "/sessions"))


def test_cancelled_query_ends_and_session_goes_on(stack: Stack) -> None:
    query_id = stack.call("POST", "/query?wait=false", {"query": "hold on", "session_id": "s2"})["query_id"]
    eventually(lambda: state(stack, query_id) == "running", "the query runs", 20)
    stack.call("POST", f"/queries/{query_id}/cancel")
    eventually(lambda: state(stack, query_id) == "cancelled", "the query is cancelled", 20)
    assert stack.call("POST", "/query", {"query": "research more", "session_id": "s2"})["answer"] == WORDS


def test_query_of_killed_generator_is_answered_once(stack: Stack) -> None:
    (killed,) = pids(stack, "generator")
    query_id = stack.call("POST", "/query?wait=false", {"query": "hold this", "session_id": "s3"})["query_id"]
    eventually(lambda: state(stack, query_id) == "running", "the query runs", 20)
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: state(stack, query_id) == "completed", "the query is answered", 90)
    assert [turn["answer"] for turn in stack.call("GET", "/sessions/s3")["turns"]] == [WORDS]
    assert killed not in pids(stack, "generator")


def test_setting_and_key_are_effective_after_their_change(stack: Stack) -> None:
    stack.call("PATCH", "/participants/generator/settings", {"history_turns": 7})
    assert stack.call("GET", "/participants/generator/settings")["values"]["history_turns"] == 7
    key = stack.call("POST", "/keys", {"name": "phone", "user_id": "ann"})["key"]
    stack.call("PUT", "/memory/topics/user.tea", {"content": "Green."}, key=key)
    assert stack.call("GET", "/memory/topics/user.tea", key=key)["content"] == "Green."


def test_backup_and_operators_views_are_complete(stack: Stack, tmp_path: Path) -> None:
    for path in ("/ready", "/participants", "/bus/streams", "/dead-letters", "/metrics", "/retention"):
        stack.call("GET", path)
    assert "query.received" in str(stack.call("GET", "/bus/streams"))
    stack.command("backup", str(tmp_path / "cluster.backup"))


def test_all_keys_of_the_stack_begin_with_the_prefix(stack: Stack, cluster: Cluster) -> None:
    stack.call("POST", "/query", {"query": "research again"})
    keys = {key for node in cluster.masters() for key in node.client.scan_iter(count=1_000)}
    assert len(keys) > 30
    assert {key for key in keys if not key.startswith(PREFIX)} == set()
