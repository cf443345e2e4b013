"""What memory knows of a load, asked over the published API: each answer once, with what was said of it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

from load import Client, Outcome
from stack import Stack

PAGE = 200
# A list may be a moment behind what another replica of memory has just written.
PATIENCE = 20.0

Found = tuple[dict[str, int], list[str]]


def compare(listed: list[dict[str, Any]], wanted: dict[str, dict[str, Any]], votes: dict[str, str]) -> Found:
    """What is wrong, by kind, and in detail.

    listed: the engrams of the load's sessions. wanted: response → its grade and verdict. votes: query → the vote on A.
    """
    wrong: Counter[str] = Counter()
    details: list[str] = []

    def note(what: str, detail: str) -> None:
        wrong[what] += 1
        details.append(f"{what}: {detail}")

    times = Counter(engram["response_id"] for engram in listed)
    for name in wanted:
        if times[name] != 1:
            note("engrams missing" if not times[name] else "engrams twice", f"{name}: {times[name]} engrams")
    for engram in listed:
        name = engram["response_id"]
        if name not in wanted:
            note("engrams of nothing", f"{name}: {engram['query']!r}")
            continue
        said = wanted[name] | {"sentiment": votes.get(engram["query_id"]) if name.endswith(":A") else None}
        for what, value in said.items():
            if engram[what] != value:
                note("annotations", f"{name}: {what} is {engram[what]!r}, not {value!r}")
    return dict(wrong), details


async def listed(client: Client, sessions: set[str]) -> list[dict[str, Any]]:
    """All engrams of these sessions."""
    found: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        params = {"limit": PAGE} | ({"cursor": cursor} if cursor else {})
        answer = await client.call("GET", "/memory/engrams", params=params)
        page = answer.raise_for_status().json()
        found += [engram for engram in page["engrams"] if engram["session_id"] in sessions]
        if (cursor := page["cursor"]) is None:
            return found


async def remembered(stack: Stack, outcome: Outcome, wanted: dict[str, dict[str, Any]]) -> Found:
    sessions = {query["session"] for query in outcome.queries}
    until = time.monotonic() + PATIENCE
    async with Client(stack) as client:
        while True:
            wrong, details = compare(await listed(client, sessions), wanted, outcome.votes)
            if not wrong or time.monotonic() > until:
                return wrong, details
            await asyncio.sleep(1)
