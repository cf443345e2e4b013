"""`make bench`: latency, throughput, CPU and memory in one run, side by side with plain redis-py.

The parts take turns round after round, and medians are shown: on a shared machine only the ratios within one run mean
something. `--bus module:Class` puts another bus (see bus_port.py) in the place of LoCAL2's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import knowledge_search
import memory_ingest
import memory_search
import memory_users
import psutil
import roundtrip
import stack as whole
from tables import FAR, Target

from services.cli.launch.embedded_redis import EmbeddedRedis

# Percent of the processors that others may use where a value that is far off ends the run with a failure.
_ALONE = 30.0
PARTS = ("roundtrip", "memory", "streams", "recall", "users", "knowledge")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--short", action="store_true", help="one round with small stores (for CI)")
    parser.add_argument("--only", action="append", choices=PARTS, help="a part of it; may be repeated")
    parser.add_argument("--bus", default=roundtrip.LOCAL2, metavar="MODULE:CLASS", help="the bus to measure")
    parser.add_argument("--rounds", type=int, help="how often everything is measured (default 5; --short: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the values there too")
    parser.add_argument("--strict", action="store_true", help="exit status 1 when a target is missed, not only by far")
    return parser.parse_args(argv)


def round_trips(options: argparse.Namespace, folder: Path, rounds: int, seconds: float) -> tuple[list[Target], object]:
    targets = list(dict.fromkeys([options.bus, roundtrip.LOCAL2, roundtrip.BARE]))
    with EmbeddedRedis(folder / "redis-roundtrip", port=0) as server:
        result = roundtrip.measure(server.url, folder, targets, rounds, seconds)
    text, verdicts = roundtrip.report(result, options.bus)
    print(text, flush=True)
    return verdicts, {"values": result["values"], "floor": result["floor"]["values"]}


def whole_stack(
    folder: Path,
    parts: Sequence[str],
    rounds: int,
    seconds: float,
    ways: Sequence[str],
    loads: Sequence[tuple[str, int]],
) -> tuple[list[Target], dict[str, object]]:
    verdicts: list[Target] = []
    values: dict[str, object] = {}
    with EmbeddedRedis(folder / "redis-stack", port=0) as server, ExitStack() as processes:
        running = whole.Stack(server.url, folder, processes)
        asyncio.run(running.ready())
        if "memory" in parts:
            values["memory"] = memory = running.memory()
            text, found = whole.memory_report(memory)
            print(text, flush=True)
            verdicts += found
        for name in whole.BESIDES:
            running.participants.pop(name).stop()
        if "streams" in parts:
            result = whole.measure(running, folder, rounds, seconds, ways, loads)
            text, found = whole.report(result)
            print(text, flush=True)
            verdicts += found
            values["streams"] = {f"{load} {streams}": ways for (load, streams), ways in result.items()}
    return verdicts, values


def recall(folder: Path, rounds: int, short: bool) -> tuple[list[Target], dict[str, object]]:
    """The memory participant: searching, and taking in."""
    sizes, questions = ([1_000], 30) if short else ([1_000, 10_000, 100_000], 200)
    verdicts: list[Target] = []
    searched: dict[str, object] = {}
    for store, apart in (("an embedded Chroma", False), ("a Chroma server", True)):
        searched[store] = lines = memory_search.measure(folder, sizes, questions, server=apart)
        text, found = memory_search.report(lines, store)
        print(text, flush=True)
        verdicts += found
    queued = 100 if short else 3_000
    with EmbeddedRedis(folder / "redis-recall", port=0) as server:
        taken = memory_ingest.measure(server.url, folder, rounds, 2.0 if short else 5.0, queued)
    text, more = memory_ingest.report(taken, queued)
    print(text, flush=True)
    return verdicts + more, {"search": searched, "ingest": taken}


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    parts = options.only or PARTS
    rounds = options.rounds or (1 if options.short else 5)
    verdicts: list[Target] = []
    values: dict[str, object] = {}
    began = time.monotonic()
    before = psutil.cpu_percent(interval=1.0)
    print(f"{os.cpu_count()} CPUs, {before:.0f} % of them used by others, {rounds} round(s); medians", flush=True)
    with tempfile.TemporaryDirectory(prefix="local2-bench-") as name:
        folder = Path(name)
        if "roundtrip" in parts:
            found, values["roundtrip"] = round_trips(options, folder, rounds, 0.5 if options.short else 1.5)
            verdicts += found
        if "memory" in parts or "streams" in parts:
            ways = ["model", "api"] if options.short else list(whole.WAYS)
            loads = whole.LOADS if options.short else (*whole.LOADS, whole.FLOOD)
            found, more = whole_stack(folder, parts, min(rounds, 3), 1.0 if options.short else 3.0, ways, loads)
            verdicts += found
            values |= more
        if "recall" in parts:
            found, values["recall"] = recall(folder, min(rounds, 3), options.short)
            verdicts += found
        if "users" in parts:
            values["users"] = many = memory_users.measure(
                folder, *((150, 1_000) if options.short else (10_000, 15_000))
            )
            text, found = memory_users.report(many)
            print(text, flush=True)
            verdicts += found
        if "knowledge" in parts:
            known = knowledge_search.measure(folder / "knowledge", *((1_000, 30) if options.short else (100_000, 300)))
            print(knowledge_search.report(known), flush=True)
            values["knowledge"] = known
    print("\nTargets")
    print("\n".join(map(str, verdicts)))
    after = psutil.cpu_percent(interval=1.0)
    print(f"\n{time.monotonic() - began:.0f} s; at the end, others use {after:.0f} %")
    if options.json:
        options.json.write_text(json.dumps({**values, "targets": [asdict(v) for v in verdicts]}, indent=2))
    far = [verdict.name for verdict in verdicts if verdict.far]
    if far:
        print(f"more than {FAR:g} times a target, so that something has broken: {'; '.join(far)}", file=sys.stderr)
    alone = max(before, after) < _ALONE
    return int((bool(far) and alone) or (options.strict and not all(verdict.met for verdict in verdicts)))


if __name__ == "__main__":
    sys.exit(main())
