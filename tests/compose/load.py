"""Load over the published API: queries with tools, several of a session at once, repeated until they are accepted."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from stack import Stack

SESSIONS_AT_ONCE = 10
PER_SESSION = 3
# A query that has not ended this long after it was accepted is stuck.
PATIENCE = 120.0
# How many of the queries are sent twice.
TWICE = 0.2
# How many of the answers are voted on.
VOTED = 0.3
# "plain" is answered without a tool, and therefore graded where there is a critic.
KINDS = ("both", "search", "fetch", "plain")
_numbers = itertools.count(1)


class Endpoints:
    """The gateways' published addresses; ports change when containers come and go."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._urls: list[str] = []
        self._looked = float("-inf")
        self._looking = asyncio.Lock()

    async def pick(self) -> str | None:
        if time.monotonic() - self._looked > 5:
            await self.refresh()
        return random.choice(self._urls) if self._urls else None

    async def refresh(self) -> None:
        """Looks again, at most twice a second."""
        async with self._looking:
            if time.monotonic() - self._looked > 0.5:
                self._urls = await asyncio.to_thread(self._stack.urls)
                self._looked = time.monotonic()


class Client:
    """Requests that are repeated, at any gateway, until one of them answers."""

    def __init__(self, stack: Stack) -> None:
        self.endpoints = Endpoints(stack)
        self.repeated: Counter[str] = Counter()
        self.http = httpx.AsyncClient(
            headers={"authorization": f"Bearer {stack.admin_key}"},
            timeout=httpx.Timeout(15.0, connect=2.0),
            limits=httpx.Limits(max_connections=200, max_keepalive_connections=50),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.http.aclose()

    async def call(self, method: str, path: str, within: float = PATIENCE, **request: Any) -> httpx.Response:
        """The first answer that is neither busy nor away. Raises TimeoutError after `within` seconds."""
        async with asyncio.timeout(within):
            while True:
                url = await self.endpoints.pick()
                reason = "no gateway"
                if url is not None:
                    try:
                        answer = await self.http.request(method, url + path, **request)
                    except httpx.HTTPError as exc:
                        reason = type(exc).__name__
                    else:
                        if answer.status_code not in (429, 502, 503):
                            return answer
                        reason = str(answer.status_code)
                self.repeated[reason] += 1
                await asyncio.sleep(0.2)
                await self.endpoints.refresh()


@dataclass
class Outcome:
    """`queries`: what was accepted. `refused`: answers to a query that were no acceptance. `votes`: those accepted."""

    queries: list[dict[str, str]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    votes: dict[str, str] = field(default_factory=dict)
    repeated: Counter[str] = field(default_factory=Counter)
    waited_too_long: int = 0
    slowest: float = 0.0


class Load:
    """Runs while the block does; `finish` takes no new queries and waits for those under way."""

    def __init__(self, stack: Stack, sessions: int = SESSIONS_AT_ONCE, *, with_key: bool = True) -> None:
        self._stack = stack
        self._sessions = sessions
        self._with_key = with_key
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self.outcome = Outcome()

    async def __aenter__(self) -> Self:
        self._client = Client(self._stack)
        self._tasks = [asyncio.create_task(self._lane()) for _ in range(self._sessions)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        if error is not None:
            for task in self._tasks:
                task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.__aexit__(None, None, None)
        self.outcome.repeated = self._client.repeated
        for result in results:
            if error is None and isinstance(result, BaseException):
                raise result

    async def _lane(self) -> None:
        """One session after the other."""
        while not self._stopping:
            session = f"ctest-{uuid.uuid4().hex[:12]}"
            texts = [f"load {random.choice(KINDS)} {next(_numbers)}" for _ in range(PER_SESSION)]
            ids = await asyncio.gather(*(self._ask(session, text) for text in texts))
            began = time.monotonic()
            for query_id in ids:
                if query_id is not None:
                    await self._ended(query_id, began + PATIENCE)
            self.outcome.slowest = max(self.outcome.slowest, time.monotonic() - began)

    async def _ask(self, session: str, text: str) -> str | None:
        """The id of the accepted query. The same key with every repeat: it is asked once."""
        headers = {"idempotency-key": uuid.uuid4().hex} if self._with_key else {}
        body = {"query": text, "session_id": session, "deadline_seconds": PATIENCE}
        asking = [self._client.call("POST", "/query?wait=false", json=body, headers=headers)]
        if random.random() < TWICE:
            # as a client does whose answer got lost
            asking.append(self._client.call("POST", "/query?wait=false", json=body, headers=headers))
        answer, *again = await asyncio.gather(*asking)
        if any(other.is_success and other.json()["query_id"] != answer.json().get("query_id") for other in again):
            self.outcome.refused.append(f"two queries for one key: {answer.text[:100]}")
        if not answer.is_success:
            self.outcome.refused.append(f"{answer.status_code} {answer.text[:200]}")
            return None
        query_id = str(answer.json()["query_id"])
        self.outcome.queries.append({"id": query_id, "session": session, "text": text})
        return query_id

    async def _ended(self, query_id: str, until: float) -> None:
        while time.monotonic() < until:
            answer = await self._client.call("GET", f"/queries/{query_id}")
            if answer.is_success and (state := answer.json()["state"]) in ("completed", "failed", "cancelled"):
                if state == "completed" and random.random() < VOTED:
                    await self._vote(query_id)
                return
            if answer.status_code == 404:
                # lost; the audit counts it
                return
            await asyncio.sleep(0.4)
        # the audit says what became of it
        self.outcome.waited_too_long += 1

    async def _vote(self, query_id: str) -> None:
        """A vote that is sent again after a lost answer is the same vote."""
        sentiment = random.choice(("positive", "negative"))
        answer = await self._client.call("POST", "/feedback", json={"query_id": query_id, "sentiment": sentiment})
        if answer.is_success:
            self.outcome.votes[query_id] = sentiment
        else:
            self.outcome.refused.append(f"a vote: {answer.status_code} {answer.text[:200]}")


@dataclass
class Verdict:
    """What an audited load came to. Every number of `zeros` has to be zero."""

    accepted: int
    answered: int
    zeros: dict[str, int]
    notes: dict[str, Any]
    details: list[str]

    @property
    def good(self) -> bool:
        return self.accepted == self.answered > 0 and not any(self.zeros.values())

    def lines(self) -> list[str]:
        shown = [f"accepted {self.accepted}, answered {self.answered}"]
        shown.append(", ".join(f"{name} {number}" for name, number in self.zeros.items()))
        shown.append(", ".join(f"{name} {value}" for name, value in self.notes.items()))
        return shown + ([] if self.good else self.details[:20])


def open_audit(stack: Stack, script: Path, redis_url: str) -> None:
    """Before the first load: from now on the bus keeps what is to be counted."""
    stack.python(f"{stack.name}_bus", script, stdin='{"open": true}', LOCAL2_REDIS_URL=redis_url)


def judge(
    stack: Stack, outcome: Outcome, script: Path, redis_url: str, settle: float
) -> tuple[Verdict, dict[str, Any]]:
    """Asks the bus itself, not the gateways, what became of every accepted query; and which engrams there must be."""
    given = json.dumps({"queries": outcome.queries, "settle": settle, "judged": stack.judged})
    said = stack.python(f"{stack.name}_bus", script, stdin=given, timeout=settle + 120, LOCAL2_REDIS_URL=redis_url)
    found = json.loads(said)
    zeros = dict.fromkeys(("answered twice", "stuck", "pending", "dead letters", "turns missing"), 0)
    zeros |= dict.fromkeys(("grades", "verdicts"), 0) if stack.judged else {}
    zeros |= found["wrong"]
    zeros["refused"] = len(outcome.refused)
    notes = {
        **{name: number for name, number in found["seen"].items() if name != "answered"},
        "votes": len(outcome.votes),
        "slowest session": f"{outcome.slowest:.1f} s",
        "requests repeated": dict(outcome.repeated) or 0,
    }
    details = [*outcome.refused[:5], *found["details"]]
    verdict = Verdict(len(outcome.queries), found["seen"].get("answered", 0), zeros, notes, details)
    return verdict, found["engrams"]
