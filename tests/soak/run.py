"""`make soak`: many queries through a whole stack; does anything grow that should not?

A Redis of its own, the scripted model, and one process of each participant: gateway, both respondents, web_search, a
second tool, memory, critic, reward. Clients hold conversations of some turns over HTTP, rate an answer of each, and
delete them; memory and reward forget with them. Journals, results and the like are kept for half a minute, so that they
expire during the run. The memory of every process, that of Redis, what is on the disk, and the length of every stream
are sampled; after a warm-up a line is put through them. The status is 0 only when nothing grows beyond its bound, no
stream is longer than it may be, every query was answered, and no key of a query stays in Redis for good.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.callers import Caller
from support.http_stack import ADMIN_KEY, free_port
from support.resting import everlasting, kind_of, level
from support.slope import Slope, slope
from support.stack import Participants

from services.cli.launch.embedded_redis import EmbeddedRedis
from services.gateway.http.bus_state import read_bus
from shared.bus import Bus
from shared.bus.keys import rewards_key, subject_of
from shared.bus.streams import event_length
from shared.contracts import PREFIX
from shared.telemetry.logging import configure
from shared.testing.model_server import ScriptedModelServer

PARTICIPANTS = ("gateway", "generator", "respondent-b", "web_search", "probe", "memory", "critic", "reward")
TURNS = 8
DEADLINE = 60.0
RETENTION = 30
MB = 1024 * 1024
# Entries that may wait for all groups together before another conversation begins.
WAITING = 300
# Seconds after the last answer until all of them are judged and forgotten.
SETTLED = 120.0
# MB per 1,000 queries: twice as much would be a gigabyte after four million.
BOUND = 0.25
# An embedded Chroma gives back little of what was deleted; each query leaves two engrams, for a while.
OWN_BOUNDS = {"memory": 8.0, "memory (on the disk)": 4.0}
# What a work stream may hold: what is being worked on, and what the next tidying removes.
WORK_LENGTH = 2_000
# Redis trims an event stream by whole nodes of up to a hundred entries.
NODE = 200
USED, RESIDENT = "Redis (used_memory)", "Redis (resident)"
# What memory knows in Redis of an engram is kept for days; here for as long as journals. That one was deleted is known
# for longer than a busy machine needs to hear of its answer.
PENDING_DAYS, FORGET_DAYS = RETENTION / 86_400, 6 * RETENTION / 86_400
# Sums by configuration that stay: at most 400 of each (`services.generator.rewards`).
SUMS = {rewards_key(side, "counts") for side in "AB"} | {rewards_key(side, "sums") for side in "AB"}
# On the disk: the folders of a participant's own.
STORES = {"memory (on the disk)": ("chroma", "chroma-words"), "reward (on the disk)": ("preferences.sqlite*",)}
# Of Redis: resident bytes for each byte in use at the peak, and MB of the program itself.
FRAGMENTED, BASE = 2.5, 8.0

RULES: list[dict[str, Any]] = [
    {
        "when": {"user": "^search", "tool_results": 0},
        "respond": {"thinking": "I look.", "tool_calls": [{"name": "web_search", "args": {"query": "<<query>>"}}]},
    },
    {
        "when": {"user": "^try", "tool_results": 0},
        "respond": {"text": "One moment. ", "tool_calls": [{"name": "probe", "args": {"text": "tried"}}]},
    },
    {
        "when": {"user": "^recall", "tool_results": 0},
        "respond": {"tool_calls": [{"name": "search_memory", "args": {"query": "<<query>>"}}]},
    },
    {"when": {"user": "###Response B:"}, "respond": {"text": "The first is clearer. [RESULT] A"}},
    {"when": {"user": "###Score Rubrics"}, "respond": {"text": "It is right. [RESULT] 4"}},
    {"when": {"system": "You label one turn"}, "respond": {"text": '{"intent": "question", "entities": ["Soak"]}'}},
    {"respond": {"thinking": "Now I know.", "text": "The answer to this is: <<query>>"}},
]
KINDS = ("search", "try", "recall", "say")


@dataclass
class Run:
    answered: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    memory: dict[str, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    lengths: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    keys: list[int] = field(default_factory=list)
    left: dict[str, tuple[int, int]] = field(default_factory=dict)


async def converse(
    caller: Caller, http: httpx.AsyncClient, bus: Bus, run: Run, numbers: list[int], worker: int
) -> None:
    """Conversations of some turns, one after the other, until the numbers are used up; the last answer is rated.

    Nobody begins while much is still to be judged and remembered: what waits in a queue is no growth.
    """
    while numbers:
        while sum((await unfinished(bus)).values()) > WAITING:
            await asyncio.sleep(0.2)
        if not numbers:
            break
        mine = [numbers.pop() for _ in range(min(TURNS, len(numbers)))]
        session = f"soak-{worker}-{mine[0]}"
        for number in mine:
            text = f"{KINDS[number % len(KINDS)]} number {number}"
            asked = await caller.ask(text, session, deadline=DEADLINE)
            if asked.answer != f"The answer to this is: {text}":
                run.wrong.append(f"{text}: {asked.refused or asked.answer or asked.end}")
            run.answered += 1
        vote = {"sentiment": ("positive", "negative")[mine[0] % 2], "comment": "as it was"}
        rated = await http.post("/feedback", json={"query_id": asked.query_id, **vote})
        if not rated.is_success:
            run.wrong.append(f"{text}: the vote was refused: {rated.text}")
        deleted = await caller.delete(f"/sessions/{session}", time.monotonic() + 60)
        if deleted.status_code != 200:
            run.wrong.append(f"{session} was not deleted: {deleted.status_code} {deleted.text}")


async def sample(bus: Bus, run: Run, processes: dict[str, psutil.Process], data: Path, seconds: float) -> None:
    """Looks at everything, again and again."""
    while True:
        for name, process in processes.items():
            run.memory[name].append((run.answered, process.memory_info().rss / MB))
        for name, patterns in STORES.items():
            run.memory[name].append((run.answered, sum(size_of(data, pattern) for pattern in patterns) / MB))
        now = await level(bus)
        run.memory[USED].append((run.answered, now.used / MB))
        run.keys.append(now.transient)
        subjects = {subject.stream for subject in await bus.subjects()}
        for stream in sorted(subjects):
            run.lengths[stream].append(int(await bus.link.call("XLEN", stream)))
        await asyncio.sleep(seconds)


def size_of(folder: Path, pattern: str) -> int:
    """Bytes of the files there; one that goes at this moment has none."""
    total = 0
    for path in folder.glob(pattern):
        for file in path.rglob("*") if path.is_dir() else (path,):
            with contextlib.suppress(FileNotFoundError):
                total += file.stat().st_size
    return total


async def unfinished(bus: Bus) -> dict[str, int]:
    """What every group of a work stream still has to do."""
    groups = (await read_bus(bus)).groups
    return {f"{one.stream} for {one.group}": number for one in groups if (number := one.lag + one.pending)}


async def settled(bus: Bus, run: Run) -> None:
    """Waits until everything is judged, remembered and forgotten, then looks at what is left in Redis."""
    until = time.monotonic() + SETTLED
    while left := await unfinished(bus):
        if time.monotonic() > until:
            run.wrong.append(f"still to be done: {left}")
            break
        await asyncio.sleep(0.5)
    run.wrong += [f"{key} stays for good" for key in await everlasting(bus) if key not in SUMS]
    lives: dict[str, list[int]] = defaultdict(list)
    async for raw in bus.scan(f"{PREFIX}*"):
        keys = [key.decode() for key in raw]
        for key, left_ms in zip(keys, await bus.link.pipe([("PTTL", key) for key in keys]), strict=True):
            if left_ms > 0:
                lives[kind_of(key)].append(left_ms // 1000)
    run.left = {kind: (len(found), max(found)) for kind, found in sorted(lives.items())}


async def soak(queries: int, workers: int, every: float) -> Run:
    run = Run()
    with tempfile.TemporaryDirectory(prefix="local2-soak-") as folder:
        root = Path(folder)
        with EmbeddedRedis(root / "redis") as server:
            async with ScriptedModelServer(RULES) as model, Bus(server.url, "soak/1") as bus:
                with Participants(
                    server.url, model.url, root / "data", retention=RETENTION, heartbeat=1,
                    memory_pending_days=PENDING_DAYS, memory_forget_days=FORGET_DAYS,
                    # the model has room for all of them: nobody waits until no user asks
                    yield_above=1_000, critic_concurrency=workers,
                ) as people:  # fmt: skip
                    port = free_port()
                    values = {"gateway": {"api_port": port, "admin_key": ADMIN_KEY, "keepalive": 5}}
                    processes = {
                        name: psutil.Process(people.start(name, **values.get(name, {})).pid) for name in PARTICIPANTS
                    }
                    assert server.pid is not None
                    processes[RESIDENT] = psutil.Process(server.pid)
                    for name in PARTICIPANTS:
                        await people.ready(name, 1, 120)
                    url = f"http://127.0.0.1:{port}"
                    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
                    async with (
                        Caller([url], ADMIN_KEY, alive=30.0) as caller,
                        httpx.AsyncClient(base_url=url, headers=headers, timeout=30, trust_env=False) as http,
                    ):
                        sampling = sample(bus, run, processes, people.folder, every)
                        await work(caller, http, bus, run, sampling, queries, workers)
                        await settled(bus, run)
                        if engrams := (await http.get("/memory/engrams")).json()["total"]:
                            run.wrong.append(f"memory has {engrams} engrams of deleted sessions")
                    for one in people.started:
                        if not one.alive:
                            run.wrong.append(f"{one.name} ended by itself: {one.log()[-500:]}")
    return run


async def work(
    caller: Caller,
    http: httpx.AsyncClient,
    bus: Bus,
    run: Run,
    sampling: Coroutine[Any, Any, None],
    queries: int,
    workers: int,
) -> None:
    began = time.monotonic()
    beside = [asyncio.create_task(sampling), asyncio.create_task(tell(run, queries, began))]
    numbers = list(range(queries, 0, -1))
    try:
        async with asyncio.TaskGroup() as group:
            for worker in range(workers):
                group.create_task(converse(caller, http, bus, run, numbers, worker))
    finally:
        for task in beside:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    run.seconds = time.monotonic() - began


async def tell(run: Run, queries: int, began: float) -> None:
    while True:
        await asyncio.sleep(30)
        rate = run.answered / (time.monotonic() - began)
        print(f"{run.answered:>7} of {queries} answered, {rate:.1f} a second", flush=True)


def longest(stream: str) -> int:
    """How long a stream may be."""
    keep = event_length(subject_of(stream))
    return WORK_LENGTH if keep is None else keep + NODE


def judged(run: Run, queries: int, warm: int, bound: float) -> tuple[str, list[str], dict[str, Slope]]:
    """The tables, what is wrong, and the slopes."""
    wrong = [f"{len(run.wrong)} things were wrong, such as:", *run.wrong[:8]] if run.wrong else []
    if run.answered != queries:
        wrong.append(f"{run.answered} of {queries} answered")
    slopes = {name: slope([s for s in samples if s[0] >= warm]) for name, samples in run.memory.items()}
    lines = [f"{'MB':<24}{'after warm-up':>14}{'at the end':>12}{'per 1,000 queries':>22}"]
    for name, found in slopes.items():
        if name == RESIDENT:
            # an allocator keeps what a burst has needed: resident memory follows the peak, and must stay near it
            most = FRAGMENTED * max(used for _, used in run.memory[USED]) + BASE
            lines.append(f"{name:<24}{found.first:>14.2f}{found.last:>12.2f}{f'at most {most:.0f}':>22}")
            if found.last > most:
                wrong.append(f"{name} has {found.last:.0f} MB; {most:.0f} are allowed")
            continue
        lines.append(f"{name:<24}{found.first:>14.2f}{found.last:>12.2f}{found.value:>+13.3f} ± {found.error:.3f}")
        most = max(bound, OWN_BOUNDS.get(name, 0.0))
        if found.grows(most):
            wrong.append(f"{name} grows by {found.value:.3f} MB per 1,000 queries; {most:g} are allowed")
    lines.append(f"\n{'entries':<44}{'most':>8}{'at the end':>12}{'allowed':>9}")
    for stream, lengths in run.lengths.items():
        if max(lengths):
            lines.append(f"{stream:<44}{max(lengths):>8}{lengths[-1]:>12}{longest(stream):>9}")
        if max(lengths) > longest(stream):
            wrong.append(f"{stream} had {max(lengths)} entries")
    lines.append(f"{'keys of queries, sessions included':<44}{max(run.keys):>8}{run.keys[-1]:>12}")
    lines.append(f"\n{'keys with a time to live':<44}{'number':>8}{'seconds left, at most':>24}")
    lines += [f"{kind:<44}{number:>8}{longest:>24}" for kind, (number, longest) in run.left.items()]
    return "\n".join(lines), wrong, slopes


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--queries", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=8, help="conversations at a time")
    parser.add_argument("--warm", type=float, default=0.2, help="share of the queries before the first sample counts")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two samples")
    parser.add_argument("--bound", type=float, default=BOUND, help="MB per 1,000 queries that a process may grow by")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the samples there")
    options = parser.parse_args()

    async def started() -> Run:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await soak(options.queries, options.workers, options.every)

    logging.getLogger("asyncio").setLevel(logging.ERROR)
    configure("error", "console", participant="soak")
    run = asyncio.run(started())
    if options.json:
        options.json.write_text(json.dumps({"memory": run.memory, "lengths": run.lengths, "keys": run.keys}))
    text, wrong, _ = judged(run, options.queries, int(options.queries * options.warm), options.bound)
    print(f"{run.answered} queries in {run.seconds:.0f} s, {run.answered / run.seconds:.1f} a second\n\n{text}")
    if wrong:
        print("\n".join(["", "FAILED", *wrong]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
