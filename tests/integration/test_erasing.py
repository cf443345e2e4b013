"""What queries leave in Redis goes with them, wherever it lies, and nothing of others."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
import redis

from shared.bus import Bus
from shared.bus.keys import (
    cancel_key,
    grade_key,
    inbox_key,
    journal_key,
    once_key,
    pair_key,
    record_key,
    result_key,
    verdict_key,
)
from shared.contracts import (
    ANSWER_DIALOG,
    CRITIQUE_RESULT,
    DEAD_LETTER,
    KNOWLEDGE_FORGET,
    MEMORY_FORGET,
    PAIRWISE_RESULT,
    QUERY_FORGET,
    QUERY_RECEIVED,
    RESPONSE_GENERATION,
    TOOL_RESULT,
)
from shared.records.erasing import erase, erase_dead_letters, erase_entries

STREAM = RESPONSE_GENERATION.stream


def kept_of(query_id: str) -> list[str]:
    """Every key that is kept under the id of a query, but its journals."""
    found = [record_key(query_id), pair_key(query_id), verdict_key(query_id)]
    found += [once_key(PAIRWISE_RESULT.stream, query_id), once_key(QUERY_RECEIVED.stream, f"asked {query_id}")]
    for response in (f"{query_id}:A", f"{query_id}:B"):
        subjects = (RESPONSE_GENERATION, ANSWER_DIALOG, CRITIQUE_RESULT)
        found += [grade_key(response), *(once_key(subject.stream, response) for subject in subjects)]
    return found


def keep(raw: redis.Redis, query_id: str) -> None:
    pipe = raw.pipeline()
    for key in kept_of(query_id):
        if key == record_key(query_id):
            pipe.hset(key, mapping={"once": f"asked {query_id}", "query": "q"})
        else:
            pipe.set(key, "kept")
    pipe.set(cancel_key(query_id), "1")
    pipe.execute()


def journal(raw: redis.Redis, query_id: str, respondent: str, *entries: tuple[str, Any]) -> None:
    pipe = raw.pipeline()
    for kind, data in entries:
        pipe.xadd(
            journal_key(query_id, respondent),
            {"type": kind, "data": data if isinstance(data, bytes) else orjson.dumps(data)},
        )
    pipe.execute()


async def test_everything_under_the_ids_of_queries_goes_but_their_cancellations(bus: Bus, raw: redis.Redis) -> None:
    gone = [f"{number}-0" for number in range(1, 121)]
    for query_id in [*gone, "500-0"]:
        keep(raw, query_id)
        for respondent in "AB":
            journal(raw, query_id, respondent, ("answer", {"text": "x"}))
    # a record that does not say under which name its query came, and one that is none
    raw.hdel(record_key("7-0"), "once")
    raw.delete(record_key("8-0"), journal_key("9-0", "A"))
    raw.set(record_key("8-0"), "no hash")
    raw.set(journal_key("9-0", "A"), "no stream")
    await erase(bus, gone)
    left = {key.decode() for key in raw.scan_iter(count=1_000)}
    assert left == {
        *(cancel_key(query_id) for query_id in [*gone, "500-0"]), *kept_of("500-0"), journal_key("500-0", "A"),
        journal_key("500-0", "B"), *(once_key(QUERY_RECEIVED.stream, f"asked {one}") for one in ("7-0", "8-0")),
    }  # fmt: skip


async def test_results_of_calls_go_with_what_was_told_to_those_who_asked(bus: Bus, raw: redis.Redis) -> None:
    def call(call_id: Any, tool: Any = "probe", **args: Any) -> dict[str, Any]:
        return {"call_id": call_id, "tool": tool, "args": args}

    many = [("tool.request", call(f"m{number}")) for number in range(700)]
    journal(
        raw,
        "1-0",
        "A",
        ("claimed", {"replica": "one"}),
        ("tool.request", call("old", "recall_memory", topic="x")),
        # of what a model calls a tool anything may be wrong
        ("tool.request", call("bad", "{bad}")),
        ("tool.request", call(5)),
        ("tool.request", b"{"),
        ("tool.result", call("told", "probe")),
        *many,
        ("claimed", {"replica": "two"}),
        ("claimed", {"model": "m"}),
        ("answer", {"replica": "three"}),
    )
    journal(raw, "2-0", "B", ("claimed", {"replica": "one"}), ("tool.request", call("shadows")))
    gone = [result_key("recall_memory", "old"), result_key("recall_topic", "old"), result_key("probe", "shadows")]
    gone += [result_key("probe", f"m{number}") for number in (0, 350, 699)]
    stays = [result_key("probe", "told"), result_key("probe", "other"), result_key("probe", "5")]
    for key in gone + stays:
        raw.set(key, "x")
    inboxes = {name: inbox_key(*name.split("/")) for name in (
        "generator/one", "generator/two", "generator/three", "respondent-b/one", "respondent-b/two"
    )}  # fmt: skip
    for inbox in inboxes.values():
        for call_id in ("other", "old", "m0", "m699", "shadows"):
            raw.xadd(inbox, {"type": "tool.result", "call_id": call_id})
        for _ in range(150):
            raw.xadd(inbox, {"type": "tool.result", "call_id": "m350"})
        raw.xadd(inbox, {"type": "wake"})
    await erase(bus, ["1-0", "2-0"])
    assert [raw.exists(key) for key in gone + stays] == [0] * len(gone) + [1] * len(stays)
    told = {name: [entry.get(b"call_id") for _, entry in raw.xrange(inbox)] for name, inbox in inboxes.items()}
    untouched = [b"other", b"old", b"m0", b"m699", b"shadows", *[b"m350"] * 150, None]
    assert told == {
        "generator/one": [b"other", b"shadows", None],
        "generator/two": [b"other", b"shadows", None],
        "generator/three": untouched,
        "respondent-b/one": [b"other", b"old", b"m0", b"m699", *[b"m350"] * 150, None],
        "respondent-b/two": untouched,
    }


def said(raw: redis.Redis, stream: str, *sessions: str, at: str = "*") -> list[str]:
    return [raw.xadd(stream, {"session_id": one, "payload": "{}"}, id=at).decode() for one in sessions]


def sessions(raw: redis.Redis, stream: str) -> list[str]:
    return [fields[b"session_id"].decode() for _, fields in raw.xrange(stream)]


async def test_what_streams_hold_of_a_session_goes_and_all_else_stays(bus: Bus, raw: redis.Redis) -> None:
    raw.sadd("local2:tools", "probe")
    told = [subject.stream for subject in (MEMORY_FORGET, KNOWLEDGE_FORGET, QUERY_FORGET, DEAD_LETTER)]
    swept = [ANSWER_DIALOG.stream, TOOL_RESULT.for_tool("probe").stream, CRITIQUE_RESULT.stream]
    for stream in told + swept:
        said(raw, stream, "s", "t", *["u"] * 120, "s")
        raw.xadd(stream, {"payload": "s"})
    await erase_entries(bus, "session_id", ["s", "t"], "0-1")
    for stream in swept:
        assert [fields.get(b"session_id") for _, fields in raw.xrange(stream)] == [*[b"u"] * 120, None]
    # who keeps something of the session hears of its end by these
    for stream in told:
        assert raw.xlen(stream) == 124


async def test_no_more_is_read_at_once_than_others_can_wait_for(bus: Bus, raw: redis.Redis) -> None:
    stream, calls = ANSWER_DIALOG.stream, []
    for large in (10, 100_000):
        for number in range(120):
            # small ones before large ones, too
            payload = "x" * (large if number % 50 > 20 else 10)
            raw.xadd(stream, {"session_id": "s" if number % 3 else "t", "payload": payload})
        raw.config_resetstat()
        await erase_entries(bus, "session_id", ["s"], "0-1")
        calls.append(raw.info("commandstats")["cmdstat_evalsha"]["calls"])
        assert sessions(raw, stream) == ["t"] * 40
        raw.delete(stream)
    # six megabytes in pages of a quarter to a half
    assert calls[1] - calls[0] > 10


@pytest.mark.parametrize(("since", "goes"), [("100001-0", False), ("100000-7", True), ("5-0", True)])
async def test_what_was_said_before_a_query_can_hold_nothing_of_it(
    since: str, goes: bool, bus: Bus, raw: redis.Redis
) -> None:
    """Though the clocks of a cluster's nodes may differ by a minute."""
    said(raw, CRITIQUE_RESULT.stream, "s", at="40000-0")
    await erase_entries(bus, "session_id", ["s"], since)
    assert sessions(raw, CRITIQUE_RESULT.stream) == ([] if goes else ["s"])


async def test_what_somebody_has_still_to_do_stays_until_it_is_done(bus: Bus, raw: redis.Redis) -> None:
    ids = said(raw, STREAM, "s", "s", "s", "s")
    for group in ("critic", "memory"):
        raw.xgroup_create(STREAM, group, "0")
    raw.xreadgroup("memory", "c", {STREAM: ">"}, count=4)
    # one reads the first three, and has done with the first and third of them
    raw.xreadgroup("critic", "c", {STREAM: ">"}, count=3)
    raw.xack(STREAM, "critic", ids[0], ids[2])
    raw.xack(STREAM, "memory", *ids)
    await erase_entries(bus, "session_id", ["s"], "0-1")
    assert [entry_id.decode() for entry_id, _ in raw.xrange(STREAM)] == ids[1:]
    raw.xack(STREAM, "critic", ids[1])
    await erase_entries(bus, "session_id", ["s"], "0-1")
    # what a group was given last can go from the front alone, and here somebody has not read what is behind it
    assert [entry_id.decode() for entry_id, _ in raw.xrange(STREAM)] == ids[3:]
    assert [row["lag"] for row in raw.xinfo_groups(STREAM)] == [1, 0]
    raw.xreadgroup("critic", "c", {STREAM: ">"})
    raw.xack(STREAM, "critic", ids[3])
    await erase_entries(bus, "session_id", ["s"], "0-1")
    assert raw.xlen(STREAM) == 0


async def test_a_stream_without_groups_is_swept_whole_and_ids_are_compared_as_numbers(
    bus: Bus, raw: redis.Redis
) -> None:
    stream = ANSWER_DIALOG.stream
    ids = [said(raw, stream, "s", at=at)[0] for at in ("900-9", "1000-5", "1000-40", "1000-100", "2000-0")]
    raw.xgroup_create(stream, "watcher", "1000-40")
    await erase_entries(bus, "session_id", ["s"], "0-1")
    # as far as it has read, without what it was given last
    assert [entry_id.decode() for entry_id, _ in raw.xrange(stream)] == ids[2:]
    raw.xgroup_destroy(stream, "watcher")
    await erase_entries(bus, "session_id", ["s"], "0-1")
    assert raw.xlen(stream) == 0


async def test_a_key_that_is_no_stream_keeps_nothing_else(bus: Bus, raw: redis.Redis) -> None:
    for stream in (QUERY_RECEIVED.stream, ANSWER_DIALOG.stream):
        raw.set(stream, "no stream")
    said(raw, CRITIQUE_RESULT.stream, "s")
    await erase_entries(bus, "session_id", ["s"], "0-1")
    assert raw.xlen(CRITIQUE_RESULT.stream) == 0
    assert raw.get(QUERY_RECEIVED.stream) == b"no stream"


async def test_what_was_set_aside_goes_by_the_message_in_it(bus: Bus, raw: redis.Redis) -> None:
    def letter(payload: Any) -> str:
        data = payload if isinstance(payload, bytes) else orjson.dumps(payload)
        return str(raw.xadd(DEAD_LETTER.stream, {"payload": data}).decode())

    mine: dict[str, Any] = {"fields": {"session_id": "s", "payload": "{"}, "reason": "r"}
    letter(mine)
    stays = [
        letter({"fields": {"session_id": "u"}}),
        letter({"fields": ["session_id", "s"]}),
        letter({"session_id": "s"}),
        letter(b"{"),
        raw.xadd(DEAD_LETTER.stream, {"reason": "s"}).decode(),
        *(letter({"fields": {"user_id": "s"}}) for _ in range(230)),
    ]
    letter({"fields": {"session_id": "t"}})
    await erase_dead_letters(bus, "session_id", ["s", "t"])
    assert [entry_id.decode() for entry_id, _ in raw.xrange(DEAD_LETTER.stream)] == stays
    raw.delete(DEAD_LETTER.stream)
    raw.set(DEAD_LETTER.stream, "no stream")
    await erase_dead_letters(bus, "session_id", ["s", "t"])
    assert raw.get(DEAD_LETTER.stream) == b"no stream"
