"""`local2 stories`: runs them one after the other and shows every check that failed."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from local2_stories.runner import StoryReport, live_participants, run_story
from local2_stories.story import Story, select_stories
from rich.table import Table
from rich.text import Text

from services.cli.api import Api
from services.cli.settings import ClientSettings
from services.cli.terminal import Progress, Terminal, console, errors
from services.cli.words import printable


@dataclass(frozen=True, slots=True)
class Output:
    """The outputs of a run of stories: the report goes to `console`, the progress to a terminal or to `errors`."""

    console: Terminal
    errors: Terminal
    verbose: bool = False
    as_json: bool = False


async def run_stories(api: Api, stories: Sequence[Story], *, named: bool, output: Output) -> int:
    """The exit code: 1 when a check failed, when nothing could be run, or when a story asked for by name could not."""
    console, as_json = output.console, output.as_json
    reports = []
    async with Progress(console, output.errors) as progress:
        progress("waiting for the participants")
        live = await live_participants(api)
        for story in stories:
            report = await run_story(api, story, live, progress)
            reports.append(report)
            progress.pause()
            if not as_json:
                _print_story(report, output.verbose, console)
    if as_json:
        sys.stdout.write(json.dumps([dumped(report) for report in reports], ensure_ascii=False, indent=2) + "\n")
    else:
        console.print(summary(reports))
    return exit_code(reports, named=named)


def exit_code(reports: Sequence[StoryReport], *, named: bool) -> int:
    ran = [report for report in reports if not report.not_run]
    failed = any(report.failures for report in ran) or not ran or (named and len(ran) < len(reports))
    return 1 if failed else 0


def _print_story(report: StoryReport, verbose: bool, console: Terminal) -> None:
    def line(text: str, style: str = "") -> None:
        console.print(printable(text), style=style)

    line(f"{report.story.id}  {report.story.title}", "bold")
    if report.not_run:
        line(f"  not run: {report.not_run}", "yellow")
    for turn in report.turns:
        line(f"  {turn.query}  ({turn.seconds:.1f} s)")
        for outcome in turn.outcomes:
            if not outcome.ok:
                line(f"    ✗ {outcome.check}", "red")
                line(f"      {outcome.seen}", "dim")
            elif verbose:
                line(f"    ✓ {outcome.check}", "green")


def summary(reports: Sequence[StoryReport]) -> Table:
    table = Table("story", "title", "checks", "failed", "result")
    for report in reports:
        result = Text("passed", "green")
        if report.not_run or report.failures:
            result = Text("not run", "yellow") if report.not_run else Text("FAILED", "red")
        table.add_row(report.story.id, report.story.title, str(report.checks), str(report.failures), result)
    return table


def dumped(report: StoryReport) -> dict[str, Any]:
    return {
        "id": report.story.id,
        "title": report.story.title,
        "result": "not run" if report.not_run else "failed" if report.failures else "passed",
        "reason": report.not_run or None,
        "turns": [
            {
                "query": turn.query,
                "seconds": round(turn.seconds, 3),
                "checks": [{"check": o.check, "ok": o.ok, "seen": None if o.ok else o.seen} for o in turn.outcomes],
            }
            for turn in report.turns
        ],
    }


def stories(
    names: Annotated[list[str] | None, typer.Argument(help="S1 S2 …, or .yaml files; default: all")] = None,
    var: Annotated[list[str] | None, typer.Option("--var", help="name=value for a story's variable")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Shows the checks that hold too")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The report as JSON")] = False,
) -> None:
    """Runs the acceptance stories against the stack that is up; exit code 1 when a check fails."""
    pairs = [item.partition("=") for item in var or []]
    if wrong := [name for name, sign, _ in pairs if not sign or not name]:
        raise typer.BadParameter(f"{wrong[0]}: name=value is expected", param_hint="--var")
    chosen = select_stories(names or [], {name: value for name, _, value in pairs})

    async def work() -> int:
        async with Api(ClientSettings.load("cli")) as api:
            output = Output(console, errors, verbose, as_json)
            return await run_stories(api, chosen, named=bool(names), output=output)

    raise typer.Exit(asyncio.run(work()))
