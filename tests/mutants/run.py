"""Would the tests notice? `make mutants` changes the code in one place, runs the tests of that place, and counts.

A sample of all small changes of meaning (`changes.py`), drawn by a seed, each tried in a copy of the checkout: of the
tests that run the changed line the cheapest, and those that are most about it, until one fails or hangs twice and
passes without the change, or the change has had its share of time. Those that nobody has noticed are tried with other
tests while there is time. Which test runs which line is recorded once (`recorded.py`), in `.mutants`, and again of test
files that have changed. Prints the rate of each area, and what nobody noticed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mutants.changes import Change, changes
from mutants.readers import Lines, Readers
from mutants.recorded import Recorded, recorded
from mutants.trial import Bench, Verdict
from mutants.wording import Wording, words_at

ROOT = Path(__file__).resolve().parents[2]
AREAS = {
    area: [f"{folder}/{name}.py" for folder, names in folders.items() for name in names.split()]
    for area, folders in {
        "bus": {"shared/bus": "*"},
        "records": {"shared/records": "*"},
        "participant": {
            "shared/participant": "deadlines inbox janitor presence registry retention service tool tool_client"
        },
        "gateway": {
            "services/gateway/http": "admin_key auth body keys request_guard",
            "services/gateway/operations": "bus_stream file_routes",
            "services/gateway/queries": "accept cancel deletion sse versions",
        },
        "generator": {
            "services/generator": "answering ending generation loop opening response_run session_queues shadow steps"
        },
        "judging": {
            "services/critic": "critic grading judge jury pairs turns",
            "services/reward": "database export leaderboard ranking sequential service store votes",
        },
        "memory": {"services/memory": "write_batcher keywords ranking rerank"},
        "knowledge": {"services/knowledge": "claims merging names"},
        "web_fetch": {"services/web_fetch": "address guard names url"},
    }.items()
}
# How apt a test is to notice a change, by its name.
Aptness = Callable[[str], float]
# What it takes to collect a test file, in seconds.
_COLLECTING = 1.0


def area_of(path: str) -> str | None:
    return next((area for area, patterns in AREAS.items() if any(fnmatch(path, one) for one in patterns)), None)


def sampled(found: Sequence[Change], count: int, seed: int) -> list[Change]:
    """So many changes by chance, no two of one line."""
    order = list(found)
    random.Random(seed).shuffle(order)
    return list({(change.path, change.line): change for change in reversed(order)}.values())[::-1][:count]


def chosen(
    known: Recorded, lines: Lines, apt: Aptness, budget: float, asked: Collection[str] = frozenset()
) -> list[str]:
    """The tests of some lines, until they take more than `budget` seconds: in turn the cheapest one and the aptest of
    those that were not asked before. What a test file starts counts once."""
    starts = known.starts()
    names = {name for file, numbers in lines.items() for name in known.running(file, numbers)}.difference(asked)
    cheap = sorted(names, key=lambda name: (known.cases[name].seconds, name))
    aptest = sorted(names, key=lambda name: (-apt(name), known.cases[name].seconds, name))
    taken: dict[str, None] = {}
    files: set[str] = set()
    for pair in zip(cheap, aptest, strict=True):
        for name in pair:
            file = name.partition("::")[0]
            seconds = max(known.cases[name].seconds, 0.0 if file in files else starts[file])
            if name in taken or (taken and seconds > budget):
                continue
            taken[name] = None
            files.add(file)
            budget -= seconds
        if len(taken) >= 150:
            break
    return list(taken)


def rounds(known: Recorded, tests: Iterable[str], apt: Aptness) -> list[list[str]]:
    """The tests by their files, so that a file is set up once: first the two that are aptest for what they cost, then
    ever more files at a time. Most changes are noticed before the later ones are even collected."""
    files: dict[str, list[str]] = {}
    for name in sorted(tests, key=lambda name: (known.cases[name].seconds, name)):
        files.setdefault(name.partition("::")[0], []).append(name)

    starts = known.starts()

    def worth(file: str) -> float:
        return max(map(apt, files[file])) / (
            _COLLECTING + max(starts[file], sum(known.cases[name].seconds for name in files[file]))
        )

    left = sorted(files, key=lambda file: (-worth(file), file))
    made: list[list[str]] = []
    while left:
        some, left = left[: 2 ** (len(made) + 1)], left[2 ** (len(made) + 1) :]
        made.append([name for file in some for name in files[file]])
    return made


def aptness(known: Recorded, wording: Wording, change: Change) -> Aptness:
    """How much of what a test runs is in the changed file, and how much of what it says is about the change."""
    words = words_at(known.sources[change.path], change.line, change.old)

    def apt(name: str) -> float:
        case = known.cases[name]
        return case.lines.get(change.path, 0).bit_count() / case.breadth * wording.nearness(name, words)

    return apt


async def tried(known: Recorded, sample: Sequence[Change], options: argparse.Namespace) -> list[Verdict]:
    """What became of the changes, as far as the time sufficed."""
    readers = Readers(known.sources)
    wording = Wording({path: (ROOT / path).read_text() for path in known.files})
    starts = known.starts()
    seconds = {name: max(case.seconds, starts[name.partition("::")[0]]) for name, case in known.cases.items()}
    quickest = sorted(seconds, key=lambda name: (seconds[name], name))[:5]
    until = time.monotonic() + 60 * options.minutes
    left, verdicts = deque(sample), dict[Change, Verdict]()
    asked = defaultdict[Change, set[str]](set)

    async def work() -> None:
        async with Bench(ROOT) as bench:
            await bench.check(quickest, seconds)
            while left and time.monotonic() < until:
                change = left.popleft()
                apt = aptness(known, wording, change)
                lines = readers.of(change.path, change.line)
                tests = chosen(known, lines, apt, options.budget, asked[change])
                before = verdicts.get(change, Verdict(change))
                if tests or change not in verdicts:
                    asked[change].update(tests)
                    verdict = await bench.judge(change, rounds(known, tests, apt), seconds)
                    verdicts[change] = verdict.after(before)
                    # of what was missed before it is news that somebody noticed
                    if options.verbose or (verdict.by is None) is not bool(before.tried):
                        tell(verdicts[change])
                if tests and verdicts[change].by is None:
                    left.append(change)

    def tell(verdict: Verdict) -> None:
        told = f"{verdict.why}: {verdict.by}" if verdict.by else f"NOT NOTICED by {verdict.tried} tests"
        print(f"[{len(verdicts)}] {verdict.change}\n      {told}, {verdict.seconds:.1f} s", flush=True)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(options.slots, len(sample))):
            group.create_task(work())
    return list(verdicts.values())


def report(verdicts: Iterable[Verdict]) -> str:
    tried = sorted(verdicts, key=lambda one: (one.change.path, one.change.line))
    # whoever makes one sees it at once, without a test
    every = [verdict for verdict in tried if verdict.why != "breaks"]
    by_area: dict[str, list[Verdict]] = {}
    for verdict in every:
        by_area.setdefault(area_of(verdict.change.path) or "other", []).append(verdict)
    rows = ["area         noticed  of   rate"]
    for area, some in [*sorted(by_area.items()), ("all", every)]:
        noticed = sum(verdict.by is not None for verdict in some)
        rows.append(f"{area:12} {noticed:7} {len(some):3} {noticed / max(len(some), 1):6.1%}")
    rows.append(f"{sum(verdict.why == 'hangs' for verdict in every)} of those noticed let a test hang.")
    rows.append(f"{len(tried) - len(every)} more are not counted: with them nothing can be imported.")
    missed = [verdict for verdict in every if verdict.by is None]
    for what, some in (("noticed", [one for one in every if one.by is not None]), ("missed", missed)):
        took = sum(verdict.seconds for verdict in some) / max(len(some), 1)
        rows.append(f"A change that is {what} took {took:.1f} seconds of a processor.")
    if missed:
        rows.append("Nobody noticed:")
        rows += [f"  {one.change}" + ("" if one.tried else "   (no test runs it)") for one in missed]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="which sample")
    parser.add_argument("--count", type=int, default=500, help="how many changes (500)")
    parser.add_argument("--minutes", type=float, default=30.0, help="no trial begins after that time (30)")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of tests for each change at a time (30)")
    parser.add_argument("--slots", type=int, default=3 * (os.cpu_count() or 2), help="trials at a time: tests wait")
    parser.add_argument("--verbose", action="store_true", help="say of each change who noticed it")
    parser.add_argument("--known", action="store_true", help="ask the tests that are recorded, and record no others")
    parser.add_argument("only", nargs="*", help=f"areas ({', '.join(AREAS)}) or files; without them all areas")
    options = parser.parse_args()

    # what ends early tidies up
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "shared/*.py", "services/*.py"]
    told = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    sources = [path for path in told.split() if (ROOT / path).exists()]
    wanted = [p for p in sources if (p in options.only or area_of(p) in options.only if options.only else area_of(p))]
    if not wanted:
        parser.error(f"none of these is an area or a file of the product: {' '.join(options.only)}")
    known = recorded(ROOT, sources, 0 if options.known else (os.cpu_count() or 2) + 1)
    found = [change for path in wanted for change in changes(path, (ROOT / path).read_bytes())]
    sample = sampled(found, options.count, options.seed)
    print(f"seed {options.seed}: {len(sample)} of {len(found)} changes in {len(wanted)} files", flush=True)
    began = time.monotonic()
    verdicts = asyncio.run(tried(known, sample, options))
    print(f"\n{report(verdicts)}")
    print(
        f"seed {options.seed}, {len(verdicts)} of {len(sample)} tried in {(time.monotonic() - began) / 60:.1f} minutes"
    )


if __name__ == "__main__":
    main()
