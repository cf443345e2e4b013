"""`make compose-test`: the system in real containers, from the build to an empty machine.

Builds the images, starts the stack with Compose and a scripted model in Ollama's place, and tries what users do to
it: stories over the published port, growing under load, containers killed at random, Redis restarted and full,
replicas taken away, and what each container can reach. At the end nothing of it may be left. The status is 0 only when
all checks passed; it is 2 when there is no Docker engine. `--break NAME` spoils the stack on purpose, to see a check
catch it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import engrams
import full
import havoc
import reach
import scaling
from load import Client, Outcome, judge, open_audit
from sabotage import SABOTAGE
from stack import ROOT, DockerError, Stack, docker

AUDIT = Path(__file__).resolve().parent / "audit.py"
HEADING = "Lighthouse Keepers of the Northern Coast"
# Of linear, at four replicas; a few seconds at two replicas on a busy machine say less.
TARGET, TARGET_SHORT = 0.85, 0.7
PARTS = ("stories", "reach", "scaling", "chaos", "redis", "full", "scale-in")
# In the long form alone.
LONG = ("full",)
STORIES = ("S1", "S2", "S3", "S4", "S5", "S6b")
JUDGED_STORIES = ("S6", "S7")
# Until everything that a load has left behind is handled.
SETTLE, SETTLE_JUDGED = 30.0, 90.0


class Report:
    """Prints what happens and remembers what failed."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.passed: list[str] = []
        self.failed: list[str] = []

    def say(self, *lines: str) -> None:
        for line in lines:
            print(f"      {line}" if line else "", flush=True)

    def check(self, name: str, good: bool, *details: str) -> None:
        (self.passed if good else self.failed).append(name)
        load = os.getloadavg()[0]
        print(
            f"[{time.monotonic() - self.began:4.0f} s, load {load:4.1f}] {'ok  ' if good else 'FAIL'}  {name}",
            flush=True,
        )
        self.say(*details)

    def attempt(self, name: str, part: Callable[[], None]) -> bool:
        """Whether the part came to its end; one that breaks off is a failed check."""
        try:
            part()
        except (DockerError, TimeoutError, ExceptionGroup) as exc:
            self.check(name, False, *"".join(traceback.format_exception_only(exc)).splitlines()[-30:])
            return False
        return True


class Test:
    def __init__(self, stack: Stack, report: Report, options: argparse.Namespace) -> None:
        self.stack = stack
        self.report = report
        self.short: bool = options.short
        self.options = options
        self.url = stack.services["gateway"]["environment"]["LOCAL2_REDIS_URL"]

    def start(self) -> None:
        began = time.monotonic()
        sizes = self.stack.build()
        shown = ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in sizes.items())
        self.report.check("the images build", True, f"{time.monotonic() - began:.0f} s; {shown}")
        took = self.stack.up(gateway=1, generator=1, web_search=1, web_fetch=1)
        self.report.check("up: everything is healthy", True, f"{took:.0f} s from `up` to healthy")
        time.sleep(1 if self.short else 5)
        open_audit(self.stack, AUDIT, self.url)
        used = self.stack.memory()
        self.report.say("memory at rest: " + ", ".join(f"{name} {size}" for name, size in sorted(used.items())))

    def stories(self) -> None:
        port = self.stack.urls()[0].rpartition(":")[2]
        env = {name: value for name, value in os.environ.items() if not name.startswith("LOCAL2_")}
        env |= {"LOCAL2_API_HOST": "127.0.0.1", "LOCAL2_API_PORT": port, "LOCAL2_API_KEY": self.stack.admin_key}
        env |= {"PYTHONPATH": str(ROOT), "LOCAL2_CONFIG": str(self.stack.empty_settings)}
        names = STORIES + (JUDGED_STORIES if self.stack.judged else ())
        command = [sys.executable, "-m", "services.cli", "stories", *names]
        command += ["--var", "page_url=http://world:8000/keepers", "--var", f"page_heading={HEADING}"]
        done = subprocess.run(command, env=env, text=True, capture_output=True, timeout=180, check=False)
        self.report.check(
            f"stories {', '.join(names)} over the published port",
            done.returncode == 0,
            *(line for line in f"{done.stdout}{done.stderr}".splitlines() if line.strip()),
        )

    def reach(self) -> None:
        lines, wrong, tried = reach.survey(self.stack, self.options.outside)
        self.report.check("each container reaches what it should and is closed as it should", not wrong, *lines, *wrong)
        if not tried:
            self.report.say("NOT TRIED: the internet; it takes root on the engine's machine, or --outside HOST:PORT")

        async def through_the_tool() -> list[str]:
            got = []
            async with Client(self.stack) as client:
                for url in reach.FORBIDDEN:
                    answer = await client.call("POST", "/tools/web_fetch/call", json={"args": {"url": url}})
                    error = str(answer.json().get("error"))
                    if not error.startswith(reach.REFUSALS):
                        got.append(f"{url}: {error}")
            return got

        got = asyncio.run(through_the_tool())
        self.report.check(f"web_fetch refuses {len(reach.FORBIDDEN)} addresses of the inside", not got, *got)

    def scaling(self) -> None:
        steps, seconds = ((1, 2), 5.0) if self.short else ((1, 2, 4, 8), 10.0)
        rows = [asyncio.run(scaling.measure(self.stack, n, self.options.places, seconds)) for n in steps]
        errors = sum(row.errors for row in rows)
        last, target = (2, TARGET_SHORT) if self.short else (4, TARGET)
        part = scaling.of_linear(rows, last)
        even = min(row.evenness for row in rows)
        self.report.check(
            f"web_fetch scales: {part:.2f} of linear at {last} replicas (at least {target})",
            part >= target and not errors,
            *scaling.table(rows),
            f"calls that failed: {errors}",
        )
        self.report.check(f"the work is spread: the least busy replica does {even:.2f} of the mean", even >= 0.5)

    def chaos(self) -> None:
        seconds = 20 if self.short else 120
        self.stack.up(gateway=2, generator=2, web_search=2, web_fetch=2, **self._of_memory(2))
        outcome, what = asyncio.run(havoc.chaos(self.stack, seconds, with_key=self.options.sabotage != "no-key"))
        self._audited(f"{seconds} s of containers killed at random", what, outcome)

    def redis(self) -> None:
        outcome, what = asyncio.run(havoc.redis_restart(self.stack, 1 if self.short else 3))
        self._audited("Redis restarted under load", what, outcome)

    def full(self) -> None:
        own, container = full.limits(self.stack)
        below = f"Redis' own limit is {own / 2**20:.0f} MB, its container's {container / 2**20:.0f} MB"
        self.report.check("Redis refuses before it is killed", 0 < own < container, below)
        outcome, told, wrong = asyncio.run(full.fill(self.stack, self.url))
        self.report.check("Redis is full: what writes is told so, what reads goes on", not wrong, *told, *wrong)
        self._audited("Redis was full for a while", "filled up to its limit, and emptied again", outcome)

    def scale_in(self) -> None:
        many = {"web_fetch": 3 if self.short else 8, "generator": 2, "gateway": 2, **self._of_memory(2)}
        self.stack.up(**many)
        outcome, what, rough = asyncio.run(havoc.scale_in(self.stack, dict.fromkeys(many, 1)))
        self._audited("replicas taken away under load", what, outcome)
        self.report.check("every replica taken away left by itself on SIGTERM", not rough, *rough)

    def _of_memory(self, replicas: int) -> dict[str, int]:
        """What the long form has several of besides: memory (the vectors are in a server), and who judges."""
        return {} if self.short else {"memory": replicas, "critic": replicas}

    def _audited(self, name: str, what: str, outcome: Outcome) -> None:
        settle = SETTLE_JUDGED if self.stack.judged else SETTLE
        verdict, wanted = judge(self.stack, outcome, AUDIT, self.url, settle)
        self.report.check(f"{name}: accepted = answered, nothing twice, nothing stuck", verdict.good, what,
                          *verdict.lines())  # fmt: skip
        wrong, details = asyncio.run(engrams.remembered(self.stack, outcome, wanted))
        graded = sum(said["score"] is not None for said in wanted.values())
        said = f"{len(wanted)} answers, of them {graded} graded, {len(outcome.votes)} voted on"
        self.report.check(f"{name}: each answer is remembered once, with what was said of it",
                          not wrong and bool(wanted), said, *(f"{n} {what}" for what, n in wrong.items()),
                          *details[:20])  # fmt: skip

    def run(self, parts: Sequence[str]) -> None:
        if self.report.attempt("the stack starts", self.start):
            for part in parts:
                if self.short and part in LONG and not self.options.only:
                    continue
                self.report.attempt(part, getattr(self, part.replace("-", "_")))
        if self.options.logs:
            self.options.logs.write_text(self.stack.logs(), encoding="utf-8")
        if self.report.failed:
            self.report.say("", "the last complaints in the logs:", *self.stack.complaints())


def engine() -> str | None:
    """Why there is no engine to use, or None."""
    try:
        version = docker("version", "--format", "{{.Server.Version}}", timeout=15).strip()
        compose = docker("compose", "version", "--short", timeout=15).strip()
    except DockerError as exc:
        return str(exc)
    print(f"Docker Engine {version}, Compose {compose}", flush=True)
    return None


def base_images() -> dict[str, Any]:
    """The images of others, as a Compose file that a preparing program can read."""
    stack = Stack()
    services = stack.services.items()
    stack.close()
    return {"services": {k: {"image": v["image"]} for k, v in services if not v["image"].startswith("local2")}}


def address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def main() -> int:
    parser = argparse.ArgumentParser(prog="compose-test", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="the short form, for CI")
    parser.add_argument("--only", action="append", choices=PARTS, help="this part only; repeatable")
    parser.add_argument("--places", type=int, default=2, help="calls of a web_fetch replica at once (%(default)s)")
    parser.add_argument("--outside", type=address, metavar="HOST:PORT", help="something that listens on the internet")
    parser.add_argument("--logs", type=Path, metavar="FILE", help="keep what the containers said")
    parser.add_argument("--break", dest="sabotage", choices=sorted(SABOTAGE), help="spoil the stack on purpose")
    parser.add_argument("--build", action="store_true", help="only build the images that are built here")
    parser.add_argument("--images", action="store_true", help="only list the images that are needed and not built here")
    options = parser.parse_args()
    if options.images:
        print(json.dumps(base_images()))
        return 0
    if reason := engine():
        print(f"No Docker engine can be used: {reason}", file=sys.stderr)
        return 2
    if options.build:
        built = Stack()
        print(", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in built.build().items()))
        built.close()
        return 0

    def stop(number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    report = Report()
    stack = Stack(SABOTAGE.get(options.sabotage), judged=not options.short)
    try:
        with stack:
            Test(stack, report, options).run(options.only or PARTS)
    except DockerError as exc:
        report.check("the stack starts and stops", False, *str(exc).splitlines())
    except KeyboardInterrupt:
        left = stack.leftovers()
        print(
            f"stopped; left behind: {left}" if left else "stopped; everything it had started was removed",
            file=sys.stderr,
        )
        return 130
    left = stack.leftovers()
    report.check("`down -v` leaves nothing", not left, *left)
    print(
        f"{len(report.passed)} passed, {len(report.failed)} failed" + "".join(f"\n  {name}" for name in report.failed)
    )
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
