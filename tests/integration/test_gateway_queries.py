"""Asking over HTTP, against a real bus and a generator that plays a part."""

from __future__ import annotations

import asyncio
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import redis
from support.http_gateway import FakeGenerator, Site, events, gateway_settings, generating, serving, serving_ahead
from support.proxy import Proxy
from support.waiting import eventually

from shared.bus import Bus
from shared.bus.keys import record_key, schema_key, settings_key
from shared.participant.service import Context, open_context
from shared.participant.settings import Settings

SSE = {"Accept": "text/event-stream"}


async def test_a_question_is_answered_as_json(site: Site, fake: FakeGenerator) -> None:
    response = await site.http.post("/query", json={"query": "tool one", "session_id": "s-1"})
    assert response.status_code == 200
    told = response.json()
    assert told["answer"] == "You said: one"
    assert told["thinking"] == "Let me see."
    assert told["state"] == "completed"
    assert told["session_id"] == "s-1" == response.headers["x-session-id"]
    assert told["query_id"] == fake.started[0] == response.headers["x-query-id"]
    assert told["usage"] == {"prompt_tokens": 11, "completion_tokens": 7}
    assert [call["tool"] for call in told["tool_calls"]] == ["web_search"]
    message = fake.queries[0]
    assert message.envelope.deadline is not None
    assert message.envelope.traceparent.startswith("00-")


async def test_all_that_a_client_asks_for_reaches_the_generator(
    site: Site, fake: FakeGenerator, redis_url: str, tmp_path: Path
) -> None:
    asked = {
        "query": "say hello", "session_id": "s-1", "mode": "committee", "personas": ["Optimist"], "rounds": 2,
        "model": "other:1b", "options": {"temperature": 0.25}, "tools": ["web_search"],
    }  # fmt: skip
    trace = f"00-{'ab' * 16}-{'cd' * 8}-01"
    response = await site.http.post("/query", json=asked, headers={"traceparent": trace})
    assert response.status_code == 200, response.text
    (message,) = fake.queries
    got = message.payload.model_dump(exclude_none=True)
    assert {name: got[name] for name in asked} == asked
    assert (got["user_id"], "messages" in got) == ("admin", False)
    envelope = message.envelope
    assert (envelope.session_id, envelope.user_id, envelope.traceparent) == ("s-1", "admin", trace)
    # what is not asked for is left to the generator
    await site.http.post("/query", json={"query": "say more"}, headers={"traceparent": "00-zz"})
    plain = fake.queries[1]
    assert not plain.payload.model_dump(exclude_none=True).keys() & (asked.keys() - {"query", "session_id", "mode"})
    assert plain.payload.mode == "chat"
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", plain.envelope.traceparent)


async def test_an_unknown_persona_is_refused_as_soon_as_a_generator_knows_its_own(
    site: Site, redis_url: str, tmp_path: Path
) -> None:
    asked = {"query": "say hello", "mode": "committee", "personas": ["Pirate", "Optimist", "Clown"]}
    known = {"personas": ["Sceptic", "Optimist"]}
    context: Context[Any]
    async with open_context("generator", Settings(redis_url=redis_url, data_dir=tmp_path, heartbeat=0.5)) as context:
        context.facts.update(known)

        async def refused() -> httpx.Response | None:
            response = await site.http.post("/query?wait=false", json=asked)
            return response if response.status_code == 400 else None

        response = await eventually(refused)
        error = response.json()["error"]
        assert error["code"] == "unknown_persona"
        assert error["message"] == "unknown personas: Clown, Pirate; there are Optimist, Sceptic"
        allowed = await site.http.post("/query?wait=false", json={**asked, "personas": ["Sceptic"]})
        assert allowed.status_code == 202


async def test_the_names_that_a_query_may_give_are_listed(site: Site, raw: redis.Redis) -> None:
    nobody = await site.http.get("/personas")
    assert (nobody.status_code, nobody.json()["error"]["code"]) == (503, "generator_unavailable")
    members = {"type": "array", "items": {"enum": ["Sceptic", "Optimist"]}}
    settings = {"properties": {"active_personas": members, "rounds": {}}}
    described = {"schema": settings, "defaults": {"active_personas": ["Sceptic"], "rounds": 1, "parallel": False}}
    raw.set(schema_key("generator"), orjson.dumps(described))
    raw.hset(settings_key("generator"), "rounds", "2")
    listed = await site.http.get("/personas")
    assert listed.json() == {
        "personas": ["Sceptic", "Optimist"], "active_personas": ["Sceptic"], "rounds": 2, "parallel": False,
    }  # fmt: skip
    # changed by names as people write them
    change = partial(site.http.patch, "/participants/generator/settings")
    changed = await change(json={"active_personas": ["OPTIMIST", "scep_tic"]})
    assert changed.json()["values"]["active_personas"] == ["Optimist", "Sceptic"]
    for wrong in (["Pirate"], [3], "Optimist"):
        refused = await change(json={"active_personas": wrong})
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "invalid_setting")
    assert (await site.http.get("/personas")).json()["active_personas"] == ["Optimist", "Sceptic"]


async def test_events_are_the_journal_one_to_one(site: Site, fake: FakeGenerator, raw: redis.Redis) -> None:
    response = await site.http.post("/query", json={"query": "say hello"}, headers=SSE)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    query_id = response.headers["x-query-id"]
    entries = raw.xrange(f"local2:journal:{query_id}:A")
    kept = [(i.decode(), f[b"type"].decode(), f[b"data"].decode()) for i, f in entries]
    assert events(response.text) == kept
    assert kept[-1][1] == "completed"


async def test_a_stream_resumes_after_every_event_on_another_gateway(
    redis_url: str, tmp_path: Path, site: Site, fake: FakeGenerator
) -> None:
    whole = await site.http.post("/query", json={"query": "tool me"}, headers=SSE)
    query_id, expected = whole.headers["x-query-id"], whole.text
    blocks = [block + "\n\n" for block in expected.split("\n\n") if block]
    async with serving(gateway_settings(redis_url, tmp_path)) as other:
        for cut in range(len(blocks)):
            seen = "".join(blocks[: cut + 1])
            last = events(seen)[-1][0]
            path = f"/queries/{query_id}/events"
            rest = await other.http.get(path, headers={"Last-Event-ID": last})
            assert seen + rest.text == expected
            again = await other.http.get(path, params={"last_event_id": last})
            assert again.text == rest.text
            assert rest.status_code == (204 if cut == len(blocks) - 1 else 200)


async def test_resuming_a_journal_that_has_expired_is_not_found(
    site: Site, fake: FakeGenerator, raw: redis.Redis
) -> None:
    response = await site.http.post("/query", json={"query": "say hello"}, headers=SSE)
    query_id, first = response.headers["x-query-id"], events(response.text)[0][0]
    raw.delete(f"local2:journal:{query_id}:A")
    raw.hset(record_key(query_id), "deadline", 1)
    again = await site.http.get(f"/queries/{query_id}/events", headers={"Last-Event-ID": first})
    assert (again.status_code, again.json()["error"]["code"]) == (404, "not_found")


async def test_a_stream_cut_in_the_middle_goes_on_live(site: Site, fake: FakeGenerator) -> None:
    seen = ""
    async with site.http.stream("POST", "/query", json={"query": "slow one"}, headers=SSE) as response:
        query_id = response.headers["x-query-id"]
        async for part in response.aiter_text():
            seen += part
            if "You " in seen:
                break
    # the connection is closed; the query goes on
    resumed = asyncio.create_task(
        site.http.get(f"/queries/{query_id}/events", headers={"Last-Event-ID": events(seen)[-1][0]})
    )
    fake.gate.set()
    full = events(seen) + events((await resumed).text)
    whole = await site.http.get(f"/queries/{query_id}/events")
    assert full == events(whole.text)
    assert full[-1][1] == "completed"


async def test_without_waiting_the_query_is_accepted_and_can_be_read_while_it_runs(
    site: Site, fake: FakeGenerator
) -> None:
    accepted = await site.http.post("/query?wait=false", json={"query": "slow one"})
    assert accepted.status_code == 202
    told = accepted.json()
    assert told["state"] == "queued"
    path = accepted.headers["location"]

    async def partly() -> bool:
        body = (await site.http.get(path)).json()
        return bool(body["state"] == "running" and body["answer"] == "You ")

    await eventually(partly)
    fake.gate.set()

    async def done() -> bool:
        return bool((await site.http.get(path)).json()["state"] == "completed")

    await eventually(done)
    assert (await site.http.get(path)).json()["answer"] == "You said: one"


async def test_text_of_a_restarted_call_is_not_shown_twice(site: Site, fake: FakeGenerator, raw: redis.Redis) -> None:
    told = (await site.http.post("/query", json={"query": "restart here"})).json()
    assert told["answer"] == "You said: here"
    key = f"local2:journal:{told['query_id']}:A"
    last = raw.xrevrange(key, count=1)[0][0]
    raw.xdel(key, last)
    assert (await site.http.get(f"/queries/{told['query_id']}")).json()["answer"] == "You said: here"


@pytest.mark.parametrize("query", ["say hello", "tool me", "restart here", "many 600"])
async def test_a_finished_result_is_told_by_its_end_and_is_the_same_as_from_all_entries(
    query: str, site: Site, fake: FakeGenerator, raw: redis.Redis
) -> None:
    told = (await site.http.post("/query?event_log=false", json={"query": query})).json()
    query_id = told["query_id"]
    again: dict[str, Any] = {}

    async def unwalked() -> bool:
        """Whether it was read with no XRANGE; other replicas use some by themselves now and then."""
        before = raw.info("commandstats")["cmdstat_xrange"]["calls"]
        again.update((await site.http.get(f"/queries/{query_id}")).json())
        return bool(raw.info("commandstats")["cmdstat_xrange"]["calls"] == before)

    await eventually(unwalked)
    # the same journal, whose end tells nothing
    raw.copy(record_key(query_id), record_key("1-1"))
    for entry_id, fields in raw.xrange(f"local2:journal:{query_id}:A"):
        fields.pop(b"told", None)
        raw.xadd("local2:journal:1-1:A", fields, id=entry_id)
    whole = (await site.http.get("/queries/1-1")).json()
    assert {**whole, "query_id": query_id} == again == told


async def test_answer_deleted_as_it_ends_is_not_found(
    redis_url: str, tmp_path: Path, fake: FakeGenerator, raw: redis.Redis
) -> None:
    async with Proxy(redis_url) as proxy, serving(gateway_settings(proxy.url, tmp_path)) as site:

        async def delete_ended(commands: bytes) -> None:
            """Delete a journal that has ended before the gateway reads it."""
            for key in raw.keys("local2:journal:*") if b"RANGE" in commands else ():
                if raw.xrevrange(key, count=1)[0][1][b"type"] == b"completed":
                    raw.delete(key)

        proxy.before = delete_ended
        for path, body in (
            ("/query", {"query": "say hello"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "say hello"}]}),
        ):
            response = await site.http.post(path, json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


async def test_what_a_newer_release_or_anybody_writes_into_a_journal_is_passed_on_and_gives_no_error(
    site: Site, fake: FakeGenerator, raw: redis.Redis
) -> None:
    accepted = (await site.http.post("/query?wait=false", json={"query": "slow one"})).json()
    key, path = f"local2:journal:{accepted['query_id']}:A", f"/queries/{accepted['query_id']}"
    await eventually(lambda: raw.xlen(key) >= 5)
    for number, (kind, data) in enumerate(
        [
            ("citation", '{"url":"x"}'), (b"\xff\n", "no json"), ("answer", "no json"), ("message", '{"tool_calls":1}'),
            ("tool.result", "[]"), ("restarted", '{"discard_after":"x"}'), ("notice", "null"),
        ],
        100,
    ):  # fmt: skip
        raw.xadd(key, {"type": kind, "time": "soon", "data": data}, id=f"1-{number}")
    # its owner is shut out by these; another one ends it
    raw.xadd(key, {"data": "{}", "type": "completed"}, id="2-1")
    raw.xadd(key, {"odd": "1"}, id="2-2")
    shown = await site.http.get(path, extensions={"undescribed": True})
    assert (shown.status_code, shown.json()["state"]) == (200, "completed")
    streamed = events((await site.http.get(f"{path}/events")).text)
    assert ("1-100", "citation", '{"url":"x"}') in streamed
    assert streamed[-1][1] == "completed"
    assert (await site.http.post(f"{path}/cancel")).json()["state"] == "completed"


async def test_a_key_that_is_no_journal_gives_no_error(site: Site, raw: redis.Redis) -> None:
    accepted = (await site.http.post("/query?wait=false", json={"query": "say hello"})).json()
    path = f"/queries/{accepted['query_id']}"
    raw.set(f"local2:journal:{accepted['query_id']}:A", "no stream")
    assert (await site.http.get(path)).json()["state"] == "queued"
    async with site.http.stream("GET", f"{path}/events") as response:
        assert response.status_code == 200
    assert (await site.http.post(f"{path}/cancel")).json()["state"] == "cancelling"


async def test_a_failed_query_is_an_http_error_with_its_code(site: Site, fake: FakeGenerator) -> None:
    for code, status in {
        "deadline_exceeded": 504, "model_missing": 502, "model_unavailable": 503, "internal": 500, "surprise": 500,
    }.items():  # fmt: skip
        newer = {"undescribed": code == "surprise"}
        response = await site.http.post("/query", json={"query": f"fail {code}"}, extensions=newer)
        assert response.status_code == status
        error = response.json()["error"]
        assert error["code"] == code
        assert error["message"] == f"it failed: {code}"
        assert error["query_id"] == response.headers["x-query-id"]
        shown = (await site.http.get(f"/queries/{error['query_id']}")).json()
        assert shown["state"] == "failed"
        assert shown["error"]["code"] == code


async def test_without_a_generator_the_deadline_ends_the_wait(redis_url: str, tmp_path: Path, raw: redis.Redis) -> None:
    async with serving(gateway_settings(redis_url, tmp_path, deadline_seconds=0.3)) as site:
        body = {"query": "say hello"}
        response, streamed = await asyncio.gather(
            site.http.post("/query", json=body), site.http.post("/query", json=body, headers=SSE)
        )
        assert response.status_code == 504
        error = response.json()["error"]
        assert error["code"] == "deadline"
        assert raw.pubsub_shardchannels() == []
        assert streamed.status_code == 200
        assert events(streamed.text) == []
        gone = await site.http.get(f"/queries/{error['query_id']}/events")
        assert gone.status_code == 404
        # nothing is lost: a generator that comes later answers
        async with generating(redis_url, tmp_path):

            async def answered() -> bool:
                return bool((await site.http.get(f"/queries/{error['query_id']}")).json()["state"] == "completed")

            await eventually(answered)
        # and whoever comes back behind the deadline is told it
        told = await site.http.get(f"/queries/{error['query_id']}/events")
        assert [kind for _, kind, _ in events(told.text)][-1:] == ["completed"]


async def test_cancel_stops_the_query_and_repeating_it_changes_nothing(site: Site, fake: FakeGenerator) -> None:
    waiting = asyncio.create_task(site.http.post("/query", json={"query": "slow one", "session_id": "s"}))
    await eventually(lambda: fake.started)
    path = f"/queries/{fake.started[0]}/cancel"
    first = await site.http.post(path)
    assert (first.status_code, first.json()["state"]) == (200, "cancelling")
    told = (await waiting).json()
    assert told["state"] == told["finish_reason"] == "cancelled"
    assert told["answer"] == "You "
    again = await site.http.post(path)
    assert (again.status_code, again.json()["state"]) == (200, "cancelled")


async def test_a_client_that_leaves_does_not_cancel(site: Site, fake: FakeGenerator, raw: redis.Redis) -> None:
    waiting = asyncio.create_task(site.http.post("/query", json={"query": "slow one"}))
    await eventually(lambda: fake.started)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    fake.gate.set()

    async def answered() -> bool:
        return bool((await site.http.get(f"/queries/{fake.started[0]}")).json()["state"] == "completed")

    await eventually(answered)
    assert not raw.exists(f"local2:cancel:{fake.started[0]}")


async def test_the_same_idempotency_key_asks_once(site: Site, fake: FakeGenerator) -> None:
    headers = {"Idempotency-Key": "order-66"}
    body = {"query": "say hello"}
    both = await asyncio.gather(*(site.http.post("/query", json=body, headers=headers) for _ in range(4)))
    later = await site.http.post("/query", json=body, headers=headers)
    ids = {response.json()["query_id"] for response in (*both, later)}
    assert len(ids) == 1
    assert len(fake.started) == 1
    assert {response.json()["answer"] for response in (*both, later)} == {"You said: hello"}
    other = await site.http.post("/query", json={"query": "say bye"}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_conflict")
    other = await site.http.post("/query", json={**body, "options": {"temperature": 0}}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_conflict")
    ann = await site.key("ann")
    async with ann:
        hers = await ann.post("/query", json=body, headers=headers)
        assert hers.json()["query_id"] not in ids
    malformed = await site.http.post("/query", json=body, headers={"Idempotency-Key": "a b"})
    assert malformed.status_code == 400


async def test_two_clients_of_one_session_are_answered_in_order(site: Site, fake: FakeGenerator) -> None:
    bodies = [{"query": f"say {n}", "session_id": "shared"} for n in range(8)]
    answers = await asyncio.gather(*(site.http.post("/query", json=body) for body in bodies))
    assert [a.json()["answer"] for a in answers] == [f"You said: {n}" for n in range(8)]
    session = (await site.http.get("/sessions/shared")).json()
    ids = [turn["query_id"] for turn in session["turns"]]
    assert ids == fake.started
    assert ids == sorted({a.json()["query_id"] for a in answers}, key=lambda i: [int(p) for p in i.split("-")])


async def test_own_messages_are_passed_on_and_nothing_is_stored(site: Site, fake: FakeGenerator) -> None:
    history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    told = (await site.http.post("/query", json={"query": "say x", "messages": history, "tools": []})).json()
    payload = fake.queries[0].payload
    assert [m.content for m in payload.messages or []] == ["Hi", "Hello"]
    assert payload.tools == []
    assert (await site.http.get(f"/sessions/{told['session_id']}")).status_code == 404


async def test_a_full_queue_is_answered_429_with_retry_after(redis_url: str, tmp_path: Path) -> None:
    async with serving(gateway_settings(redis_url, tmp_path, max_backlog=3)) as site:
        statuses = []
        for _ in range(6):
            response = await site.http.post("/query?wait=false", json={"query": "say hello"})
            statuses.append(response.status_code)
            await asyncio.sleep(0.3)
        assert statuses == [202, 202, 202, 202, 429, 429]
        assert int(response.headers["retry-after"]) > 0
        assert response.json()["error"]["code"] == "overloaded"


async def test_a_session_with_too_many_open_queries_is_answered_429(redis_url: str, tmp_path: Path) -> None:
    async with serving(gateway_settings(redis_url, tmp_path, max_session_backlog=2)) as site:
        body = {"query": "say hello", "session_id": "busy"}
        statuses = [(await site.http.post("/query?wait=false", json=body)).status_code for _ in range(3)]
        assert statuses == [202, 202, 429]
        other = await site.http.post("/query?wait=false", json={**body, "session_id": "idle"})
        assert other.status_code == 202


async def test_a_followed_stream_goes_on_until_the_critique(site: Site, fake: FakeGenerator, raw: redis.Redis) -> None:
    critique = {"score": 5, "feedback": "Right.", "rubric": "realistic"}
    async with site.http.stream("POST", "/query?follow=true", json={"query": "say hi"}, headers=SSE) as response:
        query_id, text = response.headers["x-query-id"], ""
        async for part in response.aiter_text():
            text += part
            if "event: completed" in text and "event: critique" not in text:
                raw.xadd(
                    f"local2:journal:{query_id}:A",
                    {
                        "type": "critique",
                        "time": "1",
                        "data": json.dumps(critique),
                    },
                )
    kinds = [event[1] for event in events(text)]
    assert kinds[-2:] == ["completed", "critique"]
    shown = (await site.http.get(f"/queries/{query_id}")).json()
    assert shown["critique"] == critique
    after = await site.http.get(
        f"/queries/{query_id}/events?follow=true", headers={"Last-Event-ID": events(text)[-2][0]}
    )
    assert [event[1] for event in events(after.text)] == ["critique"]


async def test_a_followed_stream_without_a_critique_ends_after_a_while(
    redis_url: str, tmp_path: Path, fake: FakeGenerator
) -> None:
    async with serving(gateway_settings(redis_url, tmp_path, follow_seconds=0.3)) as site, asyncio.timeout(30):
        live = await site.http.post("/query?follow=true", json={"query": "say hi"}, headers=SSE)
        assert events(live.text)[-1][1] == "completed"
        # and one that begins behind the end, long before the query's deadline
        newest = {"Last-Event-ID": events(live.text)[-1][0]}
        after = await site.http.get(f"/queries/{live.headers['x-query-id']}/events?follow=true", headers=newest)
        assert events(after.text) == []


async def test_nothing_of_a_stream_stays_behind_however_it_ends(
    redis_url: str, tmp_path: Path, fake: FakeGenerator, raw: redis.Redis
) -> None:
    def followed() -> int:
        return len(raw.pubsub_shardchannels())

    async with serving(gateway_settings(redis_url, tmp_path, deadline_seconds=20)) as site:
        # to its end, as a stream and as one answer
        await site.http.post("/query", json={"query": "say one"}, headers=SSE)
        await site.http.post("/query", json={"query": "say two"})
        await eventually(lambda: followed() == 0)
        # left by its client
        async with site.http.stream("POST", "/query", json={"query": "slow"}, headers=SSE):
            await eventually(lambda: followed() == 1)
        await eventually(lambda: followed() == 0)
        fake.gate.set()


@pytest.mark.parametrize(("asked", "given"), [(5_000, 60), (20, 20), (None, 60)])
async def test_a_client_may_shorten_the_deadline_and_not_lengthen_it(
    asked: float | None, given: float, redis_url: str, tmp_path: Path, fake: FakeGenerator, bus: Bus
) -> None:
    async with serving(gateway_settings(redis_url, tmp_path, deadline_seconds=60)) as site:
        await bus.learn_time()
        before = bus.now_ms()
        body = {"query": "say hello", **({} if asked is None else {"deadline_seconds": asked})}
        assert (await site.http.post("/query", json=body)).status_code == 200
        after = bus.now_ms()
    deadline = fake.queries[0].envelope.deadline
    assert deadline is not None
    assert before - 1_000 <= deadline - given * 1_000 <= after + 1_000


async def test_silence_is_filled_with_keep_alive_comments(redis_url: str, tmp_path: Path, fake: FakeGenerator) -> None:
    async with (
        serving(gateway_settings(redis_url, tmp_path, keepalive=0.1)) as site,
        site.http.stream("POST", "/query", json={"query": "slow"}, headers=SSE) as response,
    ):
        text = ""
        async for part in response.aiter_text():
            text += part
            if text.count(": keep-alive\n\n") == 2:
                fake.gate.set()
    assert events(text)[-1][1] == "completed"


async def test_a_stopping_gateway_ends_its_streams_and_the_client_goes_on_elsewhere(
    redis_url: str, tmp_path: Path, site: Site, fake: FakeGenerator
) -> None:
    async with serving(gateway_settings(redis_url, tmp_path)) as leaving:
        waiting = asyncio.create_task(leaving.http.post("/query", json={"query": "slow json"}))
        async with leaving.http.stream("POST", "/query", json={"query": "slow sse"}, headers=SSE) as response:
            query_id, text = response.headers["x-query-id"], ""
            async for part in response.aiter_text():
                text += part
                if "You " in text and len(fake.started) == 2:
                    leaving.stop.set()
        stopped = await waiting
        assert (stopped.status_code, stopped.json()["error"]["code"]) == (503, "stopping")
    fake.gate.set()
    rest = await site.http.get(f"/queries/{query_id}/events", headers={"Last-Event-ID": events(text)[-1][0]})
    assert events(rest.text)[-1][1] == "completed"
    shown = f"/queries/{stopped.json()['error']['query_id']}"

    async def answered() -> bool:
        return bool((await site.http.get(shown)).json()["answer"] == "You said: json")

    await eventually(answered)


async def test_respondent_b_has_a_journal_of_its_own(
    redis_url: str, tmp_path: Path, site: Site, fake: FakeGenerator
) -> None:
    async with generating(redis_url, tmp_path, "B") as second:
        told = (await site.http.post("/query", json={"query": "say hello", "session_id": "both"})).json()
        await eventually(lambda: second.started == [told["query_id"]])

        async def answered() -> bool:
            return bool(
                (await site.http.get(f"/queries/{told['query_id']}?respondent=B")).json()["state"] == "completed"
            )

        await eventually(answered)
        streamed = await site.http.get(f"/queries/{told['query_id']}/events?respondent=B")
        assert events(streamed.text)[-1][1] == "completed"


@pytest.mark.parametrize("hours", [-1, 1])
async def test_gateway_on_a_host_with_a_wrong_clock_keeps_deadlines(
    hours: int, redis_url: str, tmp_path: Path, raw: redis.Redis, fake: FakeGenerator
) -> None:
    def clock() -> int:
        seconds, micros = raw.time()
        return int(seconds) * 1000 + int(micros) // 1000

    async with serving_ahead(redis_url, tmp_path, seconds=hours * 3_600) as http:
        asked = await http.post("/query", json={"query": "say hello", "deadline_seconds": 60})
        assert asked.json()["answer"] == "You said: hello", asked.text
        (message,) = fake.queries
        assert message.envelope.deadline is not None
        assert abs(message.envelope.deadline - clock() - 60_000) < 30_000
        # no journal: the gateway waits for it until the deadline, and no longer
        raw.delete(f"local2:journal:{message.entry_id}:A")
        async with http.stream("GET", f"/queries/{message.entry_id}/events") as waiting:
            assert waiting.status_code == 200
        raw.hset(record_key(message.entry_id), "deadline", clock() - 60_000)
        assert (await http.get(f"/queries/{message.entry_id}/events")).status_code == 404
