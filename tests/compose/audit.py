"""What the bus holds after a load: run inside the stack's network, with the queries on the standard input.

Reads `{"queries": [{"id", "session", "text"}], "settle": seconds, "judged": bool}`, prints what it found as JSON. It
waits until the groups have acknowledged everything, at most `settle` seconds, before it counts. With `{"open": true}`
it only makes a group of its own, before the loads: what all others have finished is then still there to be counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from typing import Any

from services.gateway.http.bus_state import read_bus
from shared.bus import Bus, ReplyError, order
from shared.bus.keys import journal_key
from shared.contracts import ANSWER_DIALOG, CRITIQUE_RESULT, DEAD_LETTER, PAIRWISE_RESULT, RESPONSE_GENERATION
from shared.envelope import Envelope
from shared.records.journal import TERMINAL, EntryType, JournalEntry, read_journal, response_id
from shared.records.sessions import Sessions

AT_ONCE = 64
GROUP = "audit"
KEPT = (RESPONSE_GENERATION, CRITIQUE_RESULT, PAIRWISE_RESULT)


async def keep_everything(bus: Bus) -> None:
    """A group that reads nothing: nothing is trimmed that comes from now on."""
    for subject in KEPT:
        try:
            await bus.link.call("XGROUP", "CREATE", subject.stream, GROUP, "$", "MKSTREAM")
        except ReplyError as exc:
            if not str(exc).startswith("BUSYGROUP"):
                raise


class Audit:
    def __init__(self, bus: Bus, *, judged: bool) -> None:
        self.bus = bus
        self.judged = judged
        self.wrong: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self.details: list[str] = []
        # How often each was published, by response, and what was said of it.
        self.shown: Counter[str] = Counter()
        self.generations: Counter[str] = Counter()
        self.critiques: dict[str, list[int | None]] = {}
        self.verdicts: dict[str, list[str]] = {}
        # The responses that memory must know, with their grade and the verdict on their pair.
        self.engrams: dict[str, dict[str, Any]] = {}

    def note(self, what: str, detail: str, number: int = 1) -> None:
        self.wrong[what] += number
        self.details.append(f"{what}: {detail}")

    async def open_work(self) -> dict[str, int]:
        """What groups have not finished, by stream and group; nothing when all is at rest."""
        found = {}
        for one in (await read_bus(self.bus)).groups:
            if one.group != GROUP and (one.pending or one.lag):
                found[f"{one.group} on {one.stream}: {one.pending} pending, {one.lag} unread"] = one.pending + one.lag
        return found

    async def settle(self, seconds: float) -> None:
        began = time.monotonic()
        while (left := await self.open_work()) and time.monotonic() < began + seconds:
            await asyncio.sleep(0.5)
        for what, number in left.items():
            self.note("pending", what, number)
        self.seen["seconds until all was handled"] = round(time.monotonic() - began)

    async def read_streams(self) -> None:
        for entry_id, fields in await self.bus.range(ANSWER_DIALOG.stream):
            envelope = Envelope.parse(ANSWER_DIALOG.name, entry_id, fields)
            self.shown[response_id(envelope.correlation_id or "", envelope.respondent_id)] += 1
        for entry_id, fields in await self.bus.range(RESPONSE_GENERATION.stream):
            generation = RESPONSE_GENERATION.decode(Envelope.parse(RESPONSE_GENERATION.name, entry_id, fields))
            self.generations[generation.response_id] += 1
        for entry_id, fields in await self.bus.range(CRITIQUE_RESULT.stream):
            critique = CRITIQUE_RESULT.decode(Envelope.parse(CRITIQUE_RESULT.name, entry_id, fields))
            self.critiques.setdefault(critique.response_id, []).append(critique.score)
        for entry_id, fields in await self.bus.range(PAIRWISE_RESULT.stream):
            verdict = PAIRWISE_RESULT.decode(Envelope.parse(PAIRWISE_RESULT.name, entry_id, fields))
            self.verdicts.setdefault(verdict.original_query_id, []).append(verdict.winner)

    async def query(self, query: dict[str, str]) -> None:
        query_id, text = query["id"], query["text"]
        journal = await read_journal(self.bus, journal_key(query_id, "A"))
        ends = [entry for entry in journal if entry.type in TERMINAL]
        self.seen["taken over"] += sum(entry.type is EntryType.CLAIMED for entry in journal) - bool(journal)
        self.seen["begun again"] += sum(entry.type is EntryType.RESTARTED for entry in journal)
        if not ends:
            self.note("stuck", f"{query_id} {text!r}: {_course(journal)}")
            return
        answer = self.response(query_id, "A", ends)
        if ends[0].type is not EntryType.COMPLETED:
            self.note("not completed", f"{query_id} {text!r}: {_course(journal)}; {ends[0].data.decode()[:100]}")
        if answer is not None:
            self.seen["answered"] += 1
            if answer["answer"] != f"The answer to this is: {text}":
                self.note("wrong text", f"{query_id}: {answer['answer'][:200]!r} for {text!r}")
            for call in answer.get("tool_calls") or ():
                self.seen["tool calls"] += 1
                if call.get("error"):
                    # not a failure of the bus: a model is told so, and answers all the same
                    self.seen[f"told of {call['tool']}: {call['error'][:60]}"] += 1
        if self.judged:
            self.pair(query_id, answer, await self.shadow(query_id))

    async def shadow(self, query_id: str) -> dict[str, Any] | None:
        """B's answer. B may leave a query out or run out of time: nobody waits for it; it may not hang."""
        journal = await read_journal(self.bus, journal_key(query_id, "B"))
        ends = [entry for entry in journal if entry.type in TERMINAL]
        if not journal:
            self.seen["left out by B"] += 1
            return None
        if not ends:
            self.note("stuck", f"{query_id} of B: {_course(journal)}")
            return None
        if ends[0].type is not EntryType.COMPLETED:
            self.seen[f"B did not answer: {ends[0].value().get('code', ends[0].type)}"] += 1
        return self.response(query_id, "B", ends)

    def response(self, query_id: str, respondent: str, ends: list[JournalEntry]) -> dict[str, Any] | None:
        """The answer, if it was completed: it must have been published once, and memory must know it."""
        name = response_id(query_id, respondent)
        if len(ends) > 1 or self.shown[name] > 1 or self.generations[name] > 1:
            published = f"published {self.shown[name]} and {self.generations[name]} times"
            self.note("answered twice", f"{name}: {len(ends)} ends, {published}")
        if ends[0].type is not EntryType.COMPLETED:
            return None
        if not self.shown[name] or not self.generations[name]:
            self.note("not published", name)
        self.engrams[name] = {"score": None, "winner": None}
        return ends[0].value()

    def pair(self, query_id: str, *answers: dict[str, Any] | None) -> None:
        """Each answer that can be graded has one grade, a pair of them one verdict; what used a tool has neither."""
        gradeable = []
        for respondent, answer in zip("AB", answers, strict=True):
            name = response_id(query_id, respondent)
            grades = self.critiques.get(name, [])
            wanted = answer is not None and not answer.get("tool_calls")
            if answer is not None:
                self.seen["graded" if wanted else "ungraded, a tool was used"] += 1
            gradeable.append(wanted)
            if len(grades) != wanted:
                self.note("grades", f"{name}: {len(grades)}, not {int(wanted)}")
            elif wanted:
                self.engrams[name]["score"] = grades[0]
        verdicts = self.verdicts.get(query_id, [])
        if len(verdicts) != all(gradeable):
            self.note("verdicts", f"{query_id}: {len(verdicts)}, not {int(all(gradeable))}")
        elif verdicts:
            self.seen["pairs judged"] += 1
            for respondent in "AB":
                self.engrams[response_id(query_id, respondent)]["winner"] = verdicts[0]

    async def session(self, session: str, respondent: str, wanted: list[str]) -> None:
        kept = [turn.query_id for turn in await Sessions(self.bus).turns(session, respondent)]
        if extra := set(kept) - set(wanted):
            self.note("answered twice", f"{session}: turns nobody was told of: {sorted(extra)}", len(extra))
        if missing := set(wanted) - set(kept):
            self.note("turns missing", f"{session} of {respondent}: {sorted(missing)}", len(missing))
        if not extra and not missing and kept != sorted(wanted, key=order):
            self.note("turns out of order", f"{session} of {respondent}")

    async def run(self, queries: list[dict[str, str]], settle: float) -> dict[str, Any]:
        await self.settle(settle)
        await self.read_streams()
        sessions: dict[str, list[str]] = {}
        for query in queries:
            sessions.setdefault(query["session"], []).append(query["id"])
        for start in range(0, len(queries), AT_ONCE):
            await asyncio.gather(*(self.query(query) for query in queries[start : start + AT_ONCE]))
        for session, wanted in sessions.items():
            await self.session(session, "A", wanted)
            if self.judged:
                await self.session(session, "B", [q for q in wanted if response_id(q, "B") in self.engrams])
        for entry_id, fields in await self.bus.range(DEAD_LETTER.stream):
            self.note("dead letters", f"{entry_id}: {fields[-1].decode(errors='replace')[:300]}")
        return {"wrong": self.wrong, "seen": self.seen, "details": self.details[:60], "engrams": self.engrams}


def _course(journal: list[JournalEntry]) -> str:
    """How far it came: the first entry, the last ones, and when each was written."""
    if not journal:
        return "no journal"
    shown = journal[:1] + journal[1:][-6:]
    return ", ".join(f"{entry.type} {(entry.time - journal[0].time) / 1000:+.1f} s" for entry in shown)


async def main() -> None:
    given = json.load(sys.stdin)
    async with Bus(os.environ["LOCAL2_REDIS_URL"], "audit/1") as bus:
        if given.get("open"):
            await keep_everything(bus)
            return
        print(json.dumps(await Audit(bus, judged=given["judged"]).run(given["queries"], given["settle"])))


if __name__ == "__main__":
    asyncio.run(main())
