"""`make soak`: many queries through a whole stack; does anything grow that should not?

A Redis of its own, the scripted model, and one process of each participant: gateway, generator, web_search, a second
tool. Clients hold conversations of some turns over HTTP and delete them. Journals, results and the like are kept for
half a minute, so that they expire during the run. The memory of every process, that of Redis, and the length of every
stream are sampled; after a warm-up a line is put through them. The status is 0 only when nothing grows beyond its
bound, no stream is longer than it may be, and every query was answered.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.callers import Caller
from support.http_stack import ADMIN_KEY, free_port
from support.resting import level
from support.slope import Slope, slope
from support.stack import Participants

from services.cli.embedded_redis import EmbeddedRedis
from shared.bus import Bus
from shared.bus.streams import event_length
from shared.contracts import MEMORY_FORGET, PREFIX, RESPONSE_GENERATION
from shared.logging import configure
from shared.testing.model_server import ScriptedModelServer

PARTICIPANTS = ("gateway", "generator", "web_search", "probe")
TURNS = 8
DEADLINE = 60.0
RETENTION = 30
MB = 1024 * 1024
# MB per 1,000 queries: twice as much would be a gigabyte after four million.
BOUND = 0.25
# What a work stream may hold: what is being worked on, and what the next tidying removes.
WORK_LENGTH = 2_000
# Redis trims an event stream by whole nodes of up to a hundred entries.
NODE = 200
GROUP = "soak"
USED, RESIDENT = "Redis (used_memory)", "Redis (resident)"
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
    {"respond": {"thinking": "Now I know.", "text": "The answer to this is: <<query>>"}},
]


@dataclass
class Run:
    answered: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    memory: dict[str, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    lengths: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    keys: list[int] = field(default_factory=list)


async def converse(caller: Caller, run: Run, numbers: list[int], worker: int) -> None:
    """Conversations of some turns, one after the other, until the numbers are used up."""
    while numbers:
        mine = [numbers.pop() for _ in range(min(TURNS, len(numbers)))]
        session = f"soak-{worker}-{mine[0]}"
        for number in mine:
            text = f"{('search', 'try', 'say')[number % 3]} number {number}"
            asked = await caller.ask(text, session, deadline=DEADLINE)
            if asked.answer != f"The answer to this is: {text}":
                run.wrong.append(f"{text}: {asked.refused or asked.answer or asked.end}")
            run.answered += 1
        await caller.delete(f"/sessions/{session}", time.monotonic() + 60)


async def sample(bus: Bus, run: Run, processes: dict[str, psutil.Process], seconds: float) -> None:
    """Looks at everything, again and again."""
    while True:
        for name, process in processes.items():
            run.memory[name].append((run.answered, process.memory_info().rss / MB))
        now = await level(bus)
        run.memory[USED].append((run.answered, now.used / MB))
        run.keys.append(now.transient)
        subjects = {subject.stream for subject in await bus.subjects()}
        for stream in sorted(subjects):
            run.lengths[stream].append(int(await bus.link.call("XLEN", stream)))
        await asyncio.sleep(seconds)


async def read_along(bus: Bus) -> None:
    """Reads what a memory would: a work stream that no group reads is bounded by length only."""
    streams = [RESPONSE_GENERATION.stream, MEMORY_FORGET.stream]
    for stream in streams:
        await bus.link.call("XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM")
    while True:
        for stream in streams:
            while reply := await bus.link.call("XREADGROUP", "GROUP", GROUP, "1", "COUNT", 200, "STREAMS", stream, ">"):
                await bus.link.call("XACK", stream, GROUP, *(entry_id for entry_id, _ in reply[0][1]))
        await asyncio.sleep(0.5)


async def soak(queries: int, workers: int, every: float) -> Run:
    run = Run()
    with tempfile.TemporaryDirectory(prefix="local2-soak-") as folder:
        root = Path(folder)
        with EmbeddedRedis(root / "redis") as server:
            async with ScriptedModelServer(RULES) as model, Bus(server.url, "soak/1") as bus:
                with Participants(server.url, model.url, root / "logs", retention=RETENTION, heartbeat=1) as people:
                    port = free_port()
                    values = {"gateway": {"api_port": port, "admin_key": ADMIN_KEY, "keepalive": 5}}
                    processes = {
                        name: psutil.Process(people.start(name, **values.get(name, {})).pid) for name in PARTICIPANTS
                    }
                    assert server.pid is not None
                    processes[RESIDENT] = psutil.Process(server.pid)
                    for name in PARTICIPANTS:
                        await people.ready(name, 1, 120)
                    async with Caller([f"http://127.0.0.1:{port}"], ADMIN_KEY, alive=30.0) as caller:
                        await work(caller, bus, run, processes, queries, workers, every)
                    for one in people.started:
                        if not one.alive:
                            run.wrong.append(f"{one.name} ended by itself: {one.log()[-500:]}")
    return run


async def work(
    caller: Caller,
    bus: Bus,
    run: Run,
    processes: dict[str, psutil.Process],
    queries: int,
    workers: int,
    every: float,
) -> None:
    began = time.monotonic()
    beside = [asyncio.create_task(read_along(bus)), asyncio.create_task(sample(bus, run, processes, every))]
    told = asyncio.create_task(tell(run, queries, began))
    numbers = list(range(queries, 0, -1))
    try:
        async with asyncio.TaskGroup() as group:
            for worker in range(workers):
                group.create_task(converse(caller, run, numbers, worker))
    finally:
        for task in (*beside, told):
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
    keep = event_length(stream.removeprefix(PREFIX))
    return WORK_LENGTH if keep is None else keep + NODE


def judged(run: Run, queries: int, warm: int, bound: float) -> tuple[str, list[str], dict[str, Slope]]:
    """The tables, what is wrong, and the slopes."""
    wrong = [f"{len(run.wrong)} queries: {run.wrong[0]}"] if run.wrong else []
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
        if found.grows(bound):
            wrong.append(f"{name} grows by {found.value:.3f} MB per 1,000 queries; {bound:g} are allowed")
    lines.append(f"\n{'entries':<44}{'most':>8}{'at the end':>12}{'allowed':>9}")
    for stream, lengths in run.lengths.items():
        if max(lengths):
            lines.append(f"{stream:<44}{max(lengths):>8}{lengths[-1]:>12}{longest(stream):>9}")
        if max(lengths) > longest(stream):
            wrong.append(f"{stream} had {max(lengths)} entries")
    lines.append(f"{'keys of queries, sessions included':<44}{max(run.keys):>8}{run.keys[-1]:>12}")
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
