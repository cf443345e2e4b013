"""The whole stack in real processes: Redis, the scripted model server and every participant, as users run them."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
from children import HERE, Child, Participant
from tables import Target, middle, table

from shared.bus import Bus
from shared.participant.registry import Registry

STREAMS = 64
KEY = "bench-admin-key"
_RULES = HERE / "stream_rules.yaml"
# Idle memory in MB. The memory participant has a vector store inside, and numpy with it.
_LIMITS = {"memory": 200.0}
_LIMIT = 75.0
# Only their memory is looked at: they would work on every answer too.
BESIDES = ("respondent-b", "critic", "reward", "memory")
_READY_SECONDS = 60.0
IDLE_SECONDS = 2.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def ready(redis_url: str, names: set[str]) -> None:
    """Wait until these participants are ready. Raises TimeoutError that names those that are not."""
    until = time.monotonic() + _READY_SECONDS
    async with Bus(redis_url, "bench/ready") as bus:
        registry = Registry(bus, heartbeat=0)
        while missing := names - {r.participant for r in await registry.replicas(fresh=True) if r.state == "ready"}:
            if time.monotonic() > until:
                raise TimeoutError(f"not ready after {_READY_SECONDS:g} s: {', '.join(sorted(missing))}")
            await asyncio.sleep(0.1)


class Stack:
    """Started on construction of its processes; `ready` waits until every participant has announced itself."""

    def __init__(self, redis_url: str, folder: Path, stack: ExitStack) -> None:
        self._redis_url = redis_url
        model, api = free_port(), free_port()
        self.env = {
            "LOCAL2_REDIS_URL": redis_url,
            "LOCAL2_DATA_DIR": str(folder / "data"),
            "LOCAL2_ADMIN_KEY": KEY,
            "LOCAL2_API_PORT": str(api),
            "LOCAL2_LOG_LEVEL": "warning",
            "LOCAL2_WEB_SEARCH_PROVIDER": "mock",
            "LOCAL2_GENERATOR_CONCURRENCY": str(STREAMS),
            "OLLAMA_HOST": f"http://127.0.0.1:{model}",
        }
        serve = ["-m", "shared.testing.model_server", "--port", str(model), "--rules", str(_RULES)]
        stack.enter_context(Participant(serve, folder / "model.log", self.env))
        names = ("generator", "gateway", "web_search", "web_fetch", "critic", "reward", "memory")
        modules = {name: f"services.{name}" for name in names}
        self.participants = {
            name: stack.enter_context(Participant(["-m", module], folder / f"{name}.log", self.env))
            for name, module in modules.items()
        }
        shadow = {**self.env, "LOCAL2_RESPONDENT_ID": "B"}
        respondent = Participant(["-m", "services.generator"], folder / "respondent-b.log", shadow)
        self.participants["respondent-b"] = stack.enter_context(respondent)
        self.addresses = {
            "model": f"http://127.0.0.1:{model}",
            "api": f"http://127.0.0.1:{api}",
            "redis": redis_url,
        }

    async def ready(self) -> None:
        """Wait until every participant is ready. Raises TimeoutError that names those that are not."""
        await ready(self._redis_url, set(self.participants))

    def cpu(self) -> dict[str, float]:
        """Seconds of CPU that each participant has used so far."""
        return {name: sum(psutil.Process(child.pid).cpu_times()[:2]) for name, child in self.participants.items()}

    def memory(self) -> dict[str, tuple[float, float]]:
        """MB resident and MB of the process alone, of each participant."""
        time.sleep(IDLE_SECONDS)
        found = {}
        for name, child in self.participants.items():
            info = psutil.Process(child.pid).memory_full_info()
            found[name] = (info.rss / 1e6, info.uss / 1e6)
        return found


def memory_report(memory: dict[str, tuple[float, float]]) -> tuple[str, list[Target]]:
    rows = [[name, f"{rss:.1f} MB", f"{uss:.1f} MB"] for name, (rss, uss) in memory.items()]
    targets = [
        Target(f"idle memory of {name}", rss, _LIMITS.get(name, _LIMIT), " MB", steady=True)
        for name, (rss, _) in memory.items()
    ]
    return table("Memory, two seconds after being ready", ["participant", "resident", "its own"], rows), targets


# (load, streams) → way → values.
Streamed = dict[tuple[str, int], dict[str, dict[str, float]]]

# What is asked, by how many streams at once: the rules of the scripted model server.
LOADS = (("short", 1), ("long", 1), ("paced", STREAMS))
FLOOD = ("flood", STREAMS)
WAYS = {
    "model": "model server directly",
    "bus": "bus → generator → model",
    "api": "HTTP → gateway → bus → generator",
}


def measure(
    stack: Stack, folder: Path, rounds: int, seconds: float, ways: Sequence[str], loads: Sequence[tuple[str, int]]
) -> Streamed:
    """Medians over the rounds; the ways take turns within each round."""
    env = {"BENCH_KEY": KEY, **{f"BENCH_{name.upper()}": url for name, url in stack.addresses.items()}}
    with ExitStack() as processes:
        client = processes.enter_context(Child([str(HERE / "stream_client.py")], folder / "client.log", env))
        client.read()
        for way in ways:
            client.ask(f"measure {way} short 4 1")
        found: dict[tuple[str, int], dict[str, list[dict[str, float]]]]
        found = {load: {way: [] for way in ways} for load in loads}
        for _ in range(rounds):
            for load, streams in loads:
                for way in found[load, streams]:
                    before = stack.cpu()
                    values = client.ask(f"measure {way} {load} {streams} {seconds}")
                    spent = {f"cpu {name}": used - before[name] for name, used in stack.cpu().items()}
                    values |= {name: used / values["asked"] for name, used in spent.items()}
                    found[load, streams][way].append(values)
    return {load: {way: middle(values) for way, values in by_way.items()} for load, by_way in found.items()}


def report(result: Streamed) -> tuple[str, list[Target]]:
    rows, targets = [], []
    for (load, streams), ways in result.items():
        direct = ways["model"]
        for way, found in ways.items():
            rows.append(
                [
                    f"{load}, {streams} stream{'s' if streams > 1 else ''}: {WAYS[way]}",
                    f"{found['p50'] * 1e3:.1f} ms",
                    f"{found['p99'] * 1e3:.1f} ms",
                    f"{(found['p50'] - direct['p50']) * 1e3:+.1f} ms",
                    f"{(found['p99'] - direct['p99']) * 1e3:+.1f} ms",
                    f"{found['tokens']:,.0f}",
                    f"{found['tokens'] / direct['tokens']:.2f}",
                    f"{found['answers']:.0f}",
                ]
            )
    heads = ["answers", "TTFT p50", "p99", "added p50", "added p99", "tokens/s", "of direct", "n"]
    text = table("Time to first token and tokens/s, the same client and the same model server", heads, rows)
    text += (
        "\n  short: 12 tokens, 10 ms apart · long: 2,000 tokens, as fast as they come · paced: 100 tokens, 33 ms apart,"
        "\n  streams in all phases · flood: 300 tokens a stream, as fast as they come. TTFT under flood is queueing."
    )
    for load, streams in result:
        spent = result[load, streams]["api"]
        shown = ", ".join(f"{name} {spent[f'cpu {name}'] * 1e3:.1f} ms" for name in ("gateway", "generator"))
        text += f"\n  CPU per answer over HTTP, {load}: {shown}"
    for asked, bound in ((("short", 1), 6.0), (("paced", STREAMS), 6.0)):
        added = (result[asked]["api"]["p50"] - result[asked]["model"]["p50"]) * 1e3
        label = f"added time to first token, {asked[1]} stream{'s' if asked[1] > 1 else ''} (median)"
        targets.append(Target(label, added, bound, " ms", steady=True))
    return text, targets
