"""`local2 experiment start|show|stop|promote|revert`: from "is this prompt better?" to its being live, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from services.cli.api import ApiError, rows
from services.cli.commands.operate import AsJson, print_json, with_api
from services.cli.terminal import console
from services.cli.words import counted, printable

experiment = typer.Typer(no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The experiment's name")]
_SHOWN = 60


@experiment.command("start")
def start(
    name: Name,
    b: Annotated[list[str], typer.Option("--b", help="What is different: model=…, prompt=… (or prompt=@FILE), "
                                                     "temperature=… (or temperature=default)")],
    more: Annotated[list[str] | None, typer.Argument(help="More of them")] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Configure B like A, but for what is named. From then on every comparison counts."""
    wanted = dict(_setting(item) for item in (*b, *(more or ())))
    _print(with_api(lambda api: api.post("/experiments", {"name": name, "b": wanted})), as_json)


def _setting(item: str) -> tuple[str, Any]:
    name, sign, value = item.partition("=")
    if not sign or not name:
        raise typer.BadParameter(f"{item}: name=value is expected, such as temperature=0.7", param_hint="--b")
    if name == "prompt" and value.startswith("@"):
        try:
            return name, Path(value[1:]).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as exc:
            raise ApiError("bad_file", f"{value[1:]} cannot be read as a prompt: {exc}") from exc
    if name == "temperature":
        if value == "default":
            return name, None
        try:
            return name, float(value)
        except ValueError:
            raise typer.BadParameter(f"temperature: {value} is not a number", param_hint="--b") from None
    return name, value


@experiment.command("show")
def show(
    name: Annotated[str | None, typer.Argument(help="Its name; none: all experiments, and the one that runs")] = None,
    as_json: AsJson = False,
) -> None:
    """What the verdicts say so far."""
    if name is None:
        found = rows(with_api(lambda api: api.get("/experiments")), "experiments")
        if as_json:
            print_json(found)
            return
        if not found:
            console.print("no experiment yet: local2 experiment start NAME --b prompt=@FILE")
            return
        table = Table("experiment", "state", "what is different at B")
        for row in found:
            table.add_row(Text(row["name"]), row["state"], Text(_different(row)))
        console.print(table)
        if found[0]["ended"] is not None:
            return
        name = found[0]["name"]
    _print(with_api(lambda api: api.get(f"/experiments/{name}")), as_json)


@experiment.command("stop")
def stop(name: Name, as_json: AsJson = False) -> None:
    """Ends it without a change; B has its former settings again."""
    _print(with_api(lambda api: api.post(f"/experiments/{name}/stop")), as_json)


@experiment.command("promote")
def promote(
    name: Name,
    force: Annotated[bool, typer.Option("--force", help="Also when B is not known to be better")] = False,
    as_json: AsJson = False,
) -> None:
    """Makes B's configuration A's, now and for later starts."""
    _print(with_api(lambda api: api.post(f"/experiments/{name}/promote", {"force": force})), as_json)


@experiment.command("revert")
def revert(name: Name, as_json: AsJson = False) -> None:
    """Gives A the settings back that it had before the promotion."""
    _print(with_api(lambda api: api.post(f"/experiments/{name}/revert")), as_json)


def _different(row: dict[str, Any]) -> str:
    """Where B differs from A, each in a few words."""
    return ", ".join(f"{name} {_short(row['a'].get(name))} → {_short(row['b'].get(name))}" for name in row["changed"])


def _short(value: Any) -> str:
    text = "default" if value is None else " ".join(printable(str(value)).split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _print(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    console.print(f"{found['name']} ({found['state']}): {_different(found)}")
    console.print(verdict(found["result"]))
    for kind, result in found["intents"].items():
        console.print(f"  {kind}: {verdict(result)}")
    for label, votes in (("A's answers", found["votes"]["a"]), ("answers since", found["votes"]["promoted"])):
        if votes is not None and (votes["positive"] or votes["negative"]):
            console.print(f"votes on {label}: {votes['positive']} good, {votes['negative']} bad")
    for warning in found["warnings"]:
        console.print(f"note: {printable(warning)}")


def verdict(result: dict[str, Any]) -> str:
    """The decision, and what it rests on, as a sentence."""
    tally = f"{result['wins']} won, {result['ties']} tied, {result['losses']} lost"
    if result["share"] is None:
        return f"not yet decided: {tally}"
    basis = (
        f"{tally} in {counted(result['conversations'], 'conversation')}; B wins {result['share']:.0%} of those decided "
    )
    basis += f"[{result['low']:.0%} – {result['high']:.0%}]"
    if result["decision"] != "not yet":
        return f"B is {result['decision']} (since verdict {result['decided_at']}): {basis}"
    more = "" if result["more"] is None else f"; about {counted(result['more'], 'conversation')} more, if it stays so"
    return f"not yet decided: {basis}{more}"
