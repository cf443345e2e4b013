"""`make chaos`: kills every participant at random under load, then counts what was lost, done twice or stuck.

Everything runs on this machine: a Redis of its own, the scripted model, replicas of each participant as processes, the
gateways among them, and a memory, which must know each answer once at the end. Every second (`--every`) one is killed
(SIGKILL) and started again; half way Redis itself is. Clients speak HTTP: they repeat a request with its
Idempotency-Key, and resume a stream with Last-Event-ID, at whichever gateway answers. Journals and the like are kept
for a minute; when they have expired, Redis' memory must be back at its resting level. The status is 0 only when nothing
is lost, twice, stuck or left over.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from audit import Count, judge_bus, judge_memory, judge_query, judge_sessions, open_audit
from support.callers import Asked, Caller
from support.http_stack import ADMIN_KEY, free_port
from support.resting import Level, everlasting, level
from support.stack import Client, Participant, Participants

from services.cli.launch.embedded_redis import EmbeddedRedis
from shared.bus import Bus
from shared.participant.registry import Registry
from shared.telemetry.logging import configure
from shared.testing.model_server import ScriptedModelServer

REPLICAS = {"gateway": 2, "generator": 3, "probe": 2, "web_search": 2, "memory": 1}
# Nobody waits for it, and its embedded store has one replica: it is killed although no other is at work.
ALONE = {"memory"}
PER_SESSION = 4
SESSIONS_AT_ONCE = 16
DEADLINE = 120.0
RETENTION = 60
# An inbox of a replica that died goes a minute after its last heartbeat.
LONGEST = DEADLINE + RETENTION + 90
# Of what the run added to Redis' memory, this may remain: tables that have grown do not shrink at once.
REMAINDER = 0.05
# Event streams are trimmed by whole nodes of up to a hundred entries.
SLACK = 1024 * 1024

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


class Crew:
    """The processes: gateways keep their ports when they are started again."""

    def __init__(self, people: Participants) -> None:
        self._people = people
        self._ports: dict[int, int] = {}
        self._seen: list[Participant] = []
        ports = [free_port() for _ in range(REPLICAS["gateway"])]
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        for name, number in REPLICAS.items():
            for place in range(number):
                self._start(name, ports[place] if name == "gateway" else None)

    def _start(self, name: str, port: int | None) -> None:
        values = {} if port is None else {"api_port": port, "admin_key": ADMIN_KEY, "keepalive": 1}
        started = self._people.start(name, **values)
        if port is not None:
            self._ports[started.pid] = port

    async def ready(self) -> None:
        for name, number in REPLICAS.items():
            await self._people.ready(name, number, 180)

    def mend(self, count: Count) -> None:
        """Starts again what ended by itself, which nothing may."""
        for one in [one for one in self._people.started if not one.alive and one not in self._seen]:
            self._seen.append(one)
            count.note("ended by itself", f"{one.name}, status {one.process.returncode}: {one.log()[-1_000:]}")
            self._start(one.name, self._ports.pop(one.pid, None))

    async def kill(self, rng: random.Random, registry: Registry) -> str:
        """Ends a replica as a crash would and starts another in its place; its name, empty when none can be spared.

        The victim is at work, and so is another of its kind where there are several: on a slow machine nothing is left
        of a stack otherwise.
        """
        replicas = await registry.replicas()
        ready = {int(info.replica.rsplit("-", 2)[1]) for info in replicas if info.state == "ready"}
        at_work = {name: [one for one in self._people.alive(name) if one.pid in ready] for name in REPLICAS}
        kinds = [name for name, spare in at_work.items() if len(spare) > (name not in ALONE)]
        if not kinds:
            return ""
        victim: Participant = rng.choice(at_work[rng.choice(kinds)])
        victim.kill()
        self._seen.append(victim)
        self._start(victim.name, self._ports.pop(victim.pid, None))
        return victim.name


async def load(caller: Caller, client: Client, queries: int, count: Count, done: list[Asked]) -> None:
    """Some sessions at a time, several queries of each at once."""
    room = asyncio.Semaphore(SESSIONS_AT_ONCE)

    async def one(text: str, session: str) -> None:
        asked = await caller.ask(text, session, deadline=DEADLINE)
        done.append(asked)
        await judge_query(client, asked, count)

    async def session(number: int, texts: Sequence[str]) -> None:
        async with room, asyncio.TaskGroup() as queries_of_it:
            for text in texts:
                queries_of_it.create_task(one(text, f"chaos-{number}"))

    texts = [f"{'search' if n % 3 == 0 else 'try'} number {n}" for n in range(queries)]
    count.asked = len(texts)
    async with asyncio.TaskGroup() as group:
        for number, start in enumerate(range(0, queries, PER_SESSION)):
            group.create_task(session(number, texts[start : start + PER_SESSION]))


async def havoc(
    crew: Crew,
    server: EmbeddedRedis,
    registry: Registry,
    count: Count,
    rng: random.Random,
    every: float,
    half: Callable[[], bool],
) -> None:
    """Kills one replica at random, again and again; kills Redis once, when `half` is true."""
    while True:
        await asyncio.sleep(every)
        crew.mend(count)
        if half() and not count.kills["redis"]:
            count.kills["redis"] += 1
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
        elif name := await crew.kill(rng, registry):
            count.kills[name] += 1


async def forget(caller: Caller, client: Client, queries: int) -> None:
    """Removes what is kept for good: the sessions, by the API, and what the harness itself has noted."""
    for number in range(-(-queries // PER_SESSION)):
        await caller.delete(f"/sessions/chaos-{number}", time.monotonic() + 30)
    await client.bus.link.call("DEL", "effects", "ended", "closed")


async def at_rest(bus: Bus, before: Level, peak: Level, count: Count) -> None:
    """Waits until everything has expired; what has not by then is wrong."""
    allowed = before.used + int(REMAINDER * (peak.used - before.used)) + SLACK
    until = time.monotonic() + LONGEST
    while (now := await level(bus)).used > allowed or now.transient > before.transient:
        if time.monotonic() > until:
            count.note("not at rest", now.shown())
            break
        await asyncio.sleep(1)
    print(f"Redis before   {before.shown()}\n      at most  {peak.shown()}\n      after    {now.shown()}")
    print(f"      allowed  {allowed:>12,} bytes (before, {REMAINDER:.0%} of what was added, and {SLACK // 1024} KB)")


async def chaos(queries: int, seconds: float, every: float, seed: int, *, rest: bool) -> Count:
    count, rng, done = Count(), random.Random(seed), list[Asked]()
    with tempfile.TemporaryDirectory(prefix="local2-chaos-") as folder:
        root = Path(folder)
        # confirmed means written to disk: a killed Redis may lose nothing that was accepted
        with EmbeddedRedis(root / "redis", extra={"appendfsync": "always"}) as server:
            async with ScriptedModelServer(RULES) as model, Bus(server.url, "chaos/1") as bus:
                client = Client(bus)
                with Participants(
                    server.url, model.url, root / "logs", retention=RETENTION, memory_classify="off",
                    memory_pending_days=RETENTION / 86_400, memory_forget_days=RETENTION / 86_400,
                ) as people:  # fmt: skip
                    crew = Crew(people)
                    await crew.ready()
                    await open_audit(client)
                    before = await level(bus)
                    print(f"{queries} queries over {REPLICAS}; one process is killed every {every:g} s", flush=True)
                    async with Caller(crew.urls, ADMIN_KEY) as caller:
                        began = time.monotonic()
                        wreck = asyncio.create_task(
                            havoc(crew, server, Registry(bus, 0.0), count, rng, every, lambda: len(done) * 2 >= queries)
                        )
                        try:
                            async with asyncio.timeout(seconds):
                                await load(caller, client, queries, count, done)
                        except TimeoutError:
                            count.note("not done in time", f"{len(done)} of {queries} after {seconds:g} s")
                        finally:
                            wreck.cancel()
                            with contextlib.suppress(asyncio.CancelledError):
                                await wreck
                        count.seconds = time.monotonic() - began
                        with contextlib.suppress(AssertionError):  # counted as pending
                            await client.idle(timeout=30)
                        await judge_sessions(caller, done, count)
                        await judge_memory(caller, client, [one for one in done if one.answer is not None], count)
                        await judge_bus(client, done, count)
                        peak = await level(bus)
                        await forget(caller, client, queries)
                        await judge_memory(caller, client, [], count)
                        for key in await everlasting(bus):
                            count.note("never expires", key)
                        if rest:
                            await at_rest(bus, before, peak, count)
    return count


ZEROS = (
    "lost", "twice", "stuck", "failed", "events lost or repeated", "not remembered", "remembered too often", "pending",
    "dead letters", "never expires",
)  # fmt: skip


def table(count: Count) -> str:
    killed = ", ".join(f"{name} {number}" for name, number in sorted(count.kills.items()))
    rows = [
        ("asked", count.asked),
        ("accepted", count.accepted),
        ("answered", count.answered),
        *((name, count.wrong[name]) for name in ZEROS),
        *((name, number) for name, number in count.wrong.items() if name not in ZEROS),
        ("seconds", f"{count.seconds:.1f}"),
        ("killed", f"{sum(count.kills.values())} ({killed})"),
        ("requests repeated, streams resumed", count.reconnects),
        ("queries taken over", count.claims - count.answered),
        ("answers begun again", count.restarted),
        ("tool runs repeated after a worker's death", count.repeated_runs),
    ]
    return "\n".join(f"{name:<44}{value!s:>10}" for name, value in rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--queries", type=int, default=1_000)
    parser.add_argument("--seconds", type=float, default=900.0, help="give up after this long")
    parser.add_argument("--seed", type=int, default=None, help="of the choice of victims (default: by the clock)")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two kills")
    parser.add_argument(
        "--quick", action="store_true", help="80 queries, a kill every 0.5 s; does not wait for the expiry of keys"
    )
    options = parser.parse_args()
    queries, every = (80, 0.5) if options.quick else (options.queries, options.every)
    seed = options.seed if options.seed is not None else time.time_ns() % 1_000_000

    async def run() -> Count:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await chaos(queries, options.seconds, every, seed, rest=not options.quick)

    # a killed generator leaves the model server writing into the void, which asyncio says in so many words
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    configure("error", "console", participant="chaos")
    count = asyncio.run(run())
    print(table(count))
    good = not +count.wrong and count.answered == count.accepted == queries
    if not good:
        print("\n".join(["", f"FAILED (seed {seed})", *count.details[:40]]))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
