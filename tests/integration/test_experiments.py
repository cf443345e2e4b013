"""Experiments: begun, decided, promoted and taken back; whatever dies on the way."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
from support.command_line import local2
from support.http_gateway import Site, gateway_settings, serving
from support.services import announced, running
from support.stack import respondent, stage
from support.waiting import eventually

from services.critic.service import app as critic
from services.critic.settings import CriticSettings
from services.generator.settings import GeneratorSettings
from services.reward.service import app as reward
from services.reward.settings import RewardSettings
from services.reward.store import Store
from shared.bus.keys import schema_key, settings_key
from shared.participant.service import open_context
from shared.participant.settings import Settings
from shared.participant.tool_client import Caller, ToolClient

# Answers of known quality: who is told to be warm answers warmly, and the judge prefers that wherever it stands.
RULES: list[dict[str, Any]] = [
    {"when": {"user": "(?s)###Response A:\\s*Well"}, "respond": {"text": "Warm. [RESULT] A"}},
    {"when": {"user": "(?s)###Response B:\\s*Well"}, "respond": {"text": "Warm. [RESULT] B"}},
    {"when": {"user": "###Score Rubrics"}, "respond": {"text": "Right. [RESULT] 3"}},
    {"when": {"system": "be warm"}, "respond": {"text": "Well: <<query>>"}},
    {"respond": {"text": "Plain: <<query>>"}},
]


# ── the whole stack ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_experiment_from_its_start_to_its_promotion_and_back(
    redis_url: str, raw: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common: dict[str, Any] = {"redis_url": redis_url, "heartbeat": 0.5, "drain": 0.5, "data_dir": tmp_path}
    async with stage(redis_url, RULES, heartbeat=0.5) as on, contextlib.AsyncExitStack() as stack:
        shadow = GeneratorSettings(**on.settings.model_dump() | {"respondent_id": "B", "yield_rest": 0})
        await stack.enter_async_context(running(respondent(shadow), shadow))
        judge = CriticSettings(**common, ollama_host=on.server.url, yield_rest=0)
        await stack.enter_async_context(running(critic, judge))
        await stack.enter_async_context(running(reward, RewardSettings(**common, samples=50)))
        for name in ("respondent-b", "critic", "reward"):
            await announced(redis_url, name)
        site = await stack.enter_async_context(serving(gateway_settings(redis_url, tmp_path, heartbeat=0.5)))
        http = site.http

        async def ask(text: str) -> str:
            answer = await http.post("/query", json={"query": text})
            assert answer.status_code == 200, answer.text
            return str(answer.json()["answer"])

        async def asked_until(wanted: str) -> None:
            """Settings reach the replicas a moment after they are changed."""
            await eventually(lambda: _is(ask("And now?"), wanted), 10, f"A answers {wanted}")

        prompt = tmp_path / "prompt.md"
        prompt.write_text("You are an assistant. Be warm.\n")
        begun = await local2(monkeypatch, site, "experiment", "start", "warmer", "--b", f"prompt=@{prompt}")
        assert begun.exit_code == 0, begun.output
        assert "warmer (running): prompt" in begun.output
        early = await http.post("/experiments/warmer/promote")
        assert (early.status_code, early.json()["error"]["code"]) == (409, "experiment_refused")
        assert "do not say that B is better" in early.json()["error"]["message"]

        async def decided() -> dict[str, Any] | None:
            await ask("Is it so?")
            shown: dict[str, Any] = (await http.get("/experiments/warmer")).json()
            return shown if shown["result"]["decision"] == "better" else None

        shown = await eventually(decided, 40, "B is found better", every=0.1)
        assert shown["result"]["losses"] == shown["result"]["ties"] == 0
        assert shown["result"]["low"] > 0.5
        assert shown["changed"] == ["prompt"]
        assert shown["a"]["temperature"] == shown["b"]["temperature"] is None
        assert shown["intents"]["question"]["wins"] == shown["result"]["wins"]
        assert shown["warnings"] == [] or all("do not count" in text for text in shown["warnings"])
        told = await local2(monkeypatch, site, "experiment", "show")
        assert "B is better (since verdict" in told.output

        promoted = await local2(monkeypatch, site, "experiment", "promote", "warmer")
        assert "warmer (promoted)" in promoted.output
        await asked_until("Well: And now?")
        values = (await http.get("/participants/generator/settings")).json()["values"]
        assert values["system_prompt"] == "You are an assistant. Be warm."
        # a run-time setting: it is there after a restart, whatever the environment says
        async with open_context("generator", on.settings) as anew:
            assert anew.settings.system_prompt == values["system_prompt"]
        assert raw.hgetall(settings_key("respondent-b")) == {}

        reverted = await local2(monkeypatch, site, "experiment", "revert", "warmer")
        assert "warmer (reverted)" in reverted.output
        await asked_until("Plain: And now?")
        assert raw.hgetall(settings_key("generator")) == {}
        listed = await local2(monkeypatch, site, "experiment", "show", "--json")
        assert [row["state"] for row in orjson.loads(listed.stdout)] == ["reverted"]
        await _refusals(site)


async def _is(answer: Any, wanted: str) -> bool:
    return bool(await answer == wanted)


async def _refusals(site: Site) -> None:
    """What a client can do wrong, as it is told."""
    async with await site.key("ann") as ann:
        for method, path in (("GET", ""), ("POST", ""), ("GET", "/x"), ("POST", "/x/stop"), ("POST", "/x/promote")):
            assert (await ann.request(method, f"/experiments{path}", json={})).status_code == 403, path
    for path in ("/nothing", "/nothing/stop", "/nothing/promote", "/nothing/revert"):
        answer = await (site.http.get if path == "/nothing" else site.http.post)(f"/experiments{path}")
        assert answer.status_code == 404, path
    wrong = await site.http.post("/experiments", json={"name": "x", "b": {"think": False}})
    assert wrong.status_code == 422
    assert "think cannot be tried; an experiment sets: model, prompt, temperature" in wrong.text
    assert (await site.http.post("/experiments/warmer/stop")).status_code == 409


# ── reward alone ─────────────────────────────────────────────────────────────────────────────────────────────────


def described(participant: str, raw: redis.Redis, **values: Any) -> None:
    """What a participant says of its settings, without one."""
    settings = GeneratorSettings(respondent_id="B" if participant == "respondent-b" else "A", **values)
    told = {"schema": settings.get_settings_schema(), "defaults": settings.runtime_values()}
    raw.set(schema_key(participant), orjson.dumps(told))


def stored(participant: str, raw: redis.Redis) -> dict[str, Any]:
    found: dict[bytes, bytes] = raw.hgetall(settings_key(participant))  # type: ignore[assignment]
    return {name.decode(): orjson.loads(value) for name, value in found.items()}


class Desk:
    """Asks reward as the gateway does."""

    def __init__(self, tools: ToolClient) -> None:
        self._tools = tools

    async def __call__(self, op: str, name: str = "", **args: Any) -> dict[str, Any]:
        """What was found; `error` when it was not understood, `refused` when it cannot be done now."""
        caller = Caller(uuid.uuid4().hex, user_id="")
        outcome = await self._tools.call(
            "reward_manage", {"op": op, "name": name, **args}, call_id=caller.query_id, caller=caller, timeout=10,
            internal=True,
        )  # fmt: skip
        if outcome.error is not None:
            return {"error": outcome.error}
        found: dict[str, Any] = outcome.data
        return found.get("experiment") or found


@contextlib.asynccontextmanager
async def desk(url: str, folder: Path) -> AsyncIterator[Desk]:
    common: dict[str, Any] = {"redis_url": url, "heartbeat": 0.5, "drain": 0.5, "data_dir": folder}
    async with running(reward, RewardSettings(**common)):
        await announced(url, "reward")
        async with open_context("office", Settings(**common)) as context:
            yield Desk(ToolClient(context))


async def test_one_experiment_at_a_time_is_configured_as_a_but_for_what_is_named(
    redis_url: str, raw: redis.Redis, tmp_path: Path
) -> None:
    described("generator", raw, model="big:7b", system_prompt="Be good.", temperature=0.2)
    async with desk(redis_url, tmp_path) as ask:
        assert "no respondent-b was ever here" in (await ask("start", "one", b={"model": "small:1b"}))["refused"]
        described("respondent-b", raw, model="other:1b")
        raw.hset(settings_key("respondent-b"), "model", '"kept:3b"')
        for b, reason in (
            ({}, "b: name at least one of model, prompt, temperature"),
            ({"num_ctx": 9}, "b: num_ctx cannot be tried"),
            ({"temperature": 9}, "b: temperature: 9 is greater than the maximum of 2"),
            ({"model": 7}, "b: model: 7 is not of type 'string'"),
            ({"temperature": 0.2}, "b: that is how the generator is configured already"),
        ):
            assert (await ask("start", "one", b=b))["error"].startswith(reason)
        assert (await ask("start", "a b", b={"model": "small:1b"}))["error"].startswith("name: up to 64")
        assert await ask("experiments") == {"experiments": []}
        begun = await ask("start", "one", b={"temperature": None})
        assert (begun["state"], begun["changed"]) == ("running", ["temperature"])
        trying = {"model": "big:7b", "system_prompt": "Be good.", "temperature": None}
        assert stored("respondent-b", raw) == trying
        assert any("no respondent-b is running" in text for text in begun["warnings"])
        assert "one is running: one at a time" in (await ask("start", "two", b={"model": "x"}))["refused"]
        # A is changed by somebody: what it answers now is not what B is compared with
        raw.hset(settings_key("generator"), "model", '"new:7b"')
        warned = await ask("experiment", "one")
        assert any("settings of generator were changed" in text for text in warned["warnings"])
        assert (await ask("stop", "one"))["state"] == "stopped"
        assert stored("respondent-b", raw) == {"model": "kept:3b"}
        assert (
            "one is stopped; only one that is running can be promoted"
            in ((await ask("promote", "one", force=True))["refused"])
        )
        assert "there was an experiment one before" in (await ask("start", "one", b={"model": "x"}))["refused"]


async def test_the_promotion_before_the_last_is_not_taken_back_first(
    redis_url: str, raw: redis.Redis, tmp_path: Path
) -> None:
    for participant in ("generator", "respondent-b"):
        described(participant, raw, model="big:7b", system_prompt="Be good.")
    raw.hset(settings_key("generator"), "temperature", "0.3")
    async with desk(redis_url, tmp_path) as ask:
        for name, model in (("one", "x:1b"), ("two", "y:1b")):
            await ask("start", name, b={"model": model})
            assert (await ask("promote", name, force=True))["state"] == "promoted"
            assert stored("generator", raw)["model"] == model
            await asyncio.sleep(0.002)
        assert "two was promoted after it" in (await ask("revert", "one"))["refused"]
        assert (await ask("revert", "two"))["state"] == "reverted"
        assert stored("generator", raw)["model"] == "x:1b"
        assert (await ask("revert", "one"))["state"] == "reverted"
        assert stored("generator", raw) == {"temperature": 0.3}


async def test_what_another_server_answers_with_is_not_promoted(
    redis_url: str, raw: redis.Redis, tmp_path: Path
) -> None:
    common: dict[str, Any] = {"redis_url": redis_url, "heartbeat": 0.5, "data_dir": tmp_path}
    async with (
        desk(redis_url, tmp_path) as ask,
        open_context("respondent-b", Settings(**common)) as b,
        open_context("generator", Settings(**common)) as a,
    ):
        for participant in ("generator", "respondent-b"):
            described(participant, raw, model="big:7b", system_prompt="Be good.")
        a.facts.update(backend="ollama", server="http://one:11434")
        b.facts.update(backend="openai", server="http://two:8000")
        await a.announce()
        await b.announce()
        await ask("start", "one", b={"model": "x:1b"})

        async def refused() -> str | None:
            return (await ask("promote", "one", force=True)).get("refused")

        reason = await eventually(refused, 10, "the servers are known")
        assert "LOCAL2_GENERATOR_BACKEND=openai and LOCAL2_GENERATOR_BASE_URL=http://two:8000" in reason
        assert stored("generator", raw) == {}
        assert (await ask("experiment", "one"))["state"] == "running"


@pytest.mark.parametrize(
    ("state", "after", "a", "b"),
    [
        ("starting", "running", {}, {"model": "b"}),
        ("stopping", "stopped", {}, {"model": "was"}),
        ("promoting", "promoted", {"model": "b"}, {"model": "was"}),
        ("reverting", "reverted", {"model": "a"}, {}),
    ],
)
async def test_a_reward_that_died_between_two_steps_finishes_them_when_it_is_back(
    state: str, after: str, a: dict[str, Any], b: dict[str, Any], redis_url: str, raw: redis.Redis, tmp_path: Path
) -> None:
    """What it meant to do is in its store; nothing of it may have happened yet."""
    for participant in ("generator", "respondent-b"):
        described(participant, raw)
    store = Store(RewardSettings(data_dir=tmp_path).path)
    tried = {"model": "b", "system_prompt": "p", "temperature": None}
    row = {
        "name": "one", "state": state, "config_a": "{}", "config_b": "{}", "started": 1, "ended": 2,
        "settings_a": orjson.dumps({**tried, "model": "a"}).decode(), "settings_b": orjson.dumps(tried).decode(),
        "before_a": '{"changed": {"model": "a"}, "unset": ["system_prompt", "temperature"]}',
        "before_b": '{"changed": {"model": "was"}, "unset": ["system_prompt", "temperature"]}',
    }  # fmt: skip
    store.put("experiments", row)
    store.close()
    async with desk(redis_url, tmp_path) as ask:

        async def done() -> bool:
            return bool((await ask("experiment", "one"))["state"] == after)

        await eventually(done, 20, "it is done")
    for participant, wanted in (("generator", a), ("respondent-b", b)):
        found = stored(participant, raw)
        assert {name: found[name] for name in wanted} == wanted
        assert bool(found) == bool(wanted)


async def test_a_step_that_cannot_be_taken_yet_is_taken_when_it_can(
    redis_url: str, raw: redis.Redis, tmp_path: Path
) -> None:
    """A participant that was never here cannot be configured."""
    store = Store(RewardSettings(data_dir=tmp_path).path)
    before = '{"changed": {}, "unset": ["model"]}'
    store.put("experiments", {
        "name": "one", "state": "stopping", "config_a": "{}", "config_b": "{}", "started": 1, "ended": 2,
        "settings_a": '{"model": "a", "system_prompt": "p", "temperature": null}',
        "settings_b": '{"model": "b", "system_prompt": "p", "temperature": null}',
        "before_a": None, "before_b": before,
    })  # fmt: skip
    store.close()
    async with desk(redis_url, tmp_path) as ask:
        assert (await ask("experiment", "one"))["state"] == "stopping"
        described("respondent-b", raw)

        async def done() -> bool:
            return bool((await ask("experiment", "one"))["state"] == "stopped")

        await eventually(done, 20, "it is done")


def test_only_verdicts_of_both_configurations_in_its_time_count(tmp_path: Path) -> None:
    store = Store(tmp_path / "preferences.sqlite")
    verdict = {"response_a": "a", "response_b": "b", "winner": "B", "reason": "", "config_a": "A", "config_b": "B",
               "session_id": "s", "time": 5}  # fmt: skip
    for query_id, changed in (
        ("99-0", {}),
        ("100-0", {"time": 9}),
        ("101-0", {"config_a": "other"}),
        ("102-0", {"winner": "tie"}),
        ("200-0", {}),
    ):
        store.put("pairs", {**verdict, "query_id": query_id, **changed})
    experiment = {"config_a": "A", "config_b": "B", "started": 100}
    found = store.trial_rows(experiment, 200)
    assert [(row["winner"], row["counts"]) for row in found] == [("B", 0), ("tie", 1), ("B", 1)]
    assert len(store.trial_rows(experiment, None)) == 4
    store.close()
