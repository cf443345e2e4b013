"""How the throughput of web_fetch grows with its replicas, when the pages' latency is what limits one."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass

from load import Client
from stack import Stack, docker

# Calls under way per place in a worker: enough that no place is ever empty, bounded all the same.
PRESSURE = 2


@dataclass(frozen=True, slots=True)
class Row:
    replicas: int
    calls: int
    seconds: float
    errors: int
    # pages of the least busy replica against the mean
    evenness: float
    processors: float

    @property
    def rate(self) -> float:
        return self.calls / self.seconds


async def measure(stack: Stack, replicas: int, places: int, seconds: float, warm: float = 2.0) -> Row:
    """Calls per second with so many replicas, after `warm` seconds of the same load."""
    await asyncio.to_thread(stack.up, web_fetch=replicas)
    done: list[float] = []
    errors: Counter[str] = Counter()
    stopping = False

    async with Client(stack) as client:

        async def caller(number: int) -> None:
            turn = 0
            while not stopping:
                turn += 1
                body = {"args": {"url": f"http://world:8000/page/{number}-{turn}"}}
                answer = await client.call("POST", "/tools/web_fetch/call", json=body)
                error = answer.json().get("error") if answer.is_success else f"status {answer.status_code}"
                if error:
                    errors[str(error)[:80]] += 1
                else:
                    done.append(time.monotonic())

        tasks = [asyncio.create_task(caller(n)) for n in range(replicas * places * PRESSURE)]
        await asyncio.sleep(warm)
        await asyncio.to_thread(world_stats, stack, reset=True)
        busy, began = processor_seconds(), time.monotonic()
        await asyncio.sleep(seconds)
        ended = time.monotonic()
        busy = processor_seconds() - busy
        by = await asyncio.to_thread(world_stats, stack)
        stopping = True
        await asyncio.gather(*tasks)
    fair = sum(by.values()) / replicas
    least = min(by.values(), default=0) / fair if fair and len(by) == replicas else 0.0
    calls = sum(began <= at <= ended for at in done)
    return Row(replicas, calls, ended - began, sum(errors.values()), least, busy / (ended - began))


def processor_seconds() -> float:
    """Busy processor time of this machine so far; other programs' too."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _idle, _wait, irq, soft, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + irq + soft) / 100


def world_stats(stack: Stack, *, reset: bool = False) -> dict[str, int]:
    """Pages fetched, by the address of who fetched them."""
    (world,) = stack.containers("world")
    code = f"import urllib.request as u; print(u.urlopen(u.Request('http://127.0.0.1:8000/stats', method='{'DELETE' if reset else 'GET'}')).read().decode())"  # noqa: E501
    found: dict[str, int] = json.loads(docker("exec", world.id, "python", "-c", code))
    return found


def table(rows: list[Row]) -> list[str]:
    one = rows[0].rate
    shown = ["replicas  calls/s  of linear  least busy  processors"]
    for row in rows:
        part = row.rate / (one * row.replicas / rows[0].replicas)
        shown.append(
            f"{row.replicas:>8}  {row.rate:>7.1f}  {part:>9.2f}  {row.evenness:>10.2f}  {row.processors:>10.2f}"
        )
    return shown


def of_linear(rows: list[Row], replicas: int) -> float:
    wanted = next(row for row in rows if row.replicas == replicas)
    return wanted.rate / (rows[0].rate * replicas / rows[0].replicas)
