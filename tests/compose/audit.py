"""What the bus holds after a load: run inside the stack's network, with the queries on the standard input.

Reads `{"queries": [{"id", "session", "text"}], "settle": seconds}`, prints what it found as JSON. It waits until the
groups have acknowledged everything, at most `settle` seconds, before it counts.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from typing import Any

from shared.bus import Bus, order
from shared.contracts import ANSWER_DIALOG, DEAD_LETTER
from shared.envelope import Envelope
from shared.journal import TERMINAL, EntryType, journal_key, read_journal
from shared.sessions import Sessions

AT_ONCE = 64


class Audit:
    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.wrong: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self.details: list[str] = []

    def note(self, what: str, detail: str, number: int = 1) -> None:
        self.wrong[what] += number
        self.details.append(f"{what}: {detail}")

    async def open_work(self) -> dict[str, int]:
        """What groups have not finished, by stream and group; nothing when all is at rest."""
        found = {}
        for subject in await self.bus.subjects():
            for group in (await self.bus.state(subject.stream)).groups:
                if group.pending or group.lag:
                    found[f"{group.name} on {subject.name}: {group.pending} pending, {group.lag} unread"] = (
                        group.pending + group.lag
                    )
        return found

    async def settle(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := await self.open_work()) and time.monotonic() < until:
            await asyncio.sleep(0.5)
        for what, number in left.items():
            self.note("pending", what, number)

    async def query(self, query: dict[str, str], published: Counter[str]) -> None:
        query_id, text = query["id"], query["text"]
        journal = await read_journal(self.bus, journal_key(query_id, "A"))
        ends = [entry for entry in journal if entry.type in TERMINAL]
        self.seen["taken over"] += sum(entry.type is EntryType.CLAIMED for entry in journal) - bool(journal)
        self.seen["begun again"] += sum(entry.type is EntryType.RESTARTED for entry in journal)
        if not ends:
            self.note("stuck", f"{query_id} {text!r}: {journal[-1].type if journal else 'no journal'}")
            return
        if len(ends) > 1 or published[query_id] > 1:
            self.note("answered twice", f"{query_id}: {len(ends)} ends, published {published[query_id]} times")
        if ends[0].type is not EntryType.COMPLETED:
            course = [f"{entry.type} {(entry.time - ends[0].time) / 1000:+.1f} s" for entry in journal[-5:]]
            self.note("not completed", f"{query_id} {text!r}: {', '.join(course)}; {ends[0].data.decode()[:100]}")
            return
        self.seen["answered"] += 1
        value = ends[0].value()
        if not published[query_id]:
            self.note("not published", query_id)
        if value["answer"] != f"The answer to this is: {text}":
            self.note("wrong text", f"{query_id}: {value['answer'][:200]!r} for {text!r}")
        for call in value.get("tool_calls") or ():
            self.seen["tool calls"] += 1
            if call.get("error"):
                # not a failure of the bus: a model is told so, and answers all the same
                self.seen[f"told of {call['tool']}: {call['error'][:60]}"] += 1

    async def session(self, session: str, wanted: list[str]) -> None:
        kept = [turn.query_id for turn in await Sessions(self.bus).turns(session, "A")]
        if extra := set(kept) - set(wanted):
            self.note("answered twice", f"{session}: turns nobody was told of: {sorted(extra)}", len(extra))
        if missing := set(wanted) - set(kept):
            self.note("turns missing", f"{session}: {sorted(missing)}", len(missing))
        if not extra and not missing and kept != sorted(wanted, key=order):
            self.note("turns out of order", session)

    async def run(self, queries: list[dict[str, str]], settle: float) -> dict[str, Any]:
        await self.settle(settle)
        published: Counter[str] = Counter()
        for entry_id, fields in await self.bus.range(ANSWER_DIALOG.stream):
            published[Envelope.parse(ANSWER_DIALOG.name, entry_id, fields).correlation_id or ""] += 1
        sessions: dict[str, list[str]] = {}
        for query in queries:
            sessions.setdefault(query["session"], []).append(query["id"])
        for start in range(0, len(queries), AT_ONCE):
            await asyncio.gather(*(self.query(query, published) for query in queries[start : start + AT_ONCE]))
        for session, wanted in sessions.items():
            await self.session(session, wanted)
        for entry_id, fields in await self.bus.range(DEAD_LETTER.stream):
            self.note("dead letters", f"{entry_id}: {fields[-1].decode(errors='replace')[:300]}")
        return {"wrong": self.wrong, "seen": self.seen, "details": self.details[:60]}


async def main() -> None:
    given = json.load(sys.stdin)
    async with Bus(os.environ["LOCAL2_REDIS_URL"], "audit/1") as bus:
        print(json.dumps(await Audit(bus).run(given["queries"], given["settle"])))


if __name__ == "__main__":
    asyncio.run(main())
