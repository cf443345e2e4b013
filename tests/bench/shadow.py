"""`make bench-shadow`: what the shadow and the judge cost those who wait for an answer.

One run, over HTTP, with everything as processes: users ask, wait for the whole answer, and ask again after a moment.
The time to the first token of A's answer is taken alone, beside respondent-b and critic, and both again, so that the
difference can be told from the noise. Once with a model server that has room, once with one that answers one request at
a time (as one small GPU does); there also with a shadow and a judge that do not yield, to show what yielding is worth.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from support.http_stack import ADMIN_KEY, free_port
from support.stack import Participants
from support.waiting import eventually

from services.cli.launch.embedded_redis import EmbeddedRedis
from shared.testing.model_server import Rules, ScriptedModelServer

# 0.2 s until the first word, then 50 words a second.
_ANSWER = " ".join(f"word{n}" for n in range(40))
_SPEED = {"delay": 0.2, "pace": 0.02}
RULES: Rules = [
    {"when": {"user": "###Response B:"}, "respond": {"text": f"{_ANSWER} [RESULT] A", **_SPEED}},
    {"when": {"user": "###Score Rubrics"}, "respond": {"text": f"{_ANSWER} [RESULT] 4", **_SPEED}},
    {"respond": {"text": _ANSWER, **_SPEED}},
]


class InLine(Response):
    """An answer that waits for its place; a client that leaves the line gives it up."""

    def __init__(self, answer: Response, places: asyncio.Semaphore) -> None:
        super().__init__()
        self._answer = answer
        self._places = places

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        turn = asyncio.ensure_future(self._places.acquire())
        leaving = asyncio.ensure_future(receive())
        await asyncio.wait({turn, leaving}, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not turn.done():
            turn.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await turn
                self._places.release()
            return
        try:
            await self._answer(scope, receive, send)
        finally:
            self._places.release()


class Narrow(ScriptedModelServer):
    """A model server with so many places."""

    def __init__(self, rules: Rules, places: int) -> None:
        super().__init__(rules)
        self._places = asyncio.Semaphore(places)

    async def _perform(self, *args: Any) -> Response:
        return InLine(await super()._perform(*args), self._places)


async def ask(http: httpx.AsyncClient, text: str) -> float:
    """Asks and reads the whole answer; the seconds until its first token."""
    began, first = time.perf_counter(), 0.0
    headers = {"Accept": "text/event-stream"}
    async with http.stream("POST", "/query", json={"query": text}, headers=headers) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not first and line in ("event: answer", "event: thinking"):
                first = time.perf_counter() - began
    return first


async def users(url: str, number: int, seconds: float, seed: int) -> list[float]:
    until, found = time.monotonic() + seconds, list[float]()

    async def user(place: int) -> None:
        rng = random.Random(seed + place)
        async with httpx.AsyncClient(
            base_url=url, headers={"Authorization": f"Bearer {ADMIN_KEY}"}, timeout=120, trust_env=False
        ) as http:
            while time.monotonic() < until:
                await asyncio.sleep(rng.uniform(0.2, 2.0))
                found.append(await ask(http, f"question {place} {len(found)}"))

    await asyncio.gather(*(user(place) for place in range(number)))
    return found


def row(name: str, found: Sequence[float]) -> str:
    marks = statistics.quantiles(found, n=20)
    values = (statistics.median(found), marks[18], max(found))
    return f"{name:<46}{len(found):>6}" + "".join(f"{value * 1000:>9.0f}" for value in values)


async def arms(places: int, number: int, seconds: float, rounds: int) -> None:
    wanted = [("A alone", None), ("with B and critic", "0")] * rounds
    if places == 1:
        wanted += [("with B and critic that do not yield", "1000000")] * rounds
    taken: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="local2-shadow-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        server = stack.enter_context(EmbeddedRedis(folder / "redis"))
        async with Narrow(RULES, places) as model:
            port = free_port()
            people = stack.enter_context(
                Participants(server.url, model.url, folder / "data", heartbeat=1, log_level="error",
                             admin_key=ADMIN_KEY, api_port=port, generator_concurrency=16)
            )  # fmt: skip
            for one in ("gateway", "generator"):
                people.start(one)
                await people.ready(one, timeout=60)
            url = f"http://127.0.0.1:{port}"
            await users(url, 1, 2.0, 99)
            for turn, (arm, yields) in enumerate(wanted):
                beside = []
                if yields is not None:
                    values = {"yield_above": yields}
                    beside = [people.start("respondent-b", **values), people.start("critic", **values)]
                    await people.ready("respondent-b", timeout=60)
                    await people.ready("critic", timeout=60)
                asked = len(model.requests)
                found = await users(url, number, seconds, turn)
                taken.setdefault(arm, []).extend(found)
                print(row(f"  {arm}", found) + f"{len(model.requests) - asked:>12}", flush=True)
                for one in beside:
                    # in good order: a dead one would seem to be there for some seconds
                    one.send(signal.SIGTERM)
                    await eventually(lambda one=one: not one.alive, 20, f"{one.name} ends")
    print("together")
    for arm, found in taken.items():
        print(row(f"  {arm}", found))


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench-shadow", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="for each row")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    print(f"{'milliseconds to the first token of A':<46}{'asked':>6}{'p50':>9}{'p95':>9}{'most':>9}{'model calls':>12}")
    for title, places, number in (("a backend with room, 4 users", 64, 4), ("a backend with one place, 1 user", 1, 1)):
        print(title)
        asyncio.run(arms(places, number, options.seconds, options.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
