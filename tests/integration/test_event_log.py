"""The event log of a query: the messages that its streams have, through the routes that show them."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
import redis
from support.entries import whole
from support.http_gateway import FakeGenerator, Site

from shared.bus import Bus, order
from shared.bus.keys import journal_key, record_key
from shared.contracts import Outgoing
from shared.envelope import Envelope
from shared.records.event_log import MAX_EXAMINED, messages_of

STEP = "agent.transition"
DONE = {"query.received", STEP, "response.generation", "answer.dialog"}


async def publish(bus: Bus, query_id: str, *subjects: str, **headers: Any) -> list[str]:
    """Publish messages of a query with empty payloads. Return their entry ids."""
    envelopes = [Envelope(subject, b"{}", correlation_id=query_id, **headers) for subject in subjects]
    return [entry_id for one in envelopes for entry_id in await bus.publish(Outgoing(one))]


async def ask(site: Site, query: str = "say hello", route: str = "/query") -> dict[str, Any]:
    response = await site.http.post(route, json={"query": query, "session_id": "s-1"})
    assert response.status_code == 200, response.text
    return dict(response.json())


async def log_of(site: Site, query_id: str) -> list[dict[str, Any]]:
    response = await site.http.get(f"/queries/{query_id}?event_log=true")
    assert response.status_code == 200, response.text
    shown = response.json()
    assert shown["events"] == [message["subject"] for message in shown["event_log"]]
    return list(shown["event_log"])


async def test_answer_as_json_has_its_event_log_in_the_order_of_ids(
    site: Site, fake: FakeGenerator, raw: redis.Redis
) -> None:
    await ask(site, "say something else")
    told = await ask(site, "tool one")
    log = told["event_log"]
    assert told["events"] == [message["subject"] for message in log]
    assert set(told["events"]) >= DONE | {"tool.result.web_search"}
    assert (log[0]["subject"], log[0]["id"], log[0]["t"]) == ("query.received", told["query_id"], 0)
    assert [order(message["id"]) for message in log] == sorted(order(message["id"]) for message in log)
    for message in log:
        assert message["stream"] == f"local2:{message['subject']}"
        ((_, fields),) = raw.xrange(message["stream"], message["id"], message["id"])
        assert told["query_id"] in (message["id"], fields[b"correlation_id"].decode())
        assert message["t"] == (order(message["id"])[0] - order(told["query_id"])[0]) / 1000


async def test_event_log_is_read_only_when_asked_for(site: Site, fake: FakeGenerator) -> None:
    told = await ask(site, route="/query?event_log=false")
    shown = (await site.http.get(f"/queries/{told['query_id']}")).json()
    turn = (await site.http.get(f"/sessions/s-1/turns/{told['query_id']}")).json()
    for body in (told, shown, turn):
        assert not {"events", "event_log"} & set(body)
    asked = await site.http.get(f"/sessions/s-1/turns/{told['query_id']}?event_log=true")
    assert {message["subject"] for message in asked.json()["event_log"]} >= DONE
    assert asked.json()["event_log"] == await log_of(site, told["query_id"])


async def test_event_log_has_both_respondents_grades_and_votes(site: Site, fake: FakeGenerator, bus: Bus) -> None:
    query_id = (await ask(site))["query_id"]
    await publish(bus, query_id, STEP, "response.generation", "critique.result", "pairwise.result", respondent_id="B")
    voted = await site.http.post("/feedback", json={"query_id": query_id, "stars": 5})
    assert voted.status_code == 202
    await publish(bus, query_id, "reward.event")
    log = await log_of(site, query_id)
    subjects = [message["subject"] for message in log]
    assert subjects[-4:] == ["critique.result", "pairwise.result", "user.feedback", "reward.event"]
    assert [subjects.count(one) for one in (STEP, "response.generation")] == [3, 2]


_TRACE = {"tool": "probe", "args": {}, "result_preview": ""}


@pytest.mark.parametrize(
    "entries",
    [
        [("tool.request", {"tool": "probe"})],
        [("completed", {"tool_calls": [{"tool": "probe", "args": {}, "call_id": "c", "result": ""}]})],
        [("completed", {"deliberations": [{"persona": "p", "round": 1, "response": "", "tool_trace": [_TRACE]}]})],
    ],
    ids=["running", "completed", "committee"],
)
async def test_event_log_has_the_tools_of_the_second_respondent(
    entries: list[tuple[str, Any]], bus: Bus, raw: redis.Redis
) -> None:
    for number, (kind, data) in enumerate(entries, 1):
        words = {"type": kind, "time": 1, "data": orjson.dumps(whole(kind, data)), "told": b"[]"}
        raw.xadd(journal_key("5-0", "B"), words, id=f"1-{number}")  # type: ignore[arg-type]
    await publish(bus, "5-0", "tool.request.probe", "tool.result.probe")
    assert [one.subject for one in await messages_of(bus, "5-0")] == ["tool.request.probe", "tool.result.probe"]


async def test_event_log_has_no_message_of_another_query(site: Site, fake: FakeGenerator, bus: Bus) -> None:
    told = await ask(site)
    await publish(bus, f"{told['query_id']}0", *DONE)
    await publish(bus, "", *DONE, session_id="s-1", user_id="admin")
    log = await log_of(site, told["query_id"])
    assert {(one["subject"], one["id"]) for one in log} == {(one["subject"], one["id"]) for one in told["event_log"]}


async def test_event_log_is_shown_to_the_querys_user_alone(site: Site, fake: FakeGenerator) -> None:
    query_id = (await ask(site))["query_id"]
    async with await site.key("eve") as eve:
        await eve.post("/query", json={"query": "say hers", "session_id": "s-1"})
        assert (await eve.get(f"/queries/{query_id}?event_log=true")).status_code == 404
        assert (await eve.get(f"/sessions/s-1/turns/{query_id}?event_log=true")).status_code == 404


async def test_event_log_ignores_a_worker_whose_tool_was_not_called(site: Site, fake: FakeGenerator, bus: Bus) -> None:
    query_id = (await ask(site, "tool one"))["query_id"]
    await publish(bus, query_id, "tool.result.web_fetch", "tool.request.web_fetch")
    subjects = {message["subject"] for message in await log_of(site, query_id)}
    assert {one for one in subjects if one.startswith("tool.")} == {"tool.request.web_search", "tool.result.web_search"}


async def test_event_log_lacks_what_retention_has_removed(site: Site, fake: FakeGenerator, raw: redis.Redis) -> None:
    query_id = (await ask(site))["query_id"]
    raw.xtrim(f"local2:{STEP}", 0, approximate=False)
    raw.delete("local2:query.received")
    assert {message["subject"] for message in await log_of(site, query_id)} == {"response.generation", "answer.dialog"}
    # Without its record the gateway does not know whose messages they are.
    raw.delete(record_key(query_id))
    turn = (await site.http.get(f"/sessions/s-1/turns/{query_id}?event_log=true")).json()
    assert turn["event_log"] == []


async def test_event_log_is_shown_without_a_stream_that_is_none(
    site: Site, fake: FakeGenerator, raw: redis.Redis
) -> None:
    query_id = (await ask(site))["query_id"]
    raw.delete("local2:answer.dialog")
    raw.set("local2:answer.dialog", "in the way")
    assert {message["subject"] for message in await log_of(site, query_id)} == DONE - {"answer.dialog"}


async def test_event_log_examines_a_bounded_number_of_entries(bus: Bus, raw: redis.Redis) -> None:
    def others(before: int, after: int) -> None:
        pipe = raw.pipeline(transaction=False)
        for number in range(before, after):
            pipe.xadd(f"local2:{STEP}", {"correlation_id": "1-0", "payload": "{}"}, id=f"{number}-0")
        pipe.execute()

    # Entries before the query do not count.
    others(1, MAX_EXAMINED + 1)
    first = MAX_EXAMINED + 10
    own = {"correlation_id": f"{first}-0", "payload": "{}"}
    raw.xadd(f"local2:{STEP}", own, id=f"{first + 1}-0")
    others(first + 2, first + MAX_EXAMINED)
    raw.xadd(f"local2:{STEP}", own, id=f"{first + MAX_EXAMINED}-0")
    others(first + MAX_EXAMINED + 1, first + MAX_EXAMINED + 100)
    raw.xadd(f"local2:{STEP}", own, id=f"{first + MAX_EXAMINED + 100}-0")
    found = await messages_of(bus, f"{first}-0")
    assert [one.entry_id for one in found] == [f"{first + 1}-0", f"{first + MAX_EXAMINED}-0"]
