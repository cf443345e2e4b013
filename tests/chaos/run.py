"""`make chaos`: kills participants at random under load, then counts what was lost, doubled, stuck or left over.

Everything runs on this machine: a Redis of its own, the scripted model, replicas of each participant as processes.
Every second (`--every`) one of them is killed (SIGKILL) and started again; half way Redis itself is. The status is 0
only when every accepted query was answered exactly once and nothing is left pending or dead.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.stack import Client, Participants, order, shown

from services.cli.embedded_redis import EmbeddedRedis
from shared.bus import Bus
from shared.contracts import QUERY_RECEIVED, RESPONSE_GENERATION, TOOL_REQUEST
from shared.journal import TERMINAL, EntryType
from shared.logging import configure
from shared.testing.model_server import ScriptedModelServer

REPLICAS = {"generator": 3, "probe": 2, "web_search": 2}
PER_SESSION = 4
SESSIONS_AT_ONCE = 16
DEADLINE = 120.0

RULES: list[dict[str, Any]] = [
    {
        "when": {"user": "^search", "tool_results": 0},
        "respond": {"thinking": "I look.", "tool_calls": [{"name": "web_search", "args": {"query": "<<query>>"}}]},
    },
    {
        "when": {"tool_results": 0},
        "respond": {
            "thinking": "I try it.",
            "text": "One moment. ",
            "tool_calls": [{"name": "probe", "args": {"text": "<<query>>", "seconds": 0.05}}],
        },
    },
    {"respond": {"thinking": "Now I know.", "text": "The answer to this is: <<query>>", "pace": 0.06}},
]


@dataclass
class Asked:
    query_id: str
    session: str
    text: str


@dataclass
class Count:
    """What the run came to; every number in `wrong` must be zero."""

    accepted: int = 0
    answered: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    claims: int = 0
    restarted: int = 0
    repeated_runs: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    details: list[str] = field(default_factory=list)

    def note(self, what: str, detail: str) -> None:
        self.wrong[what] += 1
        self.details.append(f"{what}: {detail}")


async def load(client: Client, queries: int, done: list[Asked], rng: random.Random) -> None:
    """Accepts queries, a few sessions at a time, several of each session at once."""
    room = asyncio.Semaphore(SESSIONS_AT_ONCE)

    async def session(number: int, texts: Sequence[str]) -> None:
        async with room:
            mine = []
            for text in texts:
                query_id = await client.ask(text, f"chaos-{number}", deadline=DEADLINE)
                mine.append(Asked(query_id, f"chaos-{number}", text))
                await asyncio.sleep(rng.uniform(0, 0.1))
            done.extend(mine)
            for asked in mine:
                with contextlib.suppress(AssertionError):  # counted as stuck
                    await client.ended(asked.query_id, DEADLINE + 30)

    texts = [f"{'search' if n % 3 == 0 else 'try'} number {n}" for n in range(queries)]
    async with asyncio.TaskGroup() as group:
        for number, start in enumerate(range(0, queries, PER_SESSION)):
            group.create_task(session(number, texts[start : start + PER_SESSION]))


async def havoc(
    processes: Participants,
    server: EmbeddedRedis,
    count: Count,
    rng: random.Random,
    every: float,
    half: Callable[[], bool],
) -> None:
    """Kills random replicas and starts others in their place; kills Redis once, when `half` is true."""
    redis_killed = False
    while True:
        await asyncio.sleep(every)
        if half() and not redis_killed:
            redis_killed = True
            count.kills["redis"] += 1
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            continue
        victim = rng.choice([one for one in processes.started if one.alive])
        victim.kill()
        count.kills[victim.name] += 1
        processes.start(victim.name)


async def judge(client: Client, asked: Sequence[Asked], count: Count) -> None:
    """Looks at everything that the run left behind."""
    count.accepted = len(asked)
    published = Counter(g.query_id for g in await client.published(RESPONSE_GENERATION))
    for one in asked:
        journal = await client.journal(one.query_id)
        ends = [entry for entry in journal if entry.type in TERMINAL]
        count.claims += sum(entry.type is EntryType.CLAIMED for entry in journal)
        count.restarted += sum(entry.type is EntryType.RESTARTED for entry in journal)
        if not ends:
            count.note("stuck", f"{one.query_id} {one.text!r}: {journal[-1].type if journal else 'no journal'}")
            continue
        if ends[0].type is not EntryType.COMPLETED:
            count.note("failed", f"{one.query_id} {one.text!r}: {ends[0].data!r}")
            continue
        count.answered += 1
        answer = ends[0].value()["answer"]
        if len(ends) > 1 or published[one.query_id] > 1:
            count.note("answered twice", f"{one.query_id}: {len(ends)} ends, {published[one.query_id]} published")
        if published[one.query_id] == 0:
            count.note("not published", one.query_id)
        if answer != f"The answer to this is: {one.text}" or shown(journal) != answer:
            count.note("wrong text", f"{one.query_id}: {shown(journal)!r} for {one.text!r}")
    for session in sorted({one.session for one in asked}):
        wanted = sorted((one.query_id for one in asked if one.session == session), key=order)
        kept = [turn.query_id for turn in await client.turns(session)]
        if kept != wanted:
            count.note("turns missing or out of order", f"{session}: {kept} instead of {wanted}")
    count.repeated_runs = sum(number - 1 for number in (await client.effects()).values())
    for stream in (QUERY_RECEIVED.stream, *(TOOL_REQUEST.for_tool(name).stream for name in ("probe", "web_search"))):
        for group in (await client.bus.state(stream)).groups:
            for what, number in (("pending", group.pending), ("unread", group.lag)):
                if number:
                    count.wrong[what] += number
                    count.details.append(f"{what}: {number} of {group.name} on {stream}")
    for entry_id, fields in await client.bus.range("local2:dead.letter"):
        count.note("dead letters", f"{entry_id}: {fields[-1].decode(errors='replace')[:300]}")


async def settled(client: Client, seconds: float) -> None:
    """Waits until the groups have acknowledged what they did, at most so long."""
    with contextlib.suppress(AssertionError):
        await client.idle(timeout=seconds)


async def chaos(queries: int, seconds: float, every: float, seed: int) -> Count:
    count, rng, asked = Count(), random.Random(seed), list[Asked]()
    with tempfile.TemporaryDirectory(prefix="local2-chaos-") as folder:
        root = Path(folder)
        # confirmed means written to disk: a killed Redis may lose nothing that was accepted
        with EmbeddedRedis(root / "redis", extra={"appendfsync": "always"}) as server:
            async with ScriptedModelServer(RULES) as model, Bus(server.url, "chaos/1") as bus:
                client = Client(bus)
                with Participants(server.url, model.url, root / "logs") as processes:
                    for name, number in REPLICAS.items():
                        for _ in range(number):
                            processes.start(name)
                    for name, number in REPLICAS.items():
                        await processes.ready(name, number, 60)
                    print(f"{queries} queries over {REPLICAS}; one process is killed every {every:g} s", flush=True)
                    began = time.monotonic()
                    wreck = asyncio.create_task(
                        havoc(processes, server, count, rng, every, lambda: len(asked) * 2 >= queries)
                    )
                    try:
                        async with asyncio.timeout(seconds):
                            await load(client, queries, asked, rng)
                    except TimeoutError:
                        count.note("not done in time", f"{len(asked)} of {queries} accepted after {seconds:g} s")
                    finally:
                        wreck.cancel()
                        with contextlib.suppress(asyncio.CancelledError):
                            await wreck
                    count.seconds = time.monotonic() - began
                    await settled(client, 30)
                    await judge(client, asked, count)
    return count


def table(count: Count) -> str:
    killed = ", ".join(f"{name} {number}" for name, number in sorted(count.kills.items()))
    rows = [
        ("accepted", count.accepted),
        ("answered", count.answered),
        *((name, count.wrong[name]) for name in ("answered twice", "stuck", "pending", "dead letters")),
        *((name, number) for name, number in count.wrong.items() if name not in _SHOWN),
        ("seconds", f"{count.seconds:.1f}"),
        ("killed", f"{sum(count.kills.values())} ({killed})"),
        ("queries taken over", count.claims - count.accepted),
        ("answers begun again", count.restarted),
        ("tool runs repeated after a worker's death", count.repeated_runs),
    ]
    return "\n".join(f"{name:<44}{value!s:>10}" for name, value in rows)


_SHOWN = frozenset({"answered twice", "stuck", "pending", "dead letters"})


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--queries", type=int, default=1_000)
    parser.add_argument("--seconds", type=float, default=600.0, help="give up after this long")
    parser.add_argument("--seed", type=int, default=None, help="of the choice of victims (default: by the clock)")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two kills")
    parser.add_argument("--quick", action="store_true", help="80 queries, a kill every 0.5 s")
    options = parser.parse_args()
    queries, every = (80, 0.5) if options.quick else (options.queries, options.every)
    seed = options.seed if options.seed is not None else time.time_ns() % 1_000_000

    async def run() -> Count:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await chaos(queries, options.seconds, every, seed)

    # a killed generator leaves the model server writing into the void, which asyncio says in so many words
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    configure("error", "console", participant="chaos")
    count = asyncio.run(run())
    print(table(count))
    good = not count.wrong and count.answered == count.accepted == queries
    if not good:
        print("\n".join(["", f"FAILED (seed {seed})", *count.details[:40]]))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
