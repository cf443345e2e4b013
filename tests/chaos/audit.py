"""What a chaos run left behind, from the API and from Redis itself; every number in `wrong` must be zero."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from support.callers import Asked, Caller
from support.stack import Client, order
from support.waiting import eventually

from services.gateway.http.bus_state import read_bus
from shared.contracts import DEAD_LETTER, MEMORY_FORGET, QUERY_RECEIVED, RESPONSE_GENERATION, TOOL_REQUEST
from shared.envelope import Envelope
from shared.records.journal import TERMINAL, EntryType

TOOLS = ("probe", "web_search")
GROUP = "audit"


@dataclass
class Count:
    asked: int = 0
    accepted: int = 0
    answered: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    reconnects: int = 0
    claims: int = 0
    restarted: int = 0
    repeated_runs: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    details: list[str] = field(default_factory=list)

    def note(self, what: str, detail: str, number: int = 1) -> None:
        self.wrong[what] += number
        self.details.append(f"{what}: {detail}")


async def open_audit(client: Client) -> None:
    """A group of its own on the answers, so that all of them are there when they are counted."""
    await client.bus.link.call("XGROUP", "CREATE", RESPONSE_GENERATION.stream, GROUP, "0", "MKSTREAM")


async def judge_query(client: Client, asked: Asked, count: Count) -> None:
    """One query, as soon as its client has its end: what the client saw against the journal in Redis."""
    count.reconnects += asked.reconnects
    where = f"{asked.query_id} {asked.text!r}"
    if asked.query_id is None:
        count.note("not accepted", f"{where} {asked.refused}")
        return
    count.accepted += 1
    if asked.refused:
        count.note("lost", f"{where}: {asked.refused}")
        return
    if asked.end is None:
        count.note("stuck", f"{where}: {asked.entries[-1].type if asked.entries else 'nothing received'}")
        return
    if asked.end.type is not EntryType.COMPLETED:
        count.note("failed", f"{where}: {asked.end.data!r}")
        return
    count.answered += 1
    if asked.answer != f"The answer to this is: {asked.text}" or asked.text_shown != asked.answer:
        count.note("wrong text", f"{where}: {asked.text_shown!r}")
    journal = await client.journal(asked.query_id)
    if sum(entry.type in TERMINAL for entry in journal) != 1:
        count.note("twice", f"{where}: {sum(entry.type in TERMINAL for entry in journal)} ends in the journal")
    ended = next((n for n, entry in enumerate(journal, 1) if entry.type in TERMINAL), 0)
    received = [(entry.id, entry.type, entry.data) for entry in asked.entries]
    if received != [(entry.id, entry.type, entry.data) for entry in journal[:ended]]:
        count.note("events lost or repeated", f"{where}: {len(received)} received, {ended} in the journal")
    count.claims += sum(entry.type is EntryType.CLAIMED for entry in journal)
    count.restarted += sum(entry.type is EntryType.RESTARTED for entry in journal)


async def judge_sessions(caller: Caller, asked: Sequence[Asked], count: Count) -> None:
    """The turns as the API shows them: each query once, in the order of acceptance."""
    sessions: dict[str, list[Asked]] = {}
    for one in asked:
        sessions.setdefault(one.session, []).append(one)
    for session, mine in sorted(sessions.items()):
        answer = await caller.get(f"/sessions/{session}", time.monotonic() + 30)
        turns = answer.json()["turns"] if answer.status_code == 200 else []
        wanted = sorted((one.query_id for one in mine if one.query_id), key=order)
        kept = [turn["query_id"] for turn in turns]
        count.wrong["lost"] += len(missing := set(wanted) - set(kept))
        count.wrong["twice"] += len(surplus := set(kept) - set(wanted))
        if kept != wanted:
            count.details.append(f"turns of {session}: missing {missing}, too many {surplus}, order {kept}")
        if not missing and not surplus and kept != wanted:
            count.note("turns out of order", session)


async def judge_memory(caller: Caller, client: Client, remembered: Sequence[Asked], count: Count) -> None:
    """Each answer is one engram, as soon as memory has caught up, and nothing else is one."""

    async def caught_up() -> bool:
        streams = (RESPONSE_GENERATION.stream, MEMORY_FORGET.stream)
        return not any([await client.bus.backlog(stream, "memory") for stream in streams])

    try:
        await eventually(caught_up, 120, "memory has caught up", every=0.2)
    except AssertionError as exc:
        count.note("stuck", str(exc))
    engrams: Counter[str] = Counter()
    cursor: str | None = ""
    while cursor is not None:
        path = f"/memory/engrams?limit=200{f'&cursor={quote(cursor)}' if cursor else ''}"
        page = (await caller.get(path, time.monotonic() + 60)).json()
        engrams.update(engram["id"] for engram in page["engrams"])
        cursor = page["cursor"]
    wanted = Counter(f"{one.query_id}:A" for one in remembered)
    if missing := wanted - engrams:
        count.note("not remembered", f"{len(missing)} answers: {sorted(missing)[:5]}", missing.total())
    if surplus := engrams - wanted:
        count.note("remembered too often", f"{len(surplus)} engrams: {sorted(surplus)[:5]}", surplus.total())


async def judge_bus(client: Client, asked: Sequence[Asked], count: Count) -> None:
    """Redis: each answer published once, nothing pending, nothing dead."""
    published: Counter[str] = Counter()
    bus, stream = client.bus, RESPONSE_GENERATION.stream
    while reply := await bus.link.call("XREADGROUP", "GROUP", GROUP, "1", "COUNT", 500, "STREAMS", stream, ">"):
        entries = reply[0][1]
        for entry_id, fields in entries:
            envelope = Envelope.parse(RESPONSE_GENERATION.name, entry_id.decode(), fields)
            published[RESPONSE_GENERATION.decode(envelope).query_id] += 1
        await bus.link.call("XACK", stream, GROUP, *(entry_id for entry_id, _ in entries))
    for one in asked:
        if one.answer is not None and published[one.query_id or ""] != 1:
            what = "twice" if published[one.query_id or ""] > 1 else "lost"
            count.note(what, f"{one.query_id}: published {published[one.query_id or '']} times")
    if strangers := set(published) - {one.query_id for one in asked}:
        count.note("twice", f"answers that nobody asked for: {sorted(strangers)[:5]}", len(strangers))
    count.repeated_runs = sum(number - 1 for number in (await client.effects()).values())
    names = (QUERY_RECEIVED.stream, *(TOOL_REQUEST.for_tool(tool).stream for tool in TOOLS))
    for group in (await read_bus(bus)).groups:
        for what, number in (("pending", group.pending), ("unread", group.lag)):
            if number and group.stream in names:
                count.note(what, f"{number} of {group.group} on {group.stream}", number)
    for entry_id, fields in await bus.range(DEAD_LETTER.stream):
        count.note("dead letters", f"{entry_id}: {fields[-1].decode(errors='replace')[:300]}")
