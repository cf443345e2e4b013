"""Taking a query: what becomes of all that it says, which session it is of, and what is refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from services.gateway.http.errors import ApiError
from services.gateway.http.gateway import Gateway
from services.gateway.http.keys import Principal
from services.gateway.queries.accept import Ask, Origin, accept, asked_before
from services.gateway.queries.records import QueryRecord, aside, load
from shared.bus import Bus
from shared.bus.keys import (
    once_key,
    queries_key,
    record_key,
    session_key,
)
from shared.contracts import QUERY_RECEIVED, AcceptedQuery, ChatTurnMessage, ClientTools, QueryReceived
from shared.envelope import Envelope
from shared.participant.registry import ReplicaInfo, announcing
from shared.records import lanes
from shared.records.erasing import erase
from shared.records.sessions import Turn

ANN = Principal("ann", "user")
Attached = Callable[[Bus], Gateway]
BOB = Principal("bob", "user")
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
HISTORY = [ChatTurnMessage(role="user", content="x"), ChatTurnMessage(role="assistant", content="y")]


async def live(gateway: Gateway, *participants: str, **facts: Any) -> None:
    """From now on these are there."""
    for name in participants:
        now = gateway.bus.now_ms()
        info = ReplicaInfo(name, f"{name}-1", "ready", now, now, facts=facts)
        await gateway.bus.link.pipe(announcing(info, 600_000))


def with_settings(gateway: Gateway, **values: Any) -> None:
    gateway.context.settings = gateway.settings.model_copy(update=values)


async def entries(bus: Bus) -> list[tuple[Envelope, QueryReceived]]:
    found = [Envelope.parse(QUERY_RECEIVED.name, *entry) for entry in await bus.range(QUERY_RECEIVED.stream)]
    return [(envelope, QUERY_RECEIVED.decode(envelope)) for envelope in found]


async def lane(bus: Bus, session: str) -> dict[str, list[str]]:
    return {respondent: await lanes.unfinished(bus, session, respondent) for respondent in lanes.RESPONDENTS}


async def clock(bus: Bus) -> int:
    """Redis' clock, in ms."""
    seconds, micros = await bus.link.call("TIME")
    return int(seconds) * 1000 + int(micros) // 1000


async def refused(gateway: Gateway, origin: Origin, ask: Ask) -> tuple[int, str, str]:
    with pytest.raises(ApiError) as caught:
        await accept(gateway, origin, ask)
    return caught.value.status_code, caught.value.code, str(caught.value.detail)


async def test_all_that_a_query_says_is_in_its_entry_and_in_its_record(gateway: Gateway) -> None:
    said: dict[str, Any] = {
        "query": "What is new?", "session_id": "s", "mode": "committee", "personas": ["Skeptic"], "rounds": 2,
        "model": "m:1b", "options": {"seed": 1}, "tools": ["web_search"], "material": "a page",
        "attachments": [{"id": "f1"}], "following": HISTORY[1:], "client_tools": ClientTools(functions=[]),
        "answer_schema": {"type": "object"}, "think": True, "plain": True, "system_prompt": "Be brief.",
        "time_zone": "Australia/Sydney",
    }  # fmt: skip
    # A client with a history of its own has no session, so `messages` is not among them.
    assert said.keys() == {*AcceptedQuery.model_fields, "session_id"} - {"messages"}
    ask = Ask(**said, given="responses", chat="c", deadline_seconds=20.0)
    earliest = await clock(gateway.bus)
    record = await accept(gateway, Origin(ANN, traceparent=TRACE), ask)
    assert earliest <= record.accepted <= await clock(gateway.bus)
    assert record == QueryRecord(
        record.query_id, "ann", "s", "What is new?", "committee", ask.digest(), "responses", "",
        record.accepted, record.accepted + 20_000,
    )  # fmt: skip
    assert await load(gateway, record.query_id) == record
    ((envelope, payload),) = await entries(gateway.bus)
    assert payload == QueryReceived(**said, user_id="ann")
    assert (envelope.id, envelope.session_id, envelope.user_id, envelope.deadline, envelope.traceparent) == (
        record.query_id, "s", "ann", record.deadline, TRACE,
    )  # fmt: skip
    assert await lane(gateway.bus, "s") == {"A": [record.query_id], "B": []}
    info = await gateway.sessions.info("s")
    assert info is not None
    assert (info.user_id, info.title) == ("ann", "What is new?")


@pytest.mark.parametrize("hours", [-1, 1])
async def test_deadline_follows_the_clock_of_redis_before_the_gateway_learns_it(
    gateway: Gateway, attached: Attached, redis_url: str, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    wall = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: wall() + hours * 3_600)
        ahead = Bus(redis_url, "test/2")
    async with ahead:
        assert abs(ahead.now_ms() - await clock(gateway.bus)) > 3_000_000
        record = await accept(attached(ahead), Origin(ANN), Ask(query="one", deadline_seconds=20.5))
    now = await clock(gateway.bus)
    assert now - 10_000 < record.accepted <= now
    assert record.deadline == record.accepted + 20_500
    assert await load(gateway, record.query_id) == record
    ((envelope, _),) = await entries(gateway.bus)
    assert envelope.deadline == record.deadline


@pytest.mark.parametrize(("retention", "kept"), [(600, 620), (7, 80)])
async def test_a_record_is_kept_for_its_deadline_and_the_retention_or_as_long_as_a_request_may_come_again(
    gateway: Gateway, retention: int, kept: int
) -> None:
    with_settings(gateway, retention=retention)
    record = await accept(gateway, Origin(ANN, "k"), Ask(query="one", deadline_seconds=20.9))
    for key in (record_key(record.query_id), once_key(QUERY_RECEIVED.stream, Origin(ANN, "k").once)):
        assert kept - 15 < await gateway.bus.link.call("TTL", key) <= kept


@pytest.mark.parametrize(("wanted", "given"), [(None, 900), (30.5, 30.5), (1_000.0, 900)])
async def test_a_client_shortens_the_time_for_its_answer_and_does_not_lengthen_it(
    gateway: Gateway, wanted: float | None, given: float
) -> None:
    record = await accept(gateway, Origin(ANN), Ask(query="one", deadline_seconds=wanted))
    assert record.deadline - record.accepted == given * 1000


async def test_the_shadow_takes_its_place_where_it_is_there(gateway: Gateway) -> None:
    await live(gateway, "respondent-b")
    record = await accept(gateway, Origin(ANN), Ask(query="one", session_id="s"))
    assert await lane(gateway.bus, "s") == {"A": [record.query_id], "B": [record.query_id]}


async def test_only_of_a_session_that_is_made_with_it_a_query_says_that_it_is_the_first(gateway: Gateway) -> None:
    fresh = await accept(gateway, Origin(ANN), Ask(query="one"))
    await accept(gateway, Origin(ANN), Ask(query="two", session_id=fresh.session_id))
    # somebody may know the names of these already
    await accept(gateway, Origin(ANN, "k"), Ask(query="three"))
    await accept(gateway, Origin(ANN), Ask(query="four", session_id="s"))
    await accept(gateway, Origin(ANN), Ask(query="five", messages=HISTORY))
    assert [payload.first for _, payload in await entries(gateway.bus)] == [True, False, False, False, False]
    info = await gateway.sessions.info(fresh.session_id)
    assert info is not None
    assert info.user_id == "ann"


@pytest.mark.parametrize("key", [None, "k"])
async def test_whose_history_the_client_keeps_has_no_session(gateway: Gateway, key: str | None) -> None:
    await live(gateway, "respondent-b")
    record = await accept(gateway, Origin(ANN, key), Ask(query="one", messages=HISTORY))
    assert await lane(gateway.bus, record.session_id) == {"A": [], "B": []}
    assert await gateway.bus.link.call("EXISTS", queries_key(record.session_id), session_key(record.session_id)) == 0
    ((envelope, payload),) = await entries(gateway.bus)
    assert (payload.messages, payload.kept, payload.session_id) == (HISTORY, False, record.session_id)
    assert envelope.session_id == record.session_id


@pytest.mark.parametrize(("kept", "key"), [("", None), ("s9", None), ("", "k")])
async def test_a_history_of_the_clients_that_is_kept_is_of_a_session_and_waits_for_nobody(
    gateway: Gateway, kept: str, key: str | None
) -> None:
    await live(gateway, "respondent-b")
    record = await accept(gateway, Origin(ANN, key), Ask(query="one", messages=HISTORY, kept=kept))
    if kept:
        assert record.session_id == kept
    # whoever keeps the turn makes it; under a name that can be foretold it is taken at once
    assert await gateway.bus.link.call("EXISTS", session_key(record.session_id)) == (key is not None)
    ((_, payload),) = await entries(gateway.bus)
    assert (payload.messages, payload.kept, payload.session_id) == (HISTORY, True, record.session_id)
    assert await lane(gateway.bus, record.session_id) == {"A": [], "B": []}
    # its deletion finds it
    assert await gateway.bus.link.call("ZRANGE", queries_key(record.session_id), 0, -1) == [record.query_id.encode()]


async def test_a_query_without_a_session_makes_one_of_its_own(gateway: Gateway) -> None:
    one, two = [await accept(gateway, Origin(ANN), Ask(query=text)) for text in ("one", "two")]
    assert one.session_id != two.session_id
    for record in (one, two):
        info = await gateway.sessions.info(record.session_id)
        assert info is not None
        assert (info.user_id, info.title) == ("ann", record.query)
        assert await lane(gateway.bus, record.session_id) == {"A": [record.query_id], "B": []}


async def test_the_same_key_asks_once_and_another_request_with_it_is_refused(gateway: Gateway) -> None:
    origin, ask = Origin(ANN, "k"), Ask(query="one")
    assert await asked_before(gateway, origin, ask) is None
    record = await accept(gateway, origin, ask)
    assert await accept(gateway, origin, ask) == await asked_before(gateway, origin, ask) == record
    for other in (Ask(query="two"), ask.model_copy(update={"think": True})):
        assert (await refused(gateway, origin, other))[:2] == (409, "idempotency_conflict")
    # the key is its user's, and no key is one of its own
    others = [await accept(gateway, other, ask) for other in (Origin(BOB, "k"), Origin(ANN, "l"), Origin(ANN))]
    assert len({record.query_id, *(other.query_id for other in others)}) == 4


async def test_the_same_key_at_the_same_moment_asks_once(gateway: Gateway) -> None:
    one, two = await asyncio.gather(
        *(accept(gateway, Origin(ANN, "k"), Ask(query="one", session_id="s")) for _ in range(2))
    )
    assert one == two
    assert len(await entries(gateway.bus)) == 1
    both = await asyncio.gather(
        *(accept(gateway, Origin(ANN, "l"), Ask(query=words, session_id="s")) for words in ("two", "three")),
        return_exceptions=True,
    )
    assert [getattr(one, "code", "accepted") for one in both] == ["accepted", "idempotency_conflict"]


async def test_idempotency_key_in_a_chat_with_settings_asks_once(gateway: Gateway) -> None:
    origin, ask = Origin(ANN, "k"), Ask(query="one", session_id="s")
    await gateway.sessions.open("s", "ann", "one")
    info = await gateway.sessions.info("s")
    assert info is not None
    await gateway.sessions.change(info, settings={"temperature": 0.5})
    record = await accept(gateway, origin, ask)
    assert await accept(gateway, origin, ask) == record
    ((_, payload),) = await entries(gateway.bus)
    assert payload.options == {"temperature": 0.5}


async def test_idempotency_key_of_a_deleted_query_is_gone(gateway: Gateway) -> None:
    origin, ask = Origin(ANN, "k"), Ask(query="one")
    record = await accept(gateway, origin, ask)
    await erase(gateway.bus, [record.query_id])
    assert (await refused(gateway, origin, ask))[:2] == (410, "query_deleted")
    with pytest.raises(ApiError, match="ask again with another key"):
        await asked_before(gateway, origin, ask)
    assert len(await entries(gateway.bus)) == 1


async def test_expired_idempotency_key_asks_in_the_same_session(gateway: Gateway) -> None:
    origin, ask = Origin(ANN, "k"), Ask(query="one")
    expired = once_key(QUERY_RECEIVED.stream, origin.once)
    record = await accept(gateway, origin, ask)
    await gateway.bus.link.call("DEL", record_key(record.query_id), expired)
    assert await asked_before(gateway, origin, ask) is None
    again = await accept(gateway, origin, ask)
    assert again.query_id != record.query_id
    assert again.session_id == record.session_id
    # somebody took the name that follows from the key
    await gateway.bus.link.call("DEL", record_key(again.query_id), expired, session_key(again.session_id))
    await gateway.sessions.open(again.session_id, "bob", "his")
    third = await accept(gateway, origin, ask)
    assert third.session_id == aside(ANN, record.session_id)
    info = await gateway.sessions.info(third.session_id)
    assert info is not None
    assert (info.user_id, info.title) == ("ann", "one")


async def test_a_question_in_the_place_of_another_stands_behind_the_one_before_that(gateway: Gateway) -> None:
    await gateway.sessions.open("s", "ann", "title")
    info = await gateway.sessions.info("s")
    assert info is not None
    asked = Ask(query="other words", session_id="s", instead_of="2-0")
    records = []
    # repeated after it was broken off, it finishes what it began
    for _ in range(2):
        for n in (1, 2, 3):
            await gateway.bus.link.pipe(gateway.sessions.appending("s", "A", Turn(f"{n}-0", f"q{n}", "a", n)))
        await gateway.sessions.change(info, tip="1-0")
        records.append(await accept(gateway, Origin(ANN, "k"), asked))
        assert [turn.query_id for turn in await gateway.sessions.every_turn("s")] == ["1-0"]
    assert records[0] == records[1]
    assert records[0].after == "1-9999999999"
    assert (await refused(gateway, Origin(ANN), asked.model_copy(update={"instead_of": "9-0"})))[:2] == (
        404,
        "not_found",
    )
    assert (await refused(gateway, Origin(BOB), asked))[:2] == (404, "not_found")


async def test_personas_that_no_generator_knows_are_refused_by_name(gateway: Gateway) -> None:
    await live(gateway, "generator", personas=["The Skeptic", "Optimist"])
    asked = ["zoe", "the skeptic", "Zeno", "Anna", "zoe"]
    assert await refused(gateway, Origin(ANN), Ask(query="one", mode="committee", personas=asked)) == (
        400, "unknown_persona", "unknown personas: Anna, Zeno, zoe; there are Optimist, The Skeptic",
    )  # fmt: skip
    assert await entries(gateway.bus) == []
    await accept(gateway, Origin(ANN), Ask(query="one", mode="committee", personas=["optimist"]))
    await accept(gateway, Origin(ANN), Ask(query="two"))


@pytest.mark.parametrize("others", [[], ["generator"]])
async def test_personas_of_generators_that_say_none_are_left_to_them(gateway: Gateway, others: list[str]) -> None:
    await live(gateway, *others)
    await accept(gateway, Origin(ANN), Ask(query="one", mode="committee", personas=["Skeptic"]))


async def test_too_many_queries_are_refused_of_all_sessions_and_of_one(gateway: Gateway) -> None:
    with_settings(gateway, max_backlog=4, max_session_backlog=2)
    for _ in range(2):
        await accept(gateway, Origin(ANN), Ask(query="one", session_id="s"))
    with pytest.raises(ApiError) as caught:
        await accept(gateway, Origin(ANN), Ask(query="one", session_id="s"))
    assert (caught.value.status_code, caught.value.code, caught.value.headers) == (
        429, "session_busy", {"Retry-After": "2"},
    )  # fmt: skip
    for name in ("t", "u", "v"):
        await accept(gateway, Origin(ANN), Ask(query="one", session_id=name))
    with pytest.raises(ApiError) as caught:
        await accept(gateway, Origin(ANN), Ask(query="one", session_id="w"))
    assert (caught.value.status_code, caught.value.code, caught.value.headers) == (
        429, "overloaded", {"Retry-After": "5"},
    )  # fmt: skip
    assert len(await entries(gateway.bus)) == 5
    accepted = gateway.metrics.accepted.labels("chat")
    assert [one.value for metric in accepted.collect() for one in metric.samples if one.name.endswith("_total")] == [5]


async def test_a_chat_goes_on_from_the_chosen_version_as_it_is_set_and_then_from_the_newest(gateway: Gateway) -> None:
    await gateway.sessions.open("s", "ann", "title")
    info = await gateway.sessions.info("s")
    assert info is not None
    await gateway.sessions.change(info, tip="5-0", settings={"model": "m:1b", "system_prompt": "Be brief."})
    first = await accept(gateway, Origin(ANN), Ask(query="one", session_id="s"))
    second = await accept(gateway, Origin(ANN), Ask(query="two", session_id="s"))
    assert [(payload.after, payload.model, payload.system_prompt) for _, payload in await entries(gateway.bus)] == [
        ("5-0", "m:1b", "Be brief."),
        (None, "m:1b", "Be brief."),
    ]
    assert (first.after, second.after) == ("5-0", "")
    changed = await gateway.sessions.info("s")
    assert changed is not None
    assert (changed.tip, changed.title) == ("", "title")


ZONED = replace(ANN, time_zone="Asia/Tokyo")


@pytest.mark.parametrize(
    ("asked", "principal", "deployment", "zone"),
    [
        ("Australia/Sydney", ZONED, "America/Los_Angeles", "Australia/Sydney"),
        (None, ZONED, "America/Los_Angeles", "Asia/Tokyo"),
        (None, ZONED.named("bob"), "America/Los_Angeles", "Asia/Tokyo"),
        (None, ANN, "America/Los_Angeles", "America/Los_Angeles"),
        (None, ANN, "", "Africa/Nairobi"),
    ],
    ids=["the-querys", "the-users", "of-a-trusted-key", "the-deployments", "of-TZ"],
)
async def test_query_has_its_own_zone_then_the_users(
    gateway: Gateway,
    monkeypatch: pytest.MonkeyPatch,
    asked: str | None,
    principal: Principal,
    deployment: str,
    zone: str,
) -> None:
    monkeypatch.setenv("TZ", "Africa/Nairobi")
    with_settings(gateway, time_zone=deployment)
    await accept(gateway, Origin(principal), Ask(query="What is new?", time_zone=asked))
    ((_, payload),) = await entries(gateway.bus)
    assert payload.time_zone == zone
