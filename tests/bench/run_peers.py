"""`make bench-peers`: tool round trips of LoCAL2 against other task queues and against plain redis-py.

Every peer has an environment of its own under `.clients/peers/`, with the versions in peers/packages.toml. Each uses
the same Redis server and the same 473-byte arguments, with the worker in a process of its own. In each round the buses
take turns; one runs at a time. The values are medians over the rounds. A peer that cannot be installed or that fails is
reported as NOT RUN, and counts as missing, never as beaten.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import roundtrip
from children import HERE, ROOT
from redis import Redis
from tables import Target, middle, table

sys.path.insert(0, str(HERE.parent))

from support.environments import NotInstalled, python_environment

from services.cli.launch.embedded_redis import EmbeddedRedis

PACKAGES = HERE / "peers" / "packages.toml"
PLACES = ROOT / ".clients" / "peers"
INSTALL_SECONDS = 600.0
LEVELS = (1, 64)
# The limit of our calls per second against each peer's, at 64 in flight. The limit of p50 is the peer's own.
LEAST_RATE = 3.0


@dataclass(slots=True)
class Entrant:
    """A bus in the comparison. missing: why it was not measured; empty if it was."""

    name: str
    bus: str
    python: str = sys.executable
    missing: str = ""
    rounds: list[roundtrip.Values] = field(default_factory=list)

    @property
    def values(self) -> roundtrip.Values:
        """Return the medians over the rounds."""
        return {level: middle([values[level] for values in self.rounds]) for level in LEVELS}


def peers(only: Sequence[str] = ()) -> list[Entrant]:
    """Install the peers of packages.toml, or those named, and return them."""
    listed = tomllib.loads(PACKAGES.read_text(encoding="utf-8"))
    common, found = listed.pop("common"), []
    if unknown := set(only) - set(listed):
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(listed)}")
    for name, peer in listed.items():
        if only and name not in only:
            continue
        entrant = Entrant(name, peer["bus"])
        try:
            python = python_environment(PLACES / name, [*common, *peer["packages"]], INSTALL_SECONDS)
            entrant.python = str(python)
        except NotInstalled as exc:
            entrant.missing = str(exc)
        found.append(entrant)
    return found


def measure(entrant: Entrant, url: str, folder: Path, seconds: float) -> None:
    """Start the bus's two processes on an empty server, and add one round."""
    with ExitStack() as stack:
        stack.enter_context(Redis.from_url(url)).flushall()
        pair = roundtrip.Pair(entrant.bus, url, folder, stack, entrant.python)
        entrant.name = pair.name
        pair.measure(LEVELS[-1], min(1.0, seconds))
        entrant.rounds.append({level: pair.measure(level, seconds) for level in LEVELS})


def compare(ours: Entrant, plain: Entrant, others: Sequence[Entrant]) -> tuple[str, list[Target]]:
    """Return the table and the verdicts. `ours` and `plain` have been measured."""
    own, rows = ours.values, []
    verdicts = roundtrip.against_plain(own, plain.values)
    for entrant in (ours, plain, *others):
        if entrant.missing:
            rows.append([entrant.name, "NOT RUN", "", "", ""])
            continue
        values = entrant.values
        p50, rate = values[1]["p50"] / own[1]["p50"], own[64]["rate"] / values[64]["rate"]
        shown = (f"{values[1]['p50'] * 1e6:,.0f} µs", f"{values[64]['rate']:,.0f}", f"{p50:.2f} ×", f"{rate:.2f} ×")
        rows.append([entrant.name, *shown])
        if entrant in others:
            verdicts += [
                Target(f"p50 of {entrant.name} at 1 in flight, against ours", p50, 1.0, " ×", most=False),
                Target(f"our calls/s at 64 in flight, against {entrant.name}", rate, LEAST_RATE, " ×", most=False),
            ]
    heads = ["bus", "p50 at 1", "calls/s at 64", "its p50 : ours", "our rate : its"]
    text = table("Tool round trip, 473-byte JSON, one server, one bus at a time", heads, rows)
    reasons = [f"  NOT RUN {entrant.name}: {entrant.missing}" for entrant in others if entrant.missing]
    return "\n".join([text, *reasons]), verdicts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench-peers", description=__doc__)
    parser.add_argument("names", nargs="*", help="only these peers")
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is measured (default 3)")
    parser.add_argument("--seconds", type=float, default=2.0, help="the length of a measurement (default 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the values there too")
    parser.add_argument("--strict", action="store_true", help="exit status 1 if a limit is missed or a peer is missing")
    options = parser.parse_args(argv)
    ours, plain = Entrant("LoCAL2", roundtrip.LOCAL2), Entrant("plain redis-py", roundtrip.BARE)
    others = peers(options.names)
    used = psutil.cpu_percent(interval=1.0)
    print(f"{os.cpu_count()} CPUs, {used:.0f} % of them used by others, load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory(prefix="local2-peers-") as name, EmbeddedRedis(Path(name), port=0) as server:
        for _ in range(options.rounds):
            for entrant in (ours, plain, *others):
                if entrant.missing:
                    continue
                try:
                    measure(entrant, server.url, Path(name), options.seconds)
                except RuntimeError as exc:
                    if entrant not in others:
                        raise
                    entrant.missing = str(exc)
    text, verdicts = compare(ours, plain, others)
    print(text, "\nTargets", *verdicts, sep="\n")
    print(f"\nat the end, load {os.getloadavg()[0]:.1f}")
    if options.json:
        options.json.write_text(json.dumps(_values([ours, plain, *others], verdicts), indent=2), encoding="utf-8")
    whole = all(verdict.met for verdict in verdicts) and not any(entrant.missing for entrant in others)
    return int(options.strict and not whole)


def _values(entrants: Sequence[Entrant], verdicts: Sequence[Target]) -> Mapping[str, object]:
    found = {one.name: {"missing": one.missing} if one.missing else one.values for one in entrants}
    return {"values": found, "targets": [asdict(verdict) for verdict in verdicts]}


if __name__ == "__main__":
    sys.exit(main())
