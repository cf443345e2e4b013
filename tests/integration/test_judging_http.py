"""Judging as clients see it: grades, verdicts and votes in the result and the stream, the ranking, the exports."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from pydantic import BaseModel
from support.command_line import local2
from support.http_gateway import Site, client, events, gateway_settings, serving
from support.lives import unending
from support.services import announced, running
from support.stack import Stage, respondent, stage
from support.waiting import eventually

from services.critic.service import app as critic
from services.critic.settings import CriticSettings
from services.generator.settings import GeneratorSettings
from services.reward.service import app as reward
from services.reward.settings import RewardSettings
from shared.contracts import PAIRWISE_RESULT, RESPONSE_GENERATION, USER_FEEDBACK, ToolRequest
from shared.errors import ToolError
from shared.participant.service import Context, Service, Work
from shared.participant.settings import Settings
from shared.participant.tool import Tool, ToolResult, open_tools

# The judge prefers the answer of the warmer respondent, and grades it higher.
RULES: list[dict[str, Any]] = [
    {"when": {"user": "(?s)###Response A:\\s*Well"}, "respond": {"text": "Warm. [RESULT] A"}},
    {"when": {"user": "(?s)###Response B:\\s*Well"}, "respond": {"text": "Warm. [RESULT] B"}},
    {"when": {"user": "(?s)###Response to evaluate:\\s*Well"}, "respond": {"text": "Warm and right. [RESULT] 5"}},
    {"when": {"user": "###Score Rubrics"}, "respond": {"text": "Right. [RESULT] 3"}},
]


@dataclass
class House:
    site: Site
    on: Stage
    ann: httpx.AsyncClient
    bob: httpx.AsyncClient

    async def ask(self, query: str, session: str | None = None) -> dict[str, Any]:
        body = {"query": query, **({"session_id": session} if session else {})}
        answer = await self.ann.post("/query", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def judged(self, query_id: str, *wanted: str) -> dict[str, Any]:
        """The query's result, as soon as it has all of these."""

        async def look() -> dict[str, Any] | None:
            shown: dict[str, Any] = (await self.ann.get(f"/queries/{query_id}?event_log=true")).json()
            return shown if all(name in shown for name in wanted) else None

        found: dict[str, Any] = await eventually(look, 20, f"{wanted} of {query_id}")
        return found

    async def rows(self, kind: str, **params: Any) -> list[dict[str, Any]]:
        answer = await self.site.http.get("/preferences/export", params={"format": kind, **params})
        assert answer.status_code == 200, answer.text
        return [json.loads(line) for line in answer.text.splitlines()]

    async def settled(self) -> None:
        async def done() -> bool:
            reads = [(RESPONSE_GENERATION, "critic"), (RESPONSE_GENERATION, "reward"), (PAIRWISE_RESULT, "reward"),
                     (USER_FEEDBACK, "reward")]  # fmt: skip
            return not any([await self.on.bus.backlog(subject.stream, group) for subject, group in reads])

        await eventually(done, 20, "everything is judged")


@pytest.fixture
async def house(redis_url: str, tmp_path: Path) -> AsyncIterator[House]:
    """A gateway, both respondents, critic and reward, at a scripted model; B answers at another temperature."""
    common: dict[str, Any] = {"redis_url": redis_url, "heartbeat": 0.5, "drain": 0.5, "data_dir": tmp_path}
    answers = [
        {"when": {"model": "shadow"}, "respond": {"text": "Well: <<query>>"}},
        {"respond": {"text": "Plain: <<query>>"}},
    ]
    async with stage(redis_url, [*RULES, *answers], heartbeat=0.5) as on, contextlib.AsyncExitStack() as stack:
        b = GeneratorSettings(
            **on.settings.model_dump() | {"respondent_id": "B", "model": "shadow", "temperature": 0.5}
        )
        ollama = {"ollama_host": on.server.url, "yield_rest": 0}
        await stack.enter_async_context(running(respondent(b), b))
        await stack.enter_async_context(running(critic, CriticSettings(**common, **ollama)))
        await stack.enter_async_context(running(reward, RewardSettings(**common, samples=50)))
        for name in ("respondent-b", "critic", "reward"):
            await announced(redis_url, name)
        site = await stack.enter_async_context(serving(gateway_settings(redis_url, tmp_path, heartbeat=0.5)))
        ann = await stack.enter_async_context(await site.key("ann"))
        bob = await stack.enter_async_context(await site.key("bob"))
        yield House(site, on, ann, bob)


async def test_grade_verdict_and_vote_are_in_the_result(house: House) -> None:
    asked = await house.ask("Is it so?")
    shown = await house.judged(asked["query_id"], "critique", "pairwise")
    assert shown["critique"] == {"score": 3, "feedback": "Right.", "rubric": "realistic"}
    assert (shown["pairwise"]["winner"], shown["pairwise"]["score_a"], shown["pairwise"]["score_b"]) == ("B", 3, 5)
    # the shadow's words are not in it
    assert "Well" not in json.dumps(shown)
    assert "reward" not in shown
    for stars in (5, 2):
        assert (await house.ann.post("/feedback", json={"query_id": asked["query_id"], "stars": stars})).is_success
    await house.settled()
    shown = await house.judged(asked["query_id"], "reward")
    stars = {"reward": -0.5, "sentiment": "negative", "thumb": None, "stars": 2, "comment": None}
    assert shown["reward"] == stars
    assert {"critique.result", "pairwise.result", "reward.event"} <= set(shown["events"])
    # a thumb leaves the stars, which say more; each is withdrawn by itself, and what is not there changes nothing
    vote = f"/feedback/{asked['query_id']}"
    good = {"reward": 1.0, "sentiment": "positive", "thumb": "positive", "stars": None, "comment": None}
    changes: list[tuple[str, str, dict[str, Any] | None]] = [
        ("POST", "/feedback", {**stars, "thumb": "positive"}),
        ("DELETE", f"{vote}?what=stars", good),
        ("DELETE", f"{vote}?what=stars", good),
        ("DELETE", vote, None),
        ("DELETE", vote, None),
        ("POST", "/feedback", good),
    ]
    for method, path, wanted in changes:
        body = {"query_id": asked["query_id"], "sentiment": "positive"} if method == "POST" else None
        answer = await house.ann.request(method, path, json=body)
        assert answer.status_code == 202, answer.text
        await house.settled()
        assert (await house.ann.get(f"/queries/{asked['query_id']}")).json().get("reward") == wanted, path
        kept = await house.rows("kto", human_only=True)
        assert [row["label"] for row in kept] == ([] if wanted is None else [wanted["reward"] > 0]), path


async def test_a_stream_that_is_followed_ends_with_the_critique(house: House) -> None:
    body = {"query": "Is it so?"}
    async with house.ann.stream(
        "POST", "/query?follow=true", json=body, headers={"Accept": "text/event-stream"}
    ) as answer:
        kinds = events((await answer.aread()).decode())
    assert kinds[-1][1] == "critique"
    assert json.loads(kinds[-1][2])["score"] == 3
    assert [kind for _, kind, _ in kinds].count("completed") == 1


async def test_nobody_rates_anothers_query_or_the_shadow(house: House) -> None:
    asked = await house.ask("Is it so?")
    vote = {"query_id": asked["query_id"], "sentiment": "positive"}
    assert (await house.bob.post("/feedback", json=vote)).status_code == 404
    assert (await house.bob.get(f"/queries/{asked['query_id']}")).status_code == 404
    assert (await house.ann.post("/feedback", json={**vote, "respondent_id": "B"})).status_code == 422
    assert (await house.ann.post("/feedback", json=vote)).status_code == 202
    await house.settled()
    shadow = (await house.ann.get(f"/queries/{asked['query_id']}", params={"respondent": "B"})).json()
    assert "reward" not in shadow


async def test_respondents_show_what_they_heard_of_their_answers(house: House) -> None:
    asked = await house.ask("Is it so?")
    await house.ann.post("/feedback", json={"query_id": asked["query_id"], "stars": 4})

    async def told() -> list[Any]:
        found = (await house.site.http.get("/participants")).json()["participants"]
        (generator,) = [one for one in found if one["name"] == "generator"]
        return [row for replica in generator["replicas"] for row in replica.get("facts", {}).get("rewards", [])]

    (row,) = await eventually(told, 15, "the generator shows its reward")
    assert (row["count"], row["mean"], row["intent"]) == (1, 0.5, "question")
    assert row["config"]["model"] == house.on.settings.model


async def judge_many(house: House) -> list[str]:
    """Six queries in three sessions, two of them the same; votes on three."""
    ids = []
    for number in range(6):
        asked = await house.ask(
            "The same?" if number in (2, 4) else f"What is number {number}?", f"session-{number % 3}"
        )
        ids.append(asked["query_id"])
    for query_id in ids:
        await house.judged(query_id, "critique", "pairwise")
    for query_id, stars in zip(ids, (5, 1, 4), strict=False):
        await house.ann.post("/feedback", json={"query_id": query_id, "stars": stars})
    await house.settled()
    return ids


def shape(value: Any) -> Any:
    """The types of a JSON value, for comparing rows; null has a type of its own, which no column may have."""
    if isinstance(value, dict):
        return {name: shape(item) for name, item in value.items()}
    if isinstance(value, list):
        shapes = [shape(item) for item in value]
        assert all(one == shapes[0] for one in shapes)
        return [shapes[0]] if shapes else []
    if isinstance(value, float):
        assert math.isfinite(value)
    return type(value).__name__


COLUMNS = {
    "dpo": ["prompt", "chosen", "rejected", "split", "provenance"],
    "kto": ["prompt", "completion", "label", "split", "provenance"],
    "critiques": ["prompt", "completion", "score", "split", "provenance"],
}
MESSAGES = [{"role": "str", "content": "str"}]


async def test_every_row_of_a_file_has_the_columns_and_types_that_trainers_document(house: House) -> None:
    await judge_many(house)
    for kind, columns in COLUMNS.items():
        rows = await house.rows(kind, test_share=0.5)
        assert len(rows) >= 3, kind
        shapes = [shape(row) for row in rows]
        assert all(one == shapes[0] for one in shapes), kind
        assert "NoneType" not in json.dumps(shapes[0]), kind
        assert list(rows[0]) == columns
        for name in {"prompt", "chosen", "rejected", "completion"} & set(columns):
            assert shapes[0][name] == MESSAGES
        for row in rows:
            roles = [message["role"] for message in row["prompt"]]
            assert (roles[0], roles[-1]) == ("system", "user")
            assert set(roles[1:]) <= {"user", "assistant"}
            assert ("###Score Rubrics:" in row["prompt"][-1]["content"]) == (kind == "critiques")
    assert shape(await house.rows("kto"))[0]["label"] == "bool"


async def test_duplicates_come_once_a_session_is_in_one_part_and_filters_filter(house: House) -> None:
    ids = await judge_many(house)
    dpo = await house.rows("dpo", test_share=0.5)
    # number 2 and 4 are the same words, though in two conversations
    prompts = [json.dumps(row["prompt"]) for row in dpo]
    assert len(prompts) == len(set(prompts))
    parts: dict[str, set[str]] = {}
    for row in dpo:
        parts.setdefault(row["provenance"]["session_id"], set()).add(row["split"])
    assert all(len(names) == 1 for names in parts.values())
    assert {row["split"] for row in await house.rows("dpo", test_share=1)} == {"test"}
    assert {row["split"] for row in await house.rows("dpo")} == {"train"}
    # a vote for A against the judge takes the pair out; one against A bears the verdict out
    assert [row["provenance"]["query_id"] for row in await house.rows("dpo", human_only=True)] == [ids[1]]
    assert len(await house.rows("dpo", min_margin=2)) == len(dpo)
    assert await house.rows("dpo", min_margin=3) == []
    assert await house.rows("dpo", consented=True) == []
    assert (await house.ann.put("/preferences/consent", json={"consent": True})).is_success
    assert len(await house.rows("dpo", consented=True)) == len(dpo)
    assert await house.rows("kto", until=1) == []


async def test_nothing_of_who_refused_or_deleted_leaves_in_any_file(house: House) -> None:
    """Each conversation has a word of its own; the files have those that may be in them, and no others."""
    whose = {"KEPT": house.ann, "DELETED": house.ann, "REFUSED": house.bob}
    asked = {}
    for word, person in whose.items():
        body = {"query": f"What is {word}?", "session_id": word.lower()}
        asked[word] = (await person.post("/query", json=body)).json()["query_id"]
    await house.settled()
    for word, person in whose.items():
        voted = await person.post("/feedback", json={"query_id": asked[word], "sentiment": "negative"})
        assert voted.is_success
    await house.settled()
    for kind in COLUMNS:
        assert {word for word in whose if word in json.dumps(await house.rows(kind))} == set(whose), kind
    assert (await house.bob.put("/preferences/consent", json={"consent": False})).is_success
    assert (await house.ann.delete("/sessions/deleted")).is_success

    async def gone() -> bool:
        return not any(["DELETED" in json.dumps(await house.rows(kind)) for kind in COLUMNS])

    await eventually(gone, 20, "what was deleted is in no file")
    for kind in COLUMNS:
        text = json.dumps(await house.rows(kind))
        assert [word for word in whose if word in text or word.lower() in text] == ["KEPT"], kind


async def test_exports_and_the_ranking_are_for_administrators(house: House) -> None:
    refused = await house.ann.get("/preferences/export", params={"format": "dpo"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    wrong = await house.site.http.get("/preferences/export", params={"format": "parquet"})
    assert wrong.status_code == 422
    # a misspelt filter must not give away what it was to hold back
    for name in ("consent", "human-only"):
        refused = await house.site.http.get("/preferences/export", params={"format": "kto", name: True})
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "invalid_request")
        assert name in refused.json()["error"]["message"]
    assert (await house.ann.get("/preferences/export/counts")).status_code == 403
    assert (await house.site.http.get("/preferences/export/counts?consent=true")).status_code == 422
    counts = (await house.site.http.get("/preferences/export/counts?consented=true")).json()
    assert [(kind, one["rows"], one["why"][:7]) for kind, one in counts.items()] == [
        (kind, 0, "no rows") for kind in ("dpo", "kto", "critiques")
    ]
    refused = await house.ann.get("/preferences/leaderboard")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    board = await house.site.http.get("/preferences/leaderboard")
    assert (board.status_code, board.json()["judge"]["rows"]) == (200, [])
    assert (await house.bob.get("/preferences/consent")).json() == {"user_id": "bob", "consent": None}


# ── the command line ─────────────────────────────────────────────────────────────────────────────────────────────


def files(folder: Path, names: str) -> list[Path]:
    return list(folder.glob(names))


async def test_the_command_line_shows_the_ranking_and_writes_the_files(
    house: House, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    empty = await local2(monkeypatch, house.site, "leaderboard")
    assert (empty.exit_code, "nothing to rank yet" in empty.output) == (0, True)
    none = await local2(monkeypatch, house.site, "export", "dpo")
    assert "no rows: there are no verdicts yet" in none.stderr
    nothing = await local2(monkeypatch, house.site, "leaderboard", "--intent", "code")
    assert (nothing.exit_code, "none yet" in nothing.output) == (1, True)
    await judge_many(house)
    table = await local2(monkeypatch, house.site, "leaderboard")
    assert table.exit_code == 0
    assert "shadow · temperature=0.5" in table.output
    assert "█" in table.output
    assert "the two orders disagree in 0% of 6 comparisons" in table.output
    judged = await local2(monkeypatch, house.site, "judge")
    assert "The judge: ggozad/prometheus2" in judged.output
    assert "answers have a grade and a vote" in judged.output
    known = json.loads((await local2(monkeypatch, house.site, "judge", "--json")).output)
    assert (known["disagreement"]["cases"], known["disagreement"]["value"]) == (6, 0)
    one = await local2(monkeypatch, house.site, "leaderboard", "--intent", "question")
    assert (one.exit_code, "By people" in one.output) == (0, True)
    board = json.loads((await local2(monkeypatch, house.site, "leaderboard", "--json")).output)
    assert [row["config"]["model"] for row in board["judge"]["rows"]] == ["shadow", house.on.settings.model]
    for kind in COLUMNS:
        path = tmp_path / f"{kind}.jsonl"
        written = await local2(monkeypatch, house.site, "export", kind, "--out", str(path))
        assert written.exit_code == 0, written.output
        assert [json.loads(line) for line in path.read_text().splitlines()] == await house.rows(kind)
    key = house.ann.headers["authorization"].removeprefix("Bearer ")
    refused = await local2(monkeypatch, house.site, "export", "dpo", "--out", str(tmp_path / "no"), key=key)
    assert (refused.exit_code, files(tmp_path, "no*")) == (1, [])


class Exported(BaseModel):
    """Read preference data."""

    op: str
    cursor: str = ""


async def one_page(args: Exported, _request: ToolRequest) -> ToolResult:
    """Return the first page of an export, and fail at the second."""
    if args.cursor:
        raise ToolError("the database cannot be used just now")
    rows = [{"digest": str(n), "row": {"prompt": "x" * 1_000}} for n in range(200)]
    return ToolResult("done", {"rows": rows, "cursor": "1"})


@contextlib.asynccontextmanager
async def failing_reward(context: Context[Settings]) -> AsyncIterator[Sequence[Work]]:
    @contextlib.asynccontextmanager
    async def tools(_settings: Settings) -> AsyncIterator[list[Tool[Any]]]:
        yield [Tool("reward_manage", Exported, one_page, internal=True)]

    async with open_tools(context, tools) as works:
        yield works


async def test_an_export_that_breaks_off_leaves_no_file(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = Settings(redis_url=redis_url, data_dir=tmp_path, heartbeat=0.5)
    async with (
        serving(gateway_settings(redis_url, tmp_path)) as site,
        running(Service("reward", Settings, failing_reward), settings),
    ):
        await announced(redis_url, "reward")
        done = await local2(monkeypatch, site, "export", "kto", "--out", str(tmp_path / "kto.jsonl"))
        async with client(site.url, None) as http:
            assert (await http.get("/health")).status_code == 200
    assert done.exit_code == 1
    assert files(tmp_path, "kto*") == []


async def test_nothing_that_is_kept_for_a_query_stays_for_ever(house: House, raw: redis.Redis) -> None:
    await judge_many(house)
    assert len(list(raw.scan_iter("local2:journal:*"))) == 12
    assert unending(raw) == []
    assert (await house.ann.delete("/sessions/session-0")).status_code == 200
    assert unending(raw) == []


async def test_an_administrator_reads_every_verdict_with_both_answers_page_by_page(house: House) -> None:
    ids = [(await house.ask(f"What is {number}?"))["query_id"] for number in range(2)]
    for query_id in ids:
        await house.judged(query_id, "critique", "pairwise")
    await house.settled()
    found: list[dict[str, Any]] = []
    cursor: str | None = ""
    while cursor is not None:
        answer = await house.site.http.get("/preferences/verdicts", params={"limit": 2, "cursor": cursor})
        assert answer.status_code == 200, answer.text
        found += answer.json()["verdicts"]
        cursor = answer.json()["cursor"]
    # a grade of each answer, and a comparison
    assert sorted((one["query_id"], one["kind"], one["respondent"] or "") for one in found) == sorted(
        (query_id, *kind) for query_id in ids for kind in (("comparison", ""), ("grade", "A"), ("grade", "B"))
    )
    assert [one["time"] for one in found] == sorted((one["time"] for one in found), reverse=True)
    compared = next(one for one in found if one["kind"] == "comparison" and one["query_id"] == ids[0])
    assert (compared["winner"], compared["query"]) == ("B", "What is 0?")
    assert {name: one["answer"] for name, one in compared["answers"].items()} == {
        "A": "Plain: What is 0?",
        "B": "Well: What is 0?",
    }
    # the shadow's answers are not for users, whosever question it was
    assert (await house.ann.get("/preferences/verdicts")).status_code == 403
    for wrong in ("x", "5", "9" * 30 + " grade:x"):
        refused = await house.site.http.get("/preferences/verdicts", params={"cursor": wrong})
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "invalid_request")


async def test_the_settings_of_the_critic_have_the_wording_of_its_rubrics(house: House) -> None:
    shown = (await house.site.http.get("/participants/critic/settings")).json()
    choice = shown["schema"]["properties"]["rubrics"]["additionalProperties"]
    wording = dict(zip(choice["enum"], choice["enumDescriptions"], strict=True))
    assert wording["realistic"].startswith("[Is the answer true")
    assert "Score 5: " in wording["clarity"]
