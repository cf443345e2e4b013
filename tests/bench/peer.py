"""One process of a round trip: `peer.py worker|requester module:Class`; the server's URL is in BENCH_REDIS_URL.

The parent speaks in lines on the standard input, answers are lines of JSON on the standard output:
`measure N S` → calls with N in flight for S seconds; `cpu` → seconds of CPU used so far; the end of input → the end.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

import orjson
import uvloop
from bus_port import BusUnderTest, bus_class, message, tool_work

# A reply that takes longer than this is lost.
_LOST = 60.0


async def measured(bus: BusUnderTest, in_flight: int, seconds: float) -> dict[str, float]:
    """Latencies, rate and this process's CPU. Raises RuntimeError for a wrong answer."""
    latencies: list[float] = []
    args = message(in_flight)
    expected = tool_work(args)
    until = time.perf_counter() + seconds

    async def calls() -> None:
        while (began := time.perf_counter()) < until:
            if await bus.call(args) != expected:
                raise RuntimeError(f"{bus.name}: a wrong answer")
            latencies.append(time.perf_counter() - began)

    cpu, began = time.process_time(), time.perf_counter()
    async with asyncio.timeout(seconds + _LOST), asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(calls())
    took = time.perf_counter() - began
    latencies.sort()
    count = len(latencies)
    return {
        "calls": count,
        "seconds": took,
        "p50": latencies[count // 2],
        "p99": latencies[min(count - 1, count * 99 // 100)],
        "cpu": time.process_time() - cpu,
    }


def say(value: object) -> None:
    sys.stdout.buffer.write(orjson.dumps(value) + b"\n")
    sys.stdout.buffer.flush()


async def main(role: str, target: str) -> None:
    bus = bus_class(target)(os.environ["BENCH_REDIS_URL"])
    async with asyncio.timeout(_LOST):
        await (bus.start_worker() if role == "worker" else bus.start_requester())
    say({"name": bus.name, "promises": bus.promises, "pid": os.getpid()})
    while line := (await asyncio.to_thread(sys.stdin.readline)).split():
        match line:
            case ["measure", in_flight, seconds]:
                say(await measured(bus, int(in_flight), float(seconds)))
            case ["cpu"]:
                say({"cpu": time.process_time()})
    await bus.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(*sys.argv[1:]))
