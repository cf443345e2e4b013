"""The acceptance stories on a whole stack, and a story that must fail."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import psutil
import pytest
import redis
import yaml
from local2_stories.runner import StoryReport, live_participants, run_story
from local2_stories.story import Story, Turn, parse_story, shipped_stories
from typer.testing import CliRunner

from services.cli.api import Api
from services.cli.app import app
from services.cli.launch.plan import PARTICIPANTS
from services.cli.settings import ClientSettings
from shared.errors import Local2Error
from shared.testing.script import STORIES

HERE = Path(__file__).parent
RULES: list[dict[str, Any]] = yaml.safe_load(STORIES.read_text(encoding="utf-8"))["rules"]


def harness() -> ModuleType:
    """stories_stack.py beside this file: tests are no package."""
    spec = importlib.util.spec_from_file_location("stories_stack", HERE / "stories_stack.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault("stories_stack", module)
    spec.loader.exec_module(module)
    return module


run = harness()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    log = tmp_path_factory.mktemp("log") / "stack.log"
    with run.stack(log, options=run.SHADOW) as env:
        yield env


@dataclass(frozen=True)
class Said:
    returncode: int
    stdout: str
    stderr: str


def local2(env: dict[str, str], *args: str) -> Said:
    """The command line in this process, which is quicker; that it is a program, too, is seen by `run.local2`."""
    clean: dict[str, str | None] = dict.fromkeys(name for name in os.environ if name.startswith("LOCAL2_"))
    done = CliRunner().invoke(app, list(args), env=clean | env)
    if done.exception is not None and not isinstance(done.exception, SystemExit | Local2Error):
        raise done.exception
    told = f"local2: {done.exception}" if isinstance(done.exception, Local2Error) else ""
    return Said(done.exit_code, done.stdout, done.stderr + told)


@pytest.mark.slow
def test_stories_s1_to_s4_pass_with_every_check_evaluated(client: dict[str, str]) -> None:
    done = run.local2(client, "stories", "S1", "S2", "S3", "S4", *run.variables(client, "S4"), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    reports = {report["id"]: report for report in json.loads(done.stdout)}
    assert {name: report["result"] for name, report in reports.items()} == dict.fromkeys(
        ("S1", "S2", "S3", "S4"), "passed"
    )
    checks = {name: [c["check"] for turn in r["turns"] for c in turn["checks"]] for name, r in reports.items()}
    assert "response.generation: tool_calls_empty" in checks["S1"]
    assert any(check.startswith("in order: tool.request.web_search → tool.result.web_search") for check in checks["S3"])
    four = ("tool.request.web_search", "tool.result.web_search", "tool.request.web_fetch", "tool.result.web_fetch")
    assert f"in order: {' → '.join(four)}" in checks["S4"]


@pytest.mark.slow
def test_what_was_said_and_what_was_saved_is_found_in_another_conversation(client: dict[str, str]) -> None:
    done = local2(client, "stories", "S5", "S6b", "S9", "S10", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    reports = {report["id"]: report["result"] for report in json.loads(done.stdout)}
    assert reports == dict.fromkeys(("S5", "S6b", "S9", "S10"), "passed")


@pytest.mark.slow
def test_answers_are_graded_and_compared_and_their_engrams_say_so(client: dict[str, str]) -> None:
    done = local2(client, "stories", "S6", "S7", "S11", *run.variables(client, "S11"), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    reports = {report["id"]: report for report in json.loads(done.stdout)}
    assert {name: report["result"] for name, report in reports.items()} == dict.fromkeys(("S6", "S7", "S11"), "passed")
    checks = {name: {c["check"] for turn in r["turns"] for c in turn["checks"]} for name, r in reports.items()}
    assert {"critique.result with a score from 1 to 5", "engram of A has score"} <= checks["S6"]
    assert {"pairwise.result names both responses", "engram of A has the verdict: a tie"} <= checks["S7"]
    assert {"winner is A", "winner is B", "winner is tie", "0 rows of the query in the DPO export"} <= checks["S11"]


# ── sabotage ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Sabotage:
    """rules: played before the usual ones. forged: a message of this subject is put on the bus as soon as the query is
    there. check: which check must fail, by name; seen: what is told of it."""

    story: str
    check: str
    seen: str
    rules: list[dict[str, Any]] = field(default_factory=list)
    forged: str = ""
    turns: int | None = None


def says(user: str, text: str, **more: Any) -> dict[str, Any]:
    return {"when": {"user": user, **more}, "respond": {"thinking": "hm", "text": text}}


def calls(user: str, name: str, **args: Any) -> dict[str, Any]:
    return {"when": {"user": user, "tool_results": 0}, "respond": {"tool_calls": [{"name": name, "args": args}]}}


SABOTAGES = [
    Sabotage("S1", "no tool.request.* on the bus", "tool.request.web_search",
             [calls("^What is the capital of France", "web_search", query="x")]),
    Sabotage("S1", "no tool.request.* on the bus", "tool.request.web_fetch",
             [{"when": {"user": "capital of France"}, "respond": {"thinking": "h", "text": "Paris.", "pace": 0.3}}],
             forged="tool.request.web_fetch"),
    Sabotage("S2", 'answer does not contain \'what do you mean by\'', "What do you mean by it?",
             [says("why was it introduced", "What do you mean by it?")]),
    Sabotage("S3", "calls web_search", "called: []", [says("^What major AI news", "Nothing happened.")]),
    Sabotage("S4", "answer does not contain 'I cannot access'", "I cannot access pages",
             [says("top result for", "I cannot access pages.", last_tool="web_fetch")], turns=1),
    Sabotage("S5", "calls search_memory", "called: []",
             [says("^What do you remember about Australian", "I have no memory.")], turns=2),
    Sabotage("S6", "critique.result with a score from 1 to 5", "scores: [None]",
             [says("(?s)capital of France.*###Score Rubrics", "It is what it is.")]),
    Sabotage("S6b", "calls recall_topic", "called: []", [says("^What language do I prefer", "Elixir.")]),
    Sabotage("S7", "answer contains '100'", "It boils.", [says("^What is the boiling point", "It boils.")]),
    Sabotage("S9", "the query is answered", "the model gave no answer",
             [{"when": {"system": "Skeptic", "user": "^Should a small team"}, "respond": {"text": ""}}]),
    Sabotage("S10", "search_knowledge_graph tells a fact that WAS, with Lyon", "lines: []",
             [says("^Where did Anna live before", "In Lyon, I think.")]),
    Sabotage("S11", "winner is A", "'winner': 'B'",
             [says("(?s)flows through.*###Response A:(?:(?!###Response B:).)*Danube", "Feedback: no. [RESULT] B"),
              says("(?s)flows through.*###Response B:.*Danube", "Feedback: no. [RESULT] A")], turns=1),
]  # fmt: skip


def play(env: dict[str, str], rules: list[dict[str, Any]]) -> None:
    script = json.dumps({"rules": [*rules, *RULES]})
    answer = httpx.post(f"{env['MODEL_URL']}/script/rules", content=script, timeout=10, trust_env=False, verify=False)
    assert answer.status_code == 200, answer.text


@pytest.mark.slow
def test_there_is_a_sabotage_for_every_story() -> None:
    assert {sabotage.story for sabotage in SABOTAGES} == set(shipped_stories()) == set(run.STORIES)


@pytest.mark.slow
@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda one: f"{one.story}-{one.check[:30]}")
async def test_one_wrong_effect_fails_the_story_by_name(client: dict[str, str], sabotage: Sabotage) -> None:
    variables = {"page_url": client["PAGE_URL"], "page_heading": run.HEADING, "decided_judge": "scripted"}
    story = parse_story(shipped_stories()[sabotage.story], sabotage.story, variables)
    story = story.model_copy(update={"turns": [_hasty(turn) for turn in story.turns[: sabotage.turns]]})
    settings = ClientSettings(data_dir=Path(client["LOCAL2_DATA_DIR"]), api_port=int(client["LOCAL2_API_PORT"]))
    play(client, sabotage.rules)
    try:
        async with Api(settings) as api:
            if sabotage.forged:
                report = await _forged(api, story, client, sabotage.forged)
            else:
                report = await run_story(api, story, await live_participants(api))
    finally:
        play(client, [])
    assert not report.not_run
    failed = [outcome for turn in report.turns for outcome in turn.outcomes if not outcome.ok]
    assert any(outcome.check == sabotage.check and sabotage.seen in outcome.seen for outcome in failed), failed


def _hasty(turn: Turn) -> Turn:
    """The turn; what is wrong is not waited for to come right."""
    parts = {"engrams": turn.engrams, "preferences": turn.preferences}
    return turn.model_copy(update={name: p.model_copy(update={"within": 2.0}) for name, p in parts.items() if p})


async def _forged(api: Api, story: Story, env: dict[str, str], subject: str) -> StoryReport:
    """Runs a story while somebody puts a message about its query on the bus."""
    socket = next((Path(env["LOCAL2_DATA_DIR"]) / "redis").glob("redis.sock"))
    with redis.Redis(unix_socket_path=str(socket)) as bus:
        last = (bus.xrevrange("local2:query.received", count=1) or [(b"0-0", {})])[0][0]
        running = asyncio.create_task(run_story(api, story, await live_participants(api)))
        async with asyncio.timeout(20):
            while not (found := bus.xread({"local2:query.received": last}, count=1)):
                await asyncio.sleep(0.005)
        query_id = found[0][1][0][0].decode()
        asked = {"query_id": query_id, "call_id": "forged", "tool": "web_fetch", "args": {"url": "x"}, "reply_to": ""}
        bus.xadd(f"local2:{subject}", {"correlation_id": query_id, "payload": json.dumps(asked)})
        return await running


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"tool.request.*"', '"query.*"'),
        ("turns:", "requires: [no-such-participant]\nturns:"),
    ],
)
def test_a_wrong_expectation_makes_the_command_fail(client: dict[str, str], tmp_path: Path, old: str, new: str) -> None:
    text = shipped_stories()["S1"]
    assert old in text
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(text.replace(old, new, 1), encoding="utf-8")
    done = local2(client, "stories", str(wrong))
    assert done.returncode == 1
    assert "FAILED" in done.stdout or "not run" in done.stdout


@pytest.mark.slow
def test_the_commands_of_an_operator_work_against_the_stack(client: dict[str, str]) -> None:
    asked = json.loads(run.local2(client, "ask", "--json", "What is the capital of France?").stdout)
    assert asked["answer"] == "The capital of France is Paris."
    sessions = json.loads(local2(client, "sessions", "list", "--json").stdout)
    assert asked["session_id"] in {row["session_id"] for row in sessions}
    exported = [json.loads(line) for line in local2(client, "export", "sessions").stdout.splitlines()]
    (mine,) = [row for row in exported if row["session_id"] == asked["session_id"]]
    assert [turn["query"] for turn in mine["turns"]] == ["What is the capital of France?"]
    assert local2(client, "sessions", "delete", asked["session_id"]).returncode == 0
    assert local2(client, "sessions", "show", asked["session_id"]).returncode == 1

    key = local2(client, "keys", "add", "ann").stdout.splitlines()[-1]
    as_ann = {**client, "LOCAL2_API_KEY": key}
    assert local2(as_ann, "sessions", "list").stdout.strip() == "no sessions"
    refused = local2(as_ann, "keys", "list")
    assert (refused.returncode, "administrator" in refused.stderr) == (1, True)
    assert run.local2(client, "doctor").returncode == 0


@pytest.mark.slow
def test_the_memory_is_operated_from_the_command_line(client: dict[str, str], tmp_path: Path) -> None:
    key = local2(client, "keys", "add", "mia").stdout.splitlines()[-1]
    mine = {**client, "LOCAL2_API_KEY": key}

    def memory(*args: str) -> str:
        done = local2(mine, "memory", *args)
        assert done.returncode == 0, done.stdout + done.stderr
        return str(done.stdout)

    given = tmp_path / "in.jsonl"
    lines = [
        {"query": "Where is the harbour?", "answer": "In Bergen.", "time": "2025-03-01"},
        {"content": "I like tea."},
    ]
    given.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert "took in 2, refused 0" in memory("import", str(given))
    memory("topics", "save", "user.pet", "A cat named Ida.")
    assert [row["topic"] for row in json.loads(memory("topics", "list", "--json"))] == ["user.pet"]
    (hit,) = json.loads(memory("search", "harbour in Bergen", "--json"))["hits"]
    assert json.loads(memory("show", hit["id"]))["answer"] == "In Bergen."
    assert "Bergen" not in memory("delete", hit["id"]) + memory("list")
    kept = tmp_path / "kept.jsonl"
    assert "forgot 2 engrams" in memory("delete", "--everything", "--export", str(kept))
    assert "nothing is remembered" in memory("list")
    assert "took in 2, refused 0" in memory("import", str(kept))
    assert {json.loads(line)["content"] for line in memory("export").splitlines()} == {
        "I like tea.",
        "A cat named Ida.",
    }
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"query": "ok?", "answer": "yes"}\n[]\n{"session_id": "s"}\n', encoding="utf-8")
    refused = local2(mine, "memory", "import", str(bad))
    assert (refused.returncode, "line 2" in refused.stdout, "line 3" in refused.stdout) == (1, True, True)


@pytest.mark.slow
def test_dead_letters_are_listed_shown_replayed_and_dropped(client: dict[str, str]) -> None:
    url = next((Path(client["LOCAL2_DATA_DIR"]) / "redis").glob("redis.sock"))
    with redis.Redis(unix_socket_path=str(url)) as bus:
        for number in (b"1", b"2"):
            bus.xadd("local2:tool.request.web_fetch", {"payload": b"not json " + number})
        deadline = time.monotonic() + 20
        while bus.xlen("local2:dead.letter") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    letters = json.loads(local2(client, "dead-letters", "list", "--json").stdout)
    assert [letter["stream"] for letter in letters] == ["local2:tool.request.web_fetch"] * 2
    first, second = (letter["id"] for letter in letters)
    assert json.loads(local2(client, "dead-letters", "show", second).stdout)["fields"]["payload"] == "not json 2"
    assert local2(client, "dead-letters", "drop", first).returncode == 0
    assert local2(client, "dead-letters", "show", first).returncode == 1
    assert local2(client, "dead-letters", "replay", second).returncode == 0
    again = json.loads(local2(client, "dead-letters", "list", "--json").stdout)
    assert second not in {letter["id"] for letter in again}


@pytest.mark.slow
def test_a_second_run_on_the_same_folder_is_refused(client: dict[str, str]) -> None:
    done = run.local2(client, "run", "--headless", "--api-port", str(run.free_port()))
    assert done.returncode == 1
    assert "LoCAL2 already runs on the data folder" in done.stderr


@pytest.mark.slow
def test_after_kill_9_of_local2_run_no_process_is_left_and_it_can_start_again(
    client: dict[str, str], tmp_path: Path
) -> None:
    """The last test on the stack, which it ends."""
    supervisor = psutil.Process(int((Path(client["LOCAL2_DATA_DIR"]) / "run.lock").read_text()))
    # Redis, and every participant but mcp, which has no servers here
    children = supervisor.children()
    assert len(children) == len(PARTICIPANTS), [child.cmdline() for child in children]
    # and who reads pages for one of them
    children = supervisor.children(recursive=True)
    asked = json.loads(run.local2(client, "ask", "What is the capital of France?", "--json").stdout)
    supervisor.kill()
    # at once: the next one waits for what is still ending
    with (tmp_path / "stack.log").open("ab") as out:
        command = [sys.executable, "-m", "services.cli", "run", "--headless"]
        with run.program(command, client, out) as again:
            # until they are gone, a gateway of before may still answer at this port
            assert psutil.wait_procs(children, timeout=60)[1] == []
            run.wait_until_ready(f"http://127.0.0.1:{client['LOCAL2_API_PORT']}", again)
            # The bus kept its data: the session of before is still there.
            sessions = json.loads(run.local2(client, "sessions", "list", "--json").stdout)
            assert asked["session_id"] in {row["session_id"] for row in sessions}


@pytest.mark.slow
def test_a_named_ollama_that_comes_after_the_start_is_waited_for_and_used(tmp_path: Path) -> None:
    log = tmp_path / "stack.log"
    model_port, api_port = run.free_port(), run.free_port()
    env = run.clean_environment(tmp_path) | {
        "OLLAMA_HOST": f"http://127.0.0.1:{model_port}",
        "LOCAL2_API_PORT": str(api_port),
        "LOCAL2_WEB_SEARCH_PROVIDER": "mock",
    }
    url = f"http://127.0.0.1:{api_port}"
    with (
        log.open("ab") as out,
        run.program([sys.executable, "-m", "services.cli", "run", "--headless"], env, out) as one,
    ):
        deadline = time.monotonic() + run.START
        while True:
            assert one.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            try:
                ready = httpx.get(f"{url}/ready", trust_env=False, verify=False, timeout=5)
            except httpx.TransportError:
                time.sleep(0.05)
                continue
            if "Ollama does not answer" in str(ready.json()["parts"]["model"].get("reason")):
                break
            time.sleep(0.05)
        assert ready.status_code == 503
        doctor = run.local2(env, "doctor")
        assert doctor.returncode == 1
        assert "waited for" in doctor.stdout
        model = [sys.executable, "-m", "shared.testing.model_server", "--port", str(model_port)]
        with run.program(model, env, out):
            run.wait_until_ready(url, one)
            part = httpx.get(f"{url}/ready", trust_env=False, verify=False, timeout=5).json()["parts"]["model"]
            assert (part["demo"], part["facts"]["server"]) == (False, "Ollama")
            asked = run.local2(env, "ask", "What is the capital of France?", "--json")
            assert "Paris" in json.loads(asked.stdout)["answer"]
    said = log.read_text()
    assert f"Ollama does not answer at http://127.0.0.1:{model_port} (" in said
    assert "; waiting for it" in said
    assert f"Ollama answers now at http://127.0.0.1:{model_port}" in said
    assert "DEMO" not in said
