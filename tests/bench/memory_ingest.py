"""What remembering costs: how fast a queue of responses is taken into memory, and whether answers wait for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
import stack as whole
from children import HERE, Child, Participant
from memory_search import Writer
from tables import Target, middle, table

from shared.bus import Bus
from shared.contracts import RESPONSE_GENERATION, ResponseGeneration
from shared.envelope import now_ms

_DRAIN_SECONDS = 300.0
# What two equal measurements may differ by on a machine that does other things.
NOISE_MS = 2.0


def measure(redis_url: str, folder: Path, rounds: int, seconds: float, queued: int) -> dict[str, float]:
    """Medians over the rounds. In each the same question is asked with nothing to remember, and with a full queue."""
    with ExitStack() as processes:
        running = whole.Stack(redis_url, folder, processes)
        running.participants.pop("respondent-b").stop()
        memory = Participant(["-m", "services.memory"], folder / "memory.log", running.env)
        running.participants["memory"] = processes.enter_context(memory)
        asyncio.run(running.ready())
        idle = running.memory()["memory"][0]
        env = {"BENCH_KEY": whole.KEY, **{f"BENCH_{name.upper()}": url for name, url in running.addresses.items()}}
        client = processes.enter_context(Child([str(HERE / "stream_client.py")], folder / "ingest-client.log", env))
        client.read()
        client.ask("measure api short 4 1")
        found = [asyncio.run(_round(redis_url, client, number, seconds, queued)) for number in range(rounds)]
        return {**middle(found), "idle": idle, "resident": psutil.Process(memory.pid).memory_info().rss / 1e6}


async def _round(redis_url: str, client: Child, number: int, seconds: float, queued: int) -> dict[str, float]:
    async with Bus(redis_url, "bench/ingest") as bus:
        await _drained(bus)
        quiet = await asyncio.to_thread(client.ask, f"measure api short 1 {seconds}")
        responses = _responses(number, queued)
        began = time.perf_counter()
        for at in range(0, queued, 200):
            await bus.publish(*(RESPONSE_GENERATION.of(one) for one in responses[at : at + 200]))
        busy = await asyncio.to_thread(client.ask, f"measure api short 1 {seconds}")
        left, answered = await _waiting(bus), time.perf_counter()
        await _drained(bus)
        return {
            "quiet p50": quiet["p50"] * 1e3,
            "quiet p99": quiet["p99"] * 1e3,
            "busy p50": busy["p50"] * 1e3,
            "busy p99": busy["p99"] * 1e3,
            "left": float(left),
            "answering/s": (queued - left) / (answered - began),
            "alone/s": left / (time.perf_counter() - answered),
        }


def _responses(number: int, count: int) -> list[ResponseGeneration]:
    writer, at = Writer(), now_ms()
    return [
        ResponseGeneration(
            query_id=f"{at}-{place}",
            response_id=f"{at}-{place}:A",
            session_id=f"bench-{number}-{place // 8}",
            user_id="bench",
            respondent_id="A",
            generator_id="GeneratorAgent",
            query=writer.text(10),
            answer=writer.text(45),
            model="bench",
            finish_reason="stop",
        )
        for place in range(count)
    ]


async def _waiting(bus: Bus) -> int:
    """Responses that memory has not finished."""
    for group in await bus.link.call("XINFO", "GROUPS", RESPONSE_GENERATION.stream):
        facts = {name.decode(): value for name, value in zip(group[::2], group[1::2], strict=True)}
        if facts["name"] == b"memory":
            return int(facts["pending"]) + int(facts["lag"] or 0)
    return 0


async def _drained(bus: Bus) -> None:
    """Raises TimeoutError."""
    async with asyncio.timeout(_DRAIN_SECONDS):
        while await _waiting(bus):
            await asyncio.sleep(0.05)


def report(found: dict[str, float], queued: int) -> tuple[str, list[Target]]:
    rows: Sequence[Sequence[str]] = [
        [name, f"{found[f'{way} p50']:.1f} ms", f"{found[f'{way} p99']:.1f} ms"]
        for way, name in (("quiet", "nothing to remember"), ("busy", f"{queued} responses to remember"))
    ]
    text = table("Memory: time to first token while it takes in responses, 1 stream", ["queue", "p50", "p99"], rows)
    text += f"\n  Taken in: {found['answering/s']:,.0f}/s while users are answered, {found['alone/s']:,.0f}/s then"
    text += f" ({found['left']:,.0f} still waited when the answers had been given)"
    text += f"\n  Process: {found['idle']:.0f} MB idle, {found['resident']:.0f} MB at the end"
    added = found["busy p50"] - found["quiet p50"]
    return text, [Target("added to the first token by a full ingest queue (median)", added, NOISE_MS, " ms")]
