"""Remove all data of queries: the keys with their ids, and their entries in streams."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress

import orjson

from shared.bus import Bus, ReplyError, order
from shared.bus.dead_letters import drop
from shared.bus.keys import (
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
    canonical_tool,
)
from shared.errors import DecodeError
from shared.records.journal import response_id
from shared.records.lanes import GROUPS, RESPONDENTS
from shared.records.lua import script

_QUERIES = 50
_ENTRIES = 100
# The clocks of a cluster's nodes may differ by this much.
_CLOCK_MS = 60_000

_CALLS = script("find_calls", "each_entry")

_SWEEP = script("sweep_entries", "before", "each_entry")


async def erase(bus: Bus, query_ids: Sequence[str]) -> None:
    """Remove the records, journals, results and grades of queries, and tool results in the inboxes of their generators.

    Cancellations stay for replicas that read a query later. The once-key of a client's Idempotency-Key stays until it
    expires: a once-key without a record means that the query was deleted.
    """
    for start in range(0, len(query_ids), _QUERIES):
        page = query_ids[start : start + _QUERIES]
        keys = [key for query_id in page for key in _keys(query_id)]
        for once, query_id in zip(
            await bus.link.pipe_raw([("HGET", record_key(query_id), "once") for query_id in page]), page, strict=True
        ):
            keys += [once_key(QUERY_RECEIVED.stream, once.decode())] if isinstance(once, bytes) else []
            keys.append(record_key(query_id))
        inboxes: dict[str, list[str]] = defaultdict(list)
        for query_id in page:
            for respondent in RESPONDENTS:
                replicas, calls = await _traces(bus, journal_key(query_id, respondent))
                keys += [result for result, _ in calls]
                for replica in replicas:
                    inboxes[inbox_key(GROUPS[respondent], replica)] += [call for _, call in calls]
        await bus.link.pipe([("UNLINK", key) for key in keys])
        for inbox, calls_of in inboxes.items():
            if calls_of:
                await _sweep(bus, inbox, "-", "call_id", calls_of)


async def erase_answer(bus: Bus, inbox: str, tool: str, call_id: str) -> None:
    """Remove the answer to a call from its caller's inbox, and the stored result."""
    await bus.link.call("UNLINK", result_key(tool, call_id))
    await _sweep(bus, inbox, "-", "call_id", [call_id])


def _keys(query_id: str) -> list[str]:
    found = [
        pair_key(query_id),
        verdict_key(query_id),
        once_key(PAIRWISE_RESULT.stream, query_id),
    ]
    for respondent in RESPONDENTS:
        response = response_id(query_id, respondent)
        published = (RESPONSE_GENERATION, ANSWER_DIALOG, CRITIQUE_RESULT)
        found += [journal_key(query_id, respondent), grade_key(response)]
        found += [once_key(subject.stream, response) for subject in published]
    return found


async def _traces(bus: Bus, journal: str) -> tuple[set[str], list[tuple[str, str]]]:
    """The replicas that wrote a journal, and for each call of a tool the key of its result and its id."""
    replicas: set[str] = set()
    calls: list[tuple[str, str]] = []
    after = "-"
    while True:
        (reply,) = await bus.link.pipe_raw([_CALLS((journal,), after, 3 * _ENTRIES)])
        # a key of another type is no journal; it is removed all the same
        if isinstance(reply, ReplyError) or not reply:
            return replicas, calls
        after = f"({reply[0].decode()}"
        for kind, data in zip(reply[1::2], reply[2::2], strict=True):
            match _object(data):
                case {"replica": str(replica)} if kind == b"claimed":
                    replicas.add(replica)
                case {"call_id": str(call_id), "tool": str(tool), "args": dict(args)} if kind == b"tool.request":
                    for name in {tool, canonical_tool(tool, args)}:
                        # of what a model calls a tool anything may be wrong; then there is no result
                        with suppress(DecodeError):
                            calls.append((result_key(name, call_id), call_id))


def _object(data: bytes) -> object:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return None


# ── streams ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def erase_entries(bus: Bus, field: str, values: Sequence[str], since: str) -> None:
    """Remove the entries of all subjects with one of some values in a field of their envelope.

    Only entries that every group has finished are removed. since: a query; only entries since its acceptance are read.
    """
    start = f"{max(0, order(since)[0] - _CLOCK_MS)}-0"
    for subject in await bus.subjects():
        # Participants that store data of a session read its deletion from these.
        if subject.name in (MEMORY_FORGET.name, KNOWLEDGE_FORGET.name, QUERY_FORGET.name, DEAD_LETTER.name):
            continue
        if subject.kind == "work":
            # Trimming also removes the last delivered entry. A key that is not a stream has no entries.
            with suppress(ReplyError):
                await bus.trim(subject)
        await _sweep(bus, subject.stream, start, field, values)


async def _sweep(bus: Bus, stream: str, start: str, field: str, values: Sequence[str]) -> None:
    while True:
        (reply,) = await bus.link.pipe_raw([_SWEEP((stream,), start, _ENTRIES, field, *values)])
        if isinstance(reply, ReplyError) or not reply:
            return
        start = f"({reply.decode()}"


async def erase_dead_letters(bus: Bus, field: str, values: Sequence[str]) -> None:
    """Remove dead letters of messages with one of some values in a field of their envelope."""
    start = "-"
    while True:
        try:
            page = await bus.range(DEAD_LETTER.stream, start, count=_ENTRIES)
        except ReplyError:
            # A key of another type has no dead letters.
            return
        if not page:
            return
        start = f"({page[-1][0]}"
        for entry_id, words in page:
            match _object(dict(zip(words[::2], words[1::2], strict=True)).get(b"payload", b"")):
                case {"fields": dict(fields)} if fields.get(field) in values:
                    await drop(bus, entry_id)
