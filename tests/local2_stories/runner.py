"""Runs stories through the HTTP API and gathers what their checks need to see."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from local2_stories.bus_tap import BusTap
from local2_stories.checks import Outcome, Seen, check_events, check_turn, engrams_of, says, whole
from local2_stories.story import EngramCheck, FactCheck, PreferenceCheck, Story, Turn

from services.cli.api import QUERY_TIMEOUT, Api, ApiError, rows
from shared.contracts import CRITIQUE_RESULT, PAIRWISE_RESULT, RESPONSE_GENERATION

# The answer reaches the client with the journal, its message on the bus a moment before or after.
PUBLISHED_WITHIN = 5.0
_LOOK = 0.2
# So many seconds a participant that has been there may take to be back.
_BACK = 15.0

# Takes a sentence about the awaited message.
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TurnReport:
    query: str
    outcomes: list[Outcome]
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StoryReport:
    """`not_run`: why the story could not be tried, empty when it was."""

    story: Story
    turns: list[TurnReport] = field(default_factory=list)
    not_run: str = ""

    @property
    def failures(self) -> int:
        return sum(not outcome.ok for turn in self.turns for outcome in turn.outcomes)

    @property
    def checks(self) -> int:
        return sum(len(turn.outcomes) for turn in self.turns)


async def live_participants(api: Api) -> set[str]:
    """Names of the participants with at least one replica. One that has been there is waited for: it may be starting,
    or too busy just now to say that it lives."""
    loop = asyncio.get_running_loop()
    until = loop.time() + _BACK
    while True:
        found = rows(await api.get("/participants"), "participants")
        live = {str(row["name"]) for row in found if row["replicas"]}
        if len(live) == len(found) or loop.time() >= until:
            return live
        await asyncio.sleep(_LOOK)


def _waiting(say: Say, where: str, what: str) -> None:
    say(f"{where}: waiting for {what}")


def _silent(_text: str) -> None:
    pass


async def run_story(api: Api, story: Story, live: set[str], say: Say = _silent) -> StoryReport:
    """Try a story. What goes wrong on the way is a failed check, not an exception.

    say: called with the turn and the awaited message. Raises ApiError if the key lacks a right that the story needs.
    """
    missing = [name for name in story.requires if name not in live]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        return StoryReport(story, not_run=f"{', '.join(missing)} {verb} not running")
    if unknown := [name for name in story.given if not story.vars.get(name)]:
        return StoryReport(story, not_run=f"it needs --var {unknown[0]}=VALUE; see docs/stories.md")
    reports: list[TurnReport] = []
    events: list[str] = []
    session = ""
    loop = asyncio.get_running_loop()
    for number, turn in enumerate(story.turns, 1):
        session = session if turn.session == "same" else str(uuid.uuid4())
        began = loop.time()
        checks = [*turn.response_generation_checks, *story.response_generation_checks]
        whole = turn.model_copy(update={"response_generation_checks": list(dict.fromkeys(checks))})
        where = f"{story.id}, turn {number} of {len(story.turns)}"
        try:
            seen = await observe(api, whole, session, partial(_waiting, say, where))
        except ApiError as exc:
            if exc.status in (401, 403):
                # No story can be checked with this key: that is no fault of the answers.
                raise ApiError(
                    exc.code, f"the stories watch the bus, which takes an administrator's key: {exc}", exc.status
                ) from exc
            reports.append(TurnReport(turn.query, [Outcome("the query is answered", False, str(exc))]))
            break
        events.extend(seen.events)
        reports.append(TurnReport(turn.query, check_turn(whole, seen), loop.time() - began))
    else:
        if outcomes := list(check_events(story.expected_bus_events, events)):
            reports.append(TurnReport("(all turns)", outcomes))
    return StoryReport(story, reports)


async def observe(api: Api, turn: Turn, session: str, say: Say) -> Seen:
    """Ask the turn's query and collect the data for its checks. Raises ApiError."""
    body: dict[str, Any] = {"query": turn.query, "session_id": session}
    for name in ("mode", "personas", "rounds"):
        if (value := getattr(turn, name)) is not None:
            body[name] = value
    say("the answer")
    async with BusTap(api) as tap:
        reply = await api.post("/query", body, timeout=QUERY_TIMEOUT)
        query_id = str(reply["query_id"])

        def seen(**more: Any) -> Seen:
            return Seen(reply, tap.about(query_id), **more)

        async def published(subject: str, count: int, within: float) -> None:
            await tap.wait_for(lambda: len(seen().payloads(subject)) >= count, within)

        def told() -> bool:
            """Whether everything has been seen that the reply says."""
            entries = {(message.subject, message.entry_id) for message in tap.about(query_id)}
            return all((event.get("subject"), event.get("id")) in entries for event in reply.get("event_log") or ())

        respondents = len(turn.respondents)
        within = PUBLISHED_WITHIN if respondents == 1 else QUERY_TIMEOUT
        say("the messages on the bus" if respondents == 1 else "the answer of respondent B")
        await tap.wait_for(told, PUBLISHED_WITHIN)
        await published(RESPONSE_GENERATION.name, respondents, within)
        if turn.critique:
            say(f"the judge's grade, {turn.critique.within:g} s at most")
            await published(CRITIQUE_RESULT.name, respondents, turn.critique.within)
        if turn.pairwise:
            say(f"the judge's comparison, {turn.pairwise.within:g} s at most")
            await published(PAIRWISE_RESULT.name, 1, turn.pairwise.within)
        engrams: list[dict[str, Any]] = []
        dpo: list[dict[str, Any]] = []
        facts: list[str] = []
        if turn.engrams:
            say(f"memory, {turn.engrams.within:g} s at most")
            engrams = await _engrams(api, turn.engrams, seen())
        if turn.preferences:
            say(f"the export of preferences, {turn.preferences.within:g} s at most")
            dpo = await _dpo(api, turn.preferences, query_id)
        if turn.facts:
            say(f"knowledge, {turn.facts.within:g} s at most")
            facts = await _facts(api, turn.facts)
        return seen(engrams=engrams, dpo=dpo, facts=facts)


async def _dpo(api: Api, wanted: PreferenceCheck, query_id: str) -> list[dict[str, Any]]:
    """The query's rows in the export, as soon as there are so many; when none are wanted, those there are then."""
    loop = asyncio.get_running_loop()
    until = loop.time() + wanted.within
    while True:
        lines = (await api.text("/preferences/export", format="dpo")).splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
        found = [row for row in rows if row.get("provenance", {}).get("query_id") == query_id]
        if len(found) >= wanted.dpo or loop.time() > until:
            return found
        await asyncio.sleep(_LOOK)


async def _facts(api: Api, wanted: FactCheck) -> list[str]:
    """Looks until knowledge says it, or the time is over; what was seen last is for the checks."""
    loop = asyncio.get_running_loop()
    until = loop.time() + wanted.within
    while True:
        found = rows(await api.get("/knowledge/facts", about=wanted.about, limit=200), "facts")
        lines = [str(row.get("text") or "") for row in found]
        if all(says(line, lines) for line in wanted.lines) or loop.time() > until:
            return lines
        await asyncio.sleep(_LOOK)


async def _engrams(api: Api, wanted: EngramCheck, seen: Seen) -> list[dict[str, Any]]:
    """Looks until the engrams are as they should be, or the time is over; what was seen last is for the checks."""
    loop = asyncio.get_running_loop()
    until = loop.time() + wanted.within
    while True:
        found = engrams_of(rows(await api.get("/memory/engrams"), "engrams"), seen.query_id)
        if whole(wanted, replace(seen, engrams=found)) or loop.time() > until:
            return found
        await asyncio.sleep(_LOOK)
