"""A deleted session leaves nothing behind: a word that stood everywhere in it is looked for in every key."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from support.http_gateway import Site, gateway_settings, serving
from support.proxy import Proxy
from support.services import announced, running
from support.stack import Stage, respondent, stage
from support.waiting import eventually

from services.critic.service import app as critic
from services.critic.settings import CriticSettings
from services.generator.settings import GeneratorSettings
from shared.bus import Bus
from shared.bus.keys import grade_key, journal_key, lane_key, record_key
from shared.contracts import ANSWER_DIALOG, DEAD_LETTER, QUERY_RECEIVED, RESPONSE_GENERATION
from shared.records import lanes
from shared.records.journal import EntryType
from shared.records.sessions import MAX_TURNS, Turn
from shared.testing.model_server import Rules

WORD = "xylograph"
RULES: Rules = [
    {"when": {"user": "###Response B:"}, "respond": {"text": f"The first {WORD}. [RESULT] A"}},
    {"when": {"user": "###Score Rubrics"}, "respond": {"text": f"Right, {WORD}. [RESULT] 4"}},
    {
        "when": {"user": "^look", "tool_results": 0},
        "respond": {"thinking": WORD, "tool_calls": [{"name": "probe", "args": {"text": WORD}}]},
    },
    {"when": {"user": "^fail"}, "respond": {"status": 400, "error": WORD}},
    {"when": {"user": "^hold"}, "respond": {"text": f"{WORD} " * 200, "pace": 0.05}},
    {"respond": {"text": f"A {WORD} it is."}},
]


@dataclass
class Town:
    site: Site
    stage: Stage
    raw: redis.Redis
    # the way of the critic to Redis
    critic: Proxy | None = None

    async def ask(self, query: str, session: str = "s", instead_of: str | None = None, **how: Any) -> str:
        body = {"query": query, "session_id": session, "instead_of": instead_of}
        answer = await self.site.http.post("/query?wait=false", json=body, **how)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["query_id"])

    async def delete(self, session: str = "s") -> dict[str, Any]:
        answer = await self.site.http.delete(f"/sessions/{session}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def quiet(self) -> None:
        """Every group has finished everything."""
        for group in ("generator", "respondent-b"):
            await self.stage.idle(group)

        async def judged() -> bool:
            return await self.stage.bus.backlog(RESPONSE_GENERATION.stream, "critic") == 0

        await eventually(judged, what="nothing left to judge")

    async def clean(self) -> None:
        """Waits until nothing is left; the janitor does its work now, and not in a minute."""

        async def nothing() -> bool:
            await self.stage.bus.trim(QUERY_RECEIVED)
            await self.stage.bus.trim(RESPONSE_GENERATION)
            return self.traces() == []

        await eventually(nothing, 30, "nothing is left")

    def traces(self, word: str = WORD) -> list[str]:
        return sorted(place for place, text in dump(self.raw) if word.encode() in text)


def dump(raw: redis.Redis) -> Iterator[tuple[str, bytes]]:
    """Everything in Redis, key by key, with where it is."""
    reading: dict[bytes, Any] = {
        b"string": raw.get,
        b"hash": raw.hgetall,
        b"list": lambda key: raw.lrange(key, 0, -1),
        b"set": raw.smembers,
        b"zset": lambda key: raw.zrange(key, 0, -1, withscores=True),
        b"stream": raw.xrange,
        # it has gone meanwhile
        b"none": lambda _key: "",
    }
    for key in raw.scan_iter(count=1_000):
        name = key.decode()
        # the tests' own count of what the tool did
        if name != "effects":
            yield name, key + repr(reading[raw.type(key)](key)).encode()


@pytest.fixture
async def town(request: pytest.FixtureRequest, redis_url: str, raw: redis.Redis, tmp_path: Path) -> AsyncIterator[Town]:
    """A stack with both respondents, a tool and a judge. Its parameter is the respondents' heartbeat in seconds."""
    heartbeat = getattr(request, "param", 1.0)
    async with stage(redis_url, RULES, probes=1, heartbeat=heartbeat) as on, contextlib.AsyncExitStack() as stack:
        shadow = GeneratorSettings(**on.settings.model_dump() | {"respondent_id": "B"})
        between = await stack.enter_async_context(Proxy(redis_url))
        judge: dict[str, Any] = {
            "redis_url": between.url,
            "heartbeat": 1,
            "drain": 0.5,
            "ollama_host": on.server.url,
            "yield_rest": 0,
        }
        await stack.enter_async_context(running(respondent(shadow), shadow))
        await stack.enter_async_context(running(critic, CriticSettings(**judge)))
        site = await stack.enter_async_context(serving(gateway_settings(redis_url, tmp_path)))
        for name in ("respondent-b", "critic"):
            await announced(redis_url, name)
        yield Town(site, on, raw, between)


# A replica removes read entries of its inbox with its heartbeat: none is due in this test.
@pytest.mark.parametrize("town", [3_600.0], indirect=True, ids=["no heartbeat"])
async def test_nothing_of_a_deleted_session_is_left(town: Town) -> None:
    asked = [
        await town.ask(f"look for a {WORD}", headers={"Idempotency-Key": f"key-{WORD}"}),
        await town.ask(f"say {WORD}"),
        await town.ask(f"fail {WORD}"),
    ]
    for query_id in asked:
        await town.stage.ended(query_id)
    await town.quiet()
    rated = await town.site.http.post("/feedback", json={"query_id": asked[1], "stars": 5, "comment": WORD})
    assert rated.status_code == 202
    kept = town.traces()
    for part in (
        ":journal:", ":history:", ":result:", "local2:query:", ":inbox:", ":grade:", ":verdict:", "answer.dialog",
        "response.generation", "query.received", "tool.result", "critique.result", "pairwise.result", "user.feedback",
    ):  # fmt: skip
        assert any(part in place for place in kept), (part, kept)
    assert (await town.delete())["cancelled"] == []
    assert town.traces() == []
    for query_id in asked:
        # The session's newest query, and the id behind an Idempotency-Key, whose repeat is refused.
        places = [
            place for place in town.traces(query_id) if not place.startswith("local2:once:{local2:query.received}:")
        ]
        assert places in ([], ["local2:session:{s}:deleted"])
    for query_id in asked:
        assert (await town.site.http.get(f"/queries/{query_id}")).status_code == 404


ASKING: dict[str, tuple[str, dict[str, Any]]] = {
    "query": ("/query", {"query": "hello", "session_id": "s"}),
    "query without a session": ("/query", {"query": "hello"}),
    "chat completion": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    "response": ("/v1/responses", {"input": "hello"}),
}


@pytest.mark.parametrize(("path", "body"), ASKING.values(), ids=ASKING)
async def test_idempotency_key_repeated_after_deletion_is_gone(town: Town, path: str, body: dict[str, Any]) -> None:
    http, headers = town.site.http, {"Idempotency-Key": "once"}
    first = await http.post(path, json=body, headers=headers)
    assert first.status_code == 200, first.text
    session = f"/sessions/{first.headers['x-session-id']}"
    assert (await http.delete(session)).status_code == 200
    for _ in range(2):
        repeated = await http.post(path, json=body, headers=headers)
        assert (repeated.status_code, repeated.json()["error"]["code"]) == (410, "query_deleted")
        assert (await http.get(session)).status_code == 404
    other = await http.post(path, json=body, headers={"Idempotency-Key": "another"})
    assert other.status_code == 200
    assert other.headers["x-query-id"] != first.headers["x-query-id"]


async def test_idempotency_key_of_a_deleted_response_is_gone(town: Town) -> None:
    http, request = town.site.http, {"json": {"input": "hello"}, "headers": {"Idempotency-Key": "once"}}
    first = await http.post("/v1/responses", **request)
    assert (await http.delete(f"/v1/responses/{first.json()['id']}")).status_code == 200
    assert (await http.post("/v1/responses", **request)).status_code == 410


async def test_turns_and_queries_beyond_the_newest_are_removed_too(town: Town) -> None:
    asked = [await town.ask(f"{n} {WORD}") for n in range(3)]
    for query_id in asked:
        await town.stage.ended(query_id)
    await town.quiet()
    later = [Turn(f"{9_000_000_000_000 + n}-0", WORD, WORD, n) for n in range(MAX_TURNS + 10)]
    for name in "AB":
        await town.stage.bus.link.pipe([c for turn in later for c in town.stage.sessions.appending("s", name, turn)])
    assert all(town.raw.exists(journal_key(query_id, "A")) for query_id in asked)
    await town.delete()
    assert town.traces() == []


async def test_an_open_query_is_stopped_and_writes_nothing_any_more(town: Town) -> None:
    async with town.site.http.stream(
        "POST", "/query", json={"query": f"hold {WORD}", "session_id": "s"}, headers={"Accept": "text/event-stream"}
    ) as following:
        query_id = following.headers["x-query-id"]
        await town.stage.seen(query_id, EntryType.ANSWER)
        waiting = await town.ask(f"next {WORD}")
        assert (await town.delete())["cancelled"] == [query_id, waiting]
        await following.aread()
    assert "event: cancelled" in following.text
    await town.quiet()
    await town.clean()
    assert await town.stage.sessions.info("s") is None
    # a session of the same name is another one
    again = await town.ask("hello")
    await town.stage.ended(again)
    assert [turn.query_id for turn in await town.stage.turns("s")] == [again]


async def test_what_a_respondent_that_is_away_has_not_read_comes_to_nothing(
    redis_url: str, raw: redis.Redis, tmp_path: Path
) -> None:
    """The shadow was there, and is off while the session is deleted."""
    async with stage(redis_url, RULES) as on, serving(gateway_settings(redis_url, tmp_path)) as site:
        town = Town(site, on, raw)
        shadow = GeneratorSettings(**on.settings.model_dump() | {"respondent_id": "B"})
        async with running(respondent(shadow), shadow):
            await announced(redis_url, "respondent-b")
        asked = await town.ask(f"say {WORD}")
        await on.ended(asked)
        await on.idle()
        await town.delete()
        # the shadow has still to read it
        assert {place for place in town.traces() if "response.generation" not in place} <= {QUERY_RECEIVED.stream}
        before = len(on.server.requests)
        async with running(respondent(shadow), shadow):
            await announced(redis_url, "respondent-b")
            await on.idle("respondent-b")
        assert len(on.server.requests) == before
        assert await on.journal(asked, "B") == []
        assert not raw.exists(lane_key("B", "s"))
        await town.clean()


@contextlib.asynccontextmanager
async def freezable(redis_url: str, raw: redis.Redis, tmp_path: Path) -> AsyncIterator[tuple[Town, Proxy]]:
    """A respondent and the proxy before its Redis: a frozen one carries no cancellation, and no write until later."""
    async with stage(redis_url, RULES, replicas=0) as on, contextlib.AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(Proxy(redis_url))
        behind = GeneratorSettings(**on.settings.model_dump() | {"redis_url": proxy.url})
        await stack.enter_async_context(running(respondent(behind), behind))
        site = await stack.enter_async_context(serving(gateway_settings(redis_url, tmp_path)))
        await announced(redis_url, "generator")
        yield Town(site, on, raw), proxy


async def test_respondent_frozen_during_deletion_brings_nothing_back(
    redis_url: str, raw: redis.Redis, tmp_path: Path
) -> None:
    async with freezable(redis_url, raw, tmp_path) as (town, proxy):
        query_id = await town.ask(f"hold {WORD}")
        await town.stage.seen(query_id, EntryType.ANSWER)
        proxy.freeze()
        await town.delete()
        assert [place for place in town.traces() if place != QUERY_RECEIVED.stream and "journal" not in place] == []
        proxy.thaw()
        await town.stage.idle()
        await town.clean()
        assert await town.stage.sessions.info("s") is None


async def test_respondent_frozen_during_an_edit_removes_its_answer(
    redis_url: str, raw: redis.Redis, tmp_path: Path
) -> None:
    async with freezable(redis_url, raw, tmp_path) as (town, proxy):
        query_id = await town.ask(f"hold {WORD}")
        await town.stage.seen(query_id, EntryType.ANSWER)
        proxy.freeze()
        again = await town.ask("other words", instead_of=query_id)
        proxy.thaw()
        await town.stage.ended(again)
        await town.stage.idle()
        assert [turn.query_id for turn in await town.stage.turns("s")] == [again]
        assert not raw.exists(journal_key(query_id, "A"), record_key(query_id))


async def test_answer_edited_away_before_its_grade_leaves_nothing(town: Town) -> None:
    slow = {"when": {"user": "###Score Rubrics"}, "respond": {"text": f"Right, {WORD}. [RESULT] 4", "delay": 1}}
    first = await town.ask("hello")
    await town.stage.ended(first)
    await town.quiet()
    town.stage.server.set_rules([slow, *RULES])
    asked = await town.ask(f"say {WORD}")
    for group in ("generator", "respondent-b"):
        await town.stage.idle(group)
    await town.stage.server.wait_until(
        lambda server: any(
            "Score Rubrics" in (said := str(one.body)) and f"say {WORD}" in said for one in server.requests
        )
    )
    assert town.critic is not None
    town.critic.hold_connections()
    again = await town.ask("say it", instead_of=asked)
    await town.stage.ended(again)
    town.stage.server.set_rules(RULES)
    town.critic.release()
    await town.quiet()
    assert [place for place in town.traces() if asked in place] == []
    assert town.raw.get(grade_key(f"{again}:A"))


@pytest.mark.parametrize("how", ["ours", "a client's"])
async def test_the_title_that_a_model_makes_leaves_nothing(town: Town, how: str) -> None:
    first = await town.ask(f"say {WORD}")
    await town.stage.ended(first)
    http = town.site.http
    if how == "ours":
        made = await http.post("/sessions/s/title")
    else:
        key = await http.post("/keys", json={"name": "k", "user_id": "admin", "trusted": True})
        assert key.status_code == 201, key.text
        made = await http.post(
            "/v1/chat/completions",
            json={"model": "local2-utility", "messages": [{"role": "user", "content": f"A title for {WORD}."}]},
            headers={"Authorization": f"Bearer {key.json()['key']}", "X-OpenWebUI-Chat-Id": "s"},
        )
    assert made.status_code == 200, made.text
    of_the_title = [place for place in town.traces() if ":journal:" in place and first not in place]
    assert len(of_the_title) == 1
    # no question of the session
    listed = (await http.get("/queries?session_id=s")).json()["queries"]
    assert [one["query_id"] for one in listed] == [first]
    await town.quiet()
    await town.delete()
    await town.clean()


async def test_what_was_set_aside_of_the_session_goes_and_nothing_of_others(town: Town) -> None:
    for session in ("s", "s1"):
        fields = {"payload": f'{{"{WORD}": ', "session_id": session}
        town.raw.xadd(QUERY_RECEIVED.stream, fields)
    other = await town.ask(f"say {WORD}", "s1")
    mine = await town.ask(f"say {WORD}", "s")
    for query_id in (other, mine):
        await town.stage.ended(query_id)
    await town.quiet()
    # of each, one of either group
    assert town.raw.xlen(DEAD_LETTER.stream) == 4
    await town.delete("s")
    assert town.raw.xlen(DEAD_LETTER.stream) == 2
    assert all(b'"session_id":"s1"' in fields[b"payload"] for _, fields in town.raw.xrange(DEAD_LETTER.stream))
    dialogs = [fields[b"session_id"] for _, fields in town.raw.xrange(ANSWER_DIALOG.stream)]
    assert dialogs == [b"s1", b"s1"]
    assert town.raw.exists(record_key(other), journal_key(other, "A"), journal_key(other, "B")) == 3
    assert (await town.site.http.get(f"/queries/{other}")).json()["state"] == "completed"


async def test_the_lag_of_the_groups_is_known_after_a_deletion(town: Town) -> None:
    """Whoever scales by it would see no work."""
    for _ in range(3):
        await town.stage.ended(await town.ask(f"say {WORD}"))
    await town.quiet()
    await town.delete()
    for stream in (QUERY_RECEIVED.stream, RESPONSE_GENERATION.stream):
        for row in town.raw.xinfo_groups(stream):
            assert row["lag"] == 0, (stream, row)


async def test_a_query_that_no_gateway_has_accepted_is_deleted_with_its_session(town: Town, bus: Bus) -> None:
    """Written by redis-cli, it is in no list of its session's queries."""
    turn = Turn("5-1", WORD, WORD, 1)
    await town.stage.sessions.open("s", "admin", WORD)
    for respondent_id in "AB":
        await bus.link.pipe(town.stage.sessions.appending("s", respondent_id, turn))
        town.raw.xadd(journal_key(turn.query_id, respondent_id), {"type": "claimed", "time": 1, "data": WORD})
    assert await lanes.unfinished(bus, "s", "A") == []
    await town.delete()
    assert town.traces() == []
