"""Tool round trips, side by side: every bus at every load, round after round, on one Redis server."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from children import HERE, Child
from floor import floor
from redis import Redis
from tables import Target, middle, table

LOCAL2, BARE = "bus_local2:Local2Bus", "bus_bare:BareBus"
LEVELS = (1, 64, 256)
# The limits against plain redis-py: p50 at 1 in flight, calls per second at 64.
MOST_P50, LEAST_RATE = 1.5, 0.6

# Calls in flight → values of one measurement.
Values = dict[int, dict[str, float]]


class Pair:
    """The two processes of one bus. python: the interpreter that has its packages."""

    def __init__(self, target: str, url: str, folder: Path, stack: ExitStack, python: str = sys.executable) -> None:
        self._server = stack.enter_context(Redis.from_url(url))
        log, env = folder / f"{target.replace(':', '-')}.log", {"BENCH_REDIS_URL": url}
        start = [str(HERE / "peer.py")]
        self.worker = stack.enter_context(Child([*start, "worker", target], log, env, python))
        found = self.worker.read()
        self.name, self.promises = found["name"], found["promises"]
        self.requester = stack.enter_context(Child([*start, "requester", target], log, env, python))
        self.requester.read()

    def measure(self, in_flight: int, seconds: float) -> dict[str, float]:
        """Seconds for latencies; `cpu` is that of both processes per message, and a call has two; `redis` is the
        server's own per call."""
        before, served = self.worker.ask("cpu")["cpu"], self._served()
        found: dict[str, float] = self.requester.ask(f"measure {in_flight} {seconds}")
        cpu = found["cpu"] + self.worker.ask("cpu")["cpu"] - before
        calls = found["calls"]
        return {
            "p50": found["p50"],
            "p99": found["p99"],
            "rate": calls / found["seconds"],
            "cpu": cpu / calls / 2,
            "redis": (self._served() - served) / calls,
        }

    def _served(self) -> float:
        """Seconds of processor time that the server has used."""
        used = self._server.info("cpu")
        return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])


def measure(url: str, folder: Path, targets: list[str], rounds: int, seconds: float) -> dict[str, Any]:
    """{bus: {in flight: values}}, medians over the rounds; the buses take turns within each round."""
    with ExitStack() as stack:
        pairs = {target: Pair(target, url, folder, stack) for target in targets}
        for pair in pairs.values():
            pair.measure(LEVELS[1], min(1.0, seconds))
        found: dict[str, dict[int, list[dict[str, float]]]] = {t: {n: [] for n in LEVELS} for t in targets}
        for _ in range(rounds):
            for in_flight in LEVELS:
                for target, pair in pairs.items():
                    found[target][in_flight].append(pair.measure(in_flight, seconds))
        values = {target: {n: middle(found[target][n]) for n in LEVELS} for target in targets}
        names = {target: (pair.name, pair.promises) for target, pair in pairs.items()}
    return {"names": names, "values": values, "floor": floor(url, LEVELS)}


def report(result: dict[str, Any], under_test: str) -> tuple[str, list[Target]]:
    names, values, lowest = result["names"], result["values"], result["floor"]
    rows = []
    for in_flight in LEVELS:
        base = values[BARE][in_flight]
        for target, levels in values.items():
            found = levels[in_flight]
            rows.append(
                [
                    f"{names[target][0]}, {in_flight} in flight",
                    f"{found['p50'] * 1e6:.0f} µs",
                    f"{found['p99'] * 1e6:.0f} µs",
                    f"{found['rate']:,.0f}",
                    f"{found['cpu'] * 1e6:.1f} µs",
                    f"{found['redis'] * 1e6:.0f} µs",
                    f"{found['p50'] / base['p50']:.2f}",
                    f"{found['rate'] / base['rate']:.2f}",
                ]
            )
    heads = ["bus", "p50", "p99", "calls/s", "CPU/message", "Redis/call", "p50 : plain", "rate : plain"]
    text = table("Tool round trip (requester → worker → requester, 473-byte JSON, TCP loopback)", heads, rows)
    text += "\n" + "\n".join(f"  {name}: {promises}" for name, promises in names.values())
    text += "\n" + lowest["text"]
    ours, plain = values[under_test], values[BARE]
    return text, against_plain(ours, plain)


def against_plain(ours: Values, plain: Values) -> list[Target]:
    """Return the verdicts against plain redis-py."""
    p50, rate = ours[1]["p50"] / plain[1]["p50"], ours[64]["rate"] / plain[64]["rate"]
    return [
        Target("p50 at 1 in flight, against plain redis-py", p50, MOST_P50, " ×", steady=True),
        Target("calls/s at 64 in flight, against plain redis-py", rate, LEAST_RATE, " ×", most=False, steady=True),
    ]
