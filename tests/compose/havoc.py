"""What is done to the stack while it works: containers killed at random, Redis restarted, replicas taken away."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter

from load import Load, Outcome
from stack import Container, DockerError, Stack, docker

# Beside the participants: what memory keeps everything in.
STORES = ("chroma",)
# Long enough for a started container to be of use before the next one goes.
EVERY = 2.5


def crash(victim: Container) -> str:
    """Ends a container as a crash does; how it was done.

    Where the engine's processes can be reached, the container's own process is killed and the restart policy brings it
    back; `docker kill` counts as a stop by hand, so then it is started again here.
    """
    if os.geteuid() == 0 and random.random() < 0.5:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(victim.pid, signal.SIGKILL)
            return "kill -9"
    return "docker kill"


async def kill_at_random(stack: Stack, seconds: float, *, every: float = EVERY) -> tuple[Counter[str], Counter[str]]:
    """Kills one container after the other for so long; what was killed, and what was passed over, by service.

    A service of which nothing is healthy is passed over in its turn: where a start takes longer than the time between
    two deaths, as on a machine that has twenty times more to do than it can, no replica would ever get to work.
    """
    victims = [*stack.participants, *STORES]
    killed, passed = Counter[str](), Counter[str]()
    turn: list[str] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.monotonic()
        running = [c for c in await asyncio.to_thread(stack.containers, *victims) if c.running]
        if running:
            # every service gets its turn, in a new order each time, whatever its number of replicas
            turn = turn or random.sample(victims, len(victims))
            service = turn.pop()
            healthy = [c for c in running if c.service == service and c.healthy]
            if not healthy:
                passed[service] += 1
                await asyncio.sleep(0.5)
                continue
            victim = random.choice(healthy)
            how = crash(victim)
            if how == "docker kill":
                # it may have died meanwhile, and be on its way back
                with contextlib.suppress(DockerError):
                    await asyncio.to_thread(docker, "kill", "--signal", "KILL", victim.id)
                try:
                    await asyncio.to_thread(docker, "start", victim.id)
                except DockerError as exc:
                    # the next `up` starts it
                    killed[f"{victim.name} was not started again: {exc}"] += 1
            killed[f"{victim.service} ({how})"] += 1
        await asyncio.sleep(max(0.1, every - (time.monotonic() - began)))
    return killed, passed


async def chaos(stack: Stack, seconds: float, *, with_key: bool = True) -> tuple[Outcome, str]:
    async with Load(stack, with_key=with_key) as load:
        await asyncio.sleep(1)
        killed, passed = await kill_at_random(stack, seconds)
    await asyncio.to_thread(stack.up)
    said = f"{sum(killed.values())} killed: " + ", ".join(f"{what} {n}" for what, n in sorted(killed.items()))
    if passed:
        said += "; passed over, not up again yet: " + ", ".join(f"{what} {n}" for what, n in sorted(passed.items()))
    return load.outcome, said


async def redis_restart(stack: Stack, times: int) -> tuple[Outcome, str]:
    async with Load(stack) as load:
        for _ in range(times):
            await asyncio.sleep(4)
            began = time.monotonic()
            await asyncio.to_thread(stack.compose, "restart", "redis")
            took = time.monotonic() - began
        await asyncio.sleep(4)
    await asyncio.to_thread(stack.up)
    return load.outcome, f"{times} restarts, the last took {took:.1f} s"


async def scale_in(stack: Stack, few: dict[str, int]) -> tuple[Outcome, str, list[str]]:
    """Takes replicas away under load. The last value: those that did not leave by themselves on SIGTERM."""
    before = {name: number for name, number in stack.scales.items() if name in few}
    async with Load(stack) as load:
        await asyncio.sleep(3)
        began, since = time.monotonic(), time.time()
        await asyncio.to_thread(stack.up, **few)
        took = time.monotonic() - began
        deaths = await asyncio.to_thread(stack.deaths, since - 1, time.time() + 1)
        await asyncio.sleep(3)
    rough = [f"{name}: exit code {code}" for name, code in deaths.items() if code]
    away = ", ".join(f"{name} {before[name]} → {number}" for name, number in few.items())
    return load.outcome, f"{away} in {took:.1f} s, {len(deaths)} containers left", rough
