"""What a running stack tells Prometheus: of every process, of the bus, and no more than it may."""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from support.forked import TESTS
from support.http_stack import HttpStack, ModelProcess, Rules, until
from support.promtool import promtool
from support.stack import Participants

from services.cli.launch.embedded_redis import EmbeddedRedis

ROOT = Path(__file__).parents[2]
OBSERVABILITY = ROOT / "deploy" / "observability"
RULES: Rules = [
    {"when": {"model": "no-such-model"}, "respond": {"status": 404, "error": "model 'no-such-model' not found"}},
    {
        "when": {"tool_results": 0, "user": "^tool"},
        "respond": {"thinking": "I look.", "tool_calls": [{"name": "probe", "args": {"text": "<<query>>"}}]},
    },
    {
        "when": {"tool_results": 0, "user": "^broken"},
        "respond": {"tool_calls": [{"name": "probe", "args": {"text": "x", "fail": "it broke"}}]},
    },
    {
        "when": {"tool_results": 0, "user": "^invented"},
        "respond": {"tool_calls": [{"name": "a_tool_that_nobody_has", "args": {}}]},
    },
    {"times": 1, "when": {"user": "###Score Rubrics"}, "respond": {"text": "It is hard to say."}},
    {"when": {"user": "###Score Rubrics"}, "respond": {"text": "Right. [RESULT] 4"}},
    {"respond": {"thinking": "Hm.", "text": "An answer."}},
]

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Scraped:
    """The texts of all processes by participant, and their samples."""

    def __init__(self, texts: dict[str, list[str]]) -> None:
        self.texts = texts
        self.families = {
            name: [family for text in found for family in text_string_to_metric_families(text)]
            for name, found in texts.items()
        }

    @property
    def names(self) -> set[str]:
        return {sample.name for found in self.families.values() for family in found for sample in family.samples}

    def value(self, participant: str, name: str, /, **labels: str) -> float:
        """The sum over the participant's processes."""
        return sum(
            sample.value
            for family in self.families[participant]
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpStack]:
    folder = tmp_path_factory.mktemp("measured")
    with ExitStack() as opened:
        model = ModelProcess(folder / "model.log")
        opened.callback(model.close)
        model.start()
        model.play(RULES)
        redis = opened.enter_context(EmbeddedRedis(folder / "redis"))
        people = opened.enter_context(
            Participants(redis.url, model.url, folder / "people", metrics_port=0, effects_url=redis.url)
        )
        running = HttpStack(redis, model, people, 1)
        people.start("probe")
        people.start("judge")
        # it does not yield: a judgement that is broken off would use up the rule that it is to read
        people.start("critic", critic_yield_above=100)
        people.start("reward")
        people.start("knowledge", extract="false")
        running.start(2)
        until(lambda: "probe" in _addresses(running), 20, "the probe is there")
        with running.web() as web:
            until(lambda: "probe" in web.get("/tools").text, 10, "the probe is offered")
            for query in ("hello", "tool one", "tool two", "broken", "invented"):
                answered = web.post("/query", json={"query": query})
                assert answered.status_code == 200
            assert web.post("/feedback", json={"query_id": answered.json()["query_id"], "stars": 2}).is_success
            asked = web.post("/query", json={"query": "x", "model": "no-such-model"})
            assert asked.json()["error"]["code"] == "model_missing"
            web.post("/tools/probe/call", json={"args": {"text": "direct"}})
        yield running


def _addresses(stack: HttpStack) -> dict[str, list[str]]:
    with stack.web() as web:
        told = web.get("/participants").json()["participants"]
    return {part["name"]: [one["facts"]["metrics"] for one in part["replicas"]] for part in told if part["replicas"]}


def get(address: str, path: str = "/metrics", method: str = "GET") -> tuple[int, str, str]:
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read().decode()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def scraped(stack: HttpStack) -> Scraped:
    def settled() -> Scraped | None:
        texts = {name: [get(one)[2] for one in found] for name, found in _addresses(stack).items()}
        found = Scraped(texts)
        done = (
            found.value("judge", "local2_messages_handled_total") >= 5
            and found.value("critic", "local2_messages_handled_total") >= 5
            and found.value("reward", "local2_votes_total") >= 1
            and found.value("gateway", "local2_pairs_waiting") == found.value("critic", "local2_pairs_waiting") >= 1
            and found.value("gateway", "local2_answers_graded", score="4") >= 1
            and found.value("gateway", "local2_answers_rated", sentiment="negative") >= 1
            and found.value("gateway", "local2_judge_unread") >= 1
            and found.value("gateway", "local2_first_word_seconds_count") >= 5
        )
        return found if done else None

    result: Scraped = until(settled, 15, "every process has counted")
    return result


def test_every_process_shows_itself(scraped: Scraped) -> None:
    assert scraped.texts.keys() == {
        "critic", "gateway", "generator", "judge", "knowledge", "probe", "reward", "web_fetch", "web_search",
    }  # fmt: skip
    assert len(scraped.texts["generator"]) == 2
    for name, texts in scraped.texts.items():
        assert scraped.value(name, "local2_info", participant=name) == len(texts)
        assert scraped.value(name, "process_resident_memory_bytes") > 20e6
        assert scraped.value(name, "process_cpu_seconds_total") > 0.05


def test_a_generator_counts_queries_models_and_tools(scraped: Scraped) -> None:
    of = "generator"
    assert scraped.value(of, "local2_query_seconds_count", outcome="completed") == 5
    assert scraped.value(of, "local2_query_seconds_count", outcome="failed") == 1
    assert scraped.value(of, "local2_query_first_token_seconds_count") == 5
    assert scraped.value(of, "local2_model_calls_total", outcome="ok") == 9
    assert scraped.value(of, "local2_model_calls_total", model="no-such-model", outcome="refused") == 1
    assert scraped.value(of, "local2_model_time_to_first_token_seconds_count") == 9
    assert scraped.value(of, "local2_model_tokens_total", direction="input") > 20
    assert scraped.value(of, "local2_model_tokens_total", direction="output") > 5
    assert scraped.value(of, "local2_tool_requests_total", tool="probe", outcome="ok") == 2
    assert scraped.value(of, "local2_tool_requests_total", tool="probe", outcome="error") == 1
    assert scraped.value(of, "local2_tool_requests_total", tool="other", outcome="unknown") == 1
    assert scraped.value(of, "local2_journal_entries_total", type="completed") == 5
    assert scraped.value(of, "local2_messages_handled_total", stream="query.received", outcome="ok") == 6


def test_a_worker_counts_its_calls_and_the_gateway_its_own(scraped: Scraped) -> None:
    assert scraped.value("probe", "local2_tool_calls_total", tool="probe", outcome="ok") == 3
    assert scraped.value("probe", "local2_tool_calls_total", tool="probe", outcome="error") == 1
    assert scraped.value("probe", "local2_tool_call_seconds_count", tool="probe") == 4
    assert scraped.value("probe", "local2_message_seconds_count", stream="tool.request.probe") == 4
    assert scraped.value("gateway", "local2_tool_requests_total", tool="probe", outcome="ok") == 1


def test_the_gateway_shows_the_bus(scraped: Scraped) -> None:
    query = {"stream": "local2:query.received", "group": "generator"}
    of = "gateway"
    assert scraped.value(of, "local2_bus_up") == 1
    assert scraped.value(of, "local2_group_handled_total", **query) == 6
    assert scraped.value(of, "local2_group_lag", **query) == 0
    assert scraped.value(of, "local2_group_pending", **query) == 0
    assert scraped.value(of, "local2_group_oldest_seconds", **query) == 0
    assert scraped.value(of, "local2_group_served_seconds", **query) < 5
    assert scraped.value(of, "local2_query_backlog") == 0
    assert scraped.value(of, "local2_replicas", participant="generator") == 2
    assert scraped.value(of, "local2_replica_starts_total", participant="generator") == 2
    assert scraped.value(of, "local2_replicas_concurrency", participant="generator") == 8
    assert scraped.value(of, "local2_first_word_seconds_count") == 5
    assert scraped.value(of, "local2_first_word_seconds_sum") > 0
    assert scraped.value(of, "local2_redis_memory_used_bytes") > 500_000


def test_the_metrics_with_a_key_are_those_of_the_port(stack: HttpStack, scraped: Scraped) -> None:
    with stack.web() as web:
        answered = web.get("/metrics")
    found = Scraped({"gateway": [answered.text]})
    known = {s.name for f in scraped.families["gateway"] for s in f.samples}
    assert known <= found.names
    with stack.web(key="nobody's") as stranger:
        assert stranger.get("/metrics").status_code == 401


def test_promtool_finds_no_fault_in_the_names(scraped: Scraped) -> None:
    for texts in scraped.texts.values():
        promtool("check", "metrics", text=texts[0])


def test_labels_hold_no_ids_and_no_words_of_a_user(scraped: Scraped) -> None:
    allowed = {
        "stream", "group", "participant", "outcome", "tool", "model", "direction", "type", "le", "method", "route",
        "status", "mode", "reason", "version", "score", "winner", "asked", "work", "sentiment",
    }  # fmt: skip
    values = set()
    for found in scraped.families.values():
        for family in found:
            for sample in family.samples:
                assert sample.labels.keys() <= allowed, sample
                values |= {value for key, value in sample.labels.items() if key not in ("le", "version")}
    assert not [value for value in values if re.search(r"\d{10}|[0-9a-f]{16}|tool one|a_tool_that", value)]


def test_judging_counts_grades_what_could_not_be_read_and_votes(scraped: Scraped) -> None:
    # the answers that used no tool: "hello" and "invented"
    assert scraped.value("critic", "local2_grades_total", score="4") >= 1
    assert scraped.value("critic", "local2_grades_total", score="none") == 0
    assert scraped.value("critic", "local2_judgements_unread_total", asked="grade") == 1
    assert scraped.value("critic", "local2_verdicts_total", winner="tie") == 0
    assert scraped.value("critic", "local2_pairs_waiting") >= 1
    assert scraped.value("reward", "local2_votes_total", sentiment="negative") == 1


def test_the_gateway_shows_what_was_judged_and_rated(scraped: Scraped) -> None:
    graded = {score: scraped.value("gateway", "local2_answers_graded", score=score) for score in ("4", "5", "none")}
    assert 1 <= graded["4"] <= scraped.value("critic", "local2_grades_total", score="4")
    assert graded["5"] == graded["none"] == 0
    assert scraped.value("gateway", "local2_answers_compared") == 0
    assert scraped.value("gateway", "local2_answers_rated", sentiment="negative") == 1
    assert scraped.value("gateway", "local2_answers_rated", sentiment="neutral") == 0
    assert scraped.value("gateway", "local2_judge_unread") == 1
    assert scraped.value("gateway", "local2_pairs_waiting") == scraped.value("critic", "local2_pairs_waiting")


METRIC = re.compile(r"\b((?:local2|process)_[a-z0-9_]+|up|ALERTS)\b")


def _named(expression: str) -> set[str]:
    return set(METRIC.findall(re.sub(r'"[^"]*"|\{\{.*?\}\}', "", expression)))


def test_every_metric_of_the_dashboard_the_rules_and_the_docs_is_really_there(scraped: Scraped) -> None:
    dashboard = json.loads((OBSERVABILITY / "grafana/dashboards/local2.json").read_text())
    rules = yaml.safe_load((OBSERVABILITY / "rules.yml").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    expressions += [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    page = (ROOT / "docs/observability.md").read_text()
    used = {name for text in expressions for name in _named(text)}
    bases = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in scraped.names}
    documented = set(re.findall(r"`((?:local2|process)_[a-z0-9_]+)[`{]", page))
    # made by Prometheus itself; and what counts only what has not happened here
    never = {"up", "ALERTS", "local2_messages_redelivered_total", "local2_queries_refused_total"}
    assert used - scraped.names <= never
    assert documented - bases <= never
    assert len(used) > 25
    # and the page leaves none out
    assert {name for name in bases if name.startswith("local2_")} <= documented


# ── the listener ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_port_is_on_loopback_and_knows_one_path(stack: HttpStack) -> None:
    (address,) = _addresses(stack)["probe"]
    assert address.startswith("127.0.0.1:")
    assert get(address)[1].startswith("text/plain; version=")
    assert get(address, "/")[0] == 404
    assert get(address, "/metrics", "POST")[0] == 405
    assert get(address, "/metrics?x=1")[0] == 200
    status, _, body = get(address, method="HEAD")
    assert (status, body) == (200, "")


def test_junk_and_silence_at_the_port_harm_nobody(stack: HttpStack) -> None:
    (address,) = _addresses(stack)["probe"]
    host, _, port = address.rpartition(":")
    silent = [socket.create_connection((host, int(port)), timeout=5) for _ in range(5)]
    for junk in (b"\x00" * 100 + b"\r\n\r\n", b"A" * 40_000, b"GET"):
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(junk)
    assert get(address)[0] == 200
    for connection in silent:
        connection.close()
    with stack.web() as web:
        assert web.post("/tools/probe/call", json={"args": {"text": "still"}}).json()["error"] is None


def test_a_port_that_is_taken_is_said_and_not_ignored(stack: HttpStack) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        environment = {
            "PYTHONPATH": f"{TESTS}:{TESTS.parent}",
            "LOCAL2_REDIS_URL": stack.redis.url,
            "LOCAL2_METRICS_PORT": str(port),
        }
        command = [sys.executable, "-m", "support.apps", "judge"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr
