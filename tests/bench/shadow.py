"""`make bench-shadow`: what the shadow and the judge cost those who wait for an answer.

One run, over HTTP, with everything as processes: users ask, wait for the whole answer, and ask again after a moment.
The time to the first token of A's answer is taken alone, beside respondent-b and critic, and both again, so that the
difference can be told from the noise. Once with a model server that has room, once with one that answers one request at
a time (as one small GPU does); there also with a shadow and a judge that do not yield, to show what yielding is worth.
Then a talk: a question, and follow-ups after 0, 1, 5 and 10 seconds, at an Ollama of one slot that reads a prompt in
its time and holds one conversation; with respondent B, the judge and memory's labels, and without.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx
from support.http_stack import ADMIN_KEY, free_port
from support.stack import Participants
from support.waiting import eventually

from services.cli.launch.embedded_redis import EmbeddedRedis
from shared.testing.model_server import Rules
from shared.testing.ollama_server import ScriptedOllama

# 0.2 s until the first word, then 50 words a second.
_ANSWER = " ".join(f"word{n}" for n in range(40))
_SPEED = {"delay": 0.2, "pace": 0.02}
RULES: Rules = [
    {"when": {"user": "###Response B:"}, "respond": {"text": f"{_ANSWER} [RESULT] A", **_SPEED}},
    {"when": {"user": "###Score Rubrics"}, "respond": {"text": f"{_ANSWER} [RESULT] 4", **_SPEED}},
    {"respond": {"text": _ANSWER, **_SPEED}},
]


async def ask(http: httpx.AsyncClient, text: str, session: str | None = None) -> float:
    """Asks and reads the whole answer; the seconds until its first token."""
    began, first = time.perf_counter(), 0.0
    headers = {"Accept": "text/event-stream"}
    body = {"query": text} if session is None else {"query": text, "session_id": session}
    async with http.stream("POST", "/query", json=body, headers=headers) as answer:
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
        async with ScriptedOllama(RULES, slots=places) as model:
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


# Seconds from an answer to the next question. The target holds for those that come before the background begins; the
# last one meets it at work, and its conversation gone from the server's cache.
PAUSES = (0.0, 1.0, 5.0, 10.0)
MOST = 1.5
_TALK = [
    {"when": {"system": "You label one turn"}, "respond": {"text": "word " * 200, **_SPEED}},
    *RULES,
]
BACKGROUND = ("respondent-b", "critic", "memory")


async def talks(number: int, rest: float) -> bool:
    """Whether the follow-ups in the target's reach kept it. `rest`: seconds of quiet before the background begins."""
    taken: dict[str, dict[float, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="local2-talk-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        server = stack.enter_context(EmbeddedRedis(folder / "redis"))
        async with ScriptedOllama(_TALK, reading=500.0) as model:
            port = free_port()
            people = stack.enter_context(
                Participants(server.url, model.url, folder / "data", heartbeat=1, log_level="error",
                             admin_key=ADMIN_KEY, api_port=port, memory_classify="model", yield_rest=rest)
            )  # fmt: skip
            for one in ("gateway", "generator"):
                people.start(one)
                await people.ready(one, timeout=60)
            for turn in range(2 * number):
                arm = "with everything in the background" if turn % 2 else "A alone"
                beside = [people.start(one) for one in BACKGROUND] if turn % 2 else []
                for one in beside:
                    await people.ready(one.name, timeout=120)
                found = await talk(f"http://127.0.0.1:{port}", f"talk-{turn}")
                for pause, first in found.items():
                    taken.setdefault(arm, {}).setdefault(pause, []).append(first)
                for one in beside:
                    one.send(signal.SIGTERM)
                    await eventually(lambda one=one: not one.alive, 30, f"{one.name} ends")
            cut = sum(one.outcome == "aborted" for one in model.requests)
    print(f"{'milliseconds to the first token, after':<46}" + "".join(f"{pause:>8g} s" for pause in PAUSES))
    for arm, found in taken.items():
        print(f"  {arm:<44}" + "".join(f"{statistics.median(found[pause]) * 1000:>10.0f}" for pause in PAUSES))
    alone, both = taken.values()
    ratios = {pause: statistics.median(both[pause]) / statistics.median(alone[pause]) for pause in PAUSES}
    print(f"  {'ratio':<44}" + "".join(f"{ratios[pause]:>10.2f}" for pause in PAUSES))
    kept = all(ratios[pause] <= MOST for pause in PAUSES[:-1])
    print(f"  after 0, 1 and 5 s at most {MOST}: {'kept' if kept else 'NOT KEPT'}; calls that were broken off: {cut}")
    return kept


async def talk(url: str, session: str) -> dict[float, float]:
    """By the pause before it, a follow-up's seconds to its first token."""
    found = {}
    async with httpx.AsyncClient(
        base_url=url, headers={"Authorization": f"Bearer {ADMIN_KEY}"}, timeout=300, trust_env=False
    ) as http:
        await ask(http, "the first question", session)
        for pause in PAUSES:
            await asyncio.sleep(pause)
            found[pause] = await ask(http, f"and after {pause:g} seconds", session)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench-shadow", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="for each row")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--talks", type=int, default=3, help="talks of either kind")
    parser.add_argument("--rest", type=float, default=6.0, help="yield_rest in the talks, in seconds")
    parser.add_argument("--only-talks", action="store_true")
    options = parser.parse_args()
    if options.only_talks:
        return 0 if asyncio.run(talks(options.talks, options.rest)) else 1
    print(f"{'milliseconds to the first token of A':<46}{'asked':>6}{'p50':>9}{'p95':>9}{'most':>9}{'model calls':>12}")
    for title, places, number in (("a backend with room, 4 users", 64, 4), ("a backend with one place, 1 user", 1, 1)):
        print(title)
        asyncio.run(arms(places, number, options.seconds, options.rounds))
    print("a talk at a backend with one place")
    return 0 if asyncio.run(talks(options.talks, options.rest)) else 1


if __name__ == "__main__":
    sys.exit(main())
