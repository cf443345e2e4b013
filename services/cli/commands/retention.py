"""The commands about what is kept how long: show, and set."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.table import Column, Table

from services.cli.api import ApiError, rows
from services.cli.commands.operate import AsJson, print_json, with_api
from services.cli.terminal import console, errors
from services.cli.words import counted, printable

retention = typer.Typer()

_MOST_DAYS = 36_500


@retention.callback(invoke_without_command=True)
def show(
    context: typer.Context,
    days: Annotated[
        int | None, typer.Option(min=1, max=_MOST_DAYS, help="What would go if each kind were kept for so many days")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What is kept how long, and what would be removed now. Nothing is removed by asking."""
    if context.invoked_subcommand is not None:
        return
    found = with_api(lambda api: api.get("/retention", days=days))
    if as_json:
        print_json(found)
        return
    would = "would go now" if days is None else f"would go after {counted(days, 'day')}"
    table = Table("kind", Column("kept", justify="right"), "oldest", "kept for", Column(would, justify="right"))
    for kind in rows(found, "kinds"):
        table.add_row(
            printable(kind["kind"]), str(kind["kept"]), _day(kind["oldest"]), _days(kind["keep_days"]), str(kind["due"])
        )
    console.print(table)
    for one in found["away"]:
        errors.print(printable(f"{one['participant']}: {one['reason']}"))


@retention.command("set")
def change(
    kind: Annotated[str, typer.Argument(help="sessions, engrams, notes, files, facts, answers or preferences")],
    days: Annotated[int, typer.Argument(min=0, max=_MOST_DAYS, help="Days that they are kept; 0: for ever")],
    yes: Annotated[bool, typer.Option("--yes", help="Without a question")] = False,
) -> None:
    """Set for how many days a kind is kept. A question first says how much that removes."""
    found = with_api(lambda api: api.get("/retention", days=days or None))
    chosen = {one["kind"]: one for one in rows(found, "kinds")}
    if kind not in chosen:
        away = "".join(f"; {one['participant']} is away ({one['reason']})" for one in found["away"])
        raise ApiError("not_found", f"{kind} is none of {', '.join(chosen)}{away}")
    what = chosen[kind]
    if days and what["due"] and not yes:
        typer.confirm(f"{what['due']} of {what['kept']} {kind} will be removed for good. Go on?", abort=True)
    body = {what["setting"]: days}
    with_api(lambda api: api.call("PATCH", f"/participants/{what['participant']}/settings", json=body))
    console.print(f"{kind}: {_days(days)}")


def _day(ms: int | None) -> str:
    return "" if ms is None else datetime.fromtimestamp(ms / 1000, UTC).date().isoformat()


def _days(days: int) -> str:
    return counted(days, "day") if days else "ever"
