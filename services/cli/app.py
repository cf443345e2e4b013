"""The `local2` command."""

from __future__ import annotations

import asyncio
import signal
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text
from typer.exceptions import TyperException

from services.cli.api import Api
from services.cli.commands import eval as evaluate
from services.cli.commands import importing, operate
from services.cli.commands.ask import Committee
from services.cli.commands.ask import ask as ask_query
from services.cli.commands.ask import chat as chat_loop
from services.cli.commands.backup import backup, restore
from services.cli.commands.doctor import World, configured_redis, examine
from services.cli.commands.experiment import experiment
from services.cli.commands.files import files
from services.cli.commands.knowledge import knowledge
from services.cli.commands.mcp import mcp
from services.cli.commands.memory import memory
from services.cli.commands.preferences import judge, leaderboard
from services.cli.commands.repair import repair
from services.cli.commands.retention import retention
from services.cli.launch.plan import RunOptions
from services.cli.launch.run import Run
from services.cli.launch.run_lock import UnusableFolder
from services.cli.printable import printable
from services.cli.settings import ClientSettings
from services.cli.stories.command import Output, run_stories
from services.cli.stories.story import select_stories
from services.cli.terminal import console, errors
from shared.errors import Local2Error

app = typer.Typer(
    name="local2",
    help="LoCAL2: a local-first assistant. The model orchestrates; everything else is a participant on a bus.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(operate.dead_letters, name="dead-letters")
app.add_typer(operate.keys, name="keys")
app.add_typer(operate.sessions, name="sessions")
app.add_typer(memory, name="memory")
app.add_typer(knowledge, name="knowledge")
app.add_typer(mcp, name="mcp")
app.add_typer(files, name="files")
app.add_typer(operate.export, name="export")
app.add_typer(experiment, name="experiment")
app.add_typer(retention, name="retention")
app.add_typer(evaluate.app, name="eval")
app.add_typer(importing.app, name="import")
app.command()(backup)
app.command()(restore)
app.command()(leaderboard)
app.command()(judge)


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"local2 {version('local2')}")
        raise typer.Exit


@app.callback()
def _options(
    _show: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Shows the version")
    ] = False,
) -> None:
    pass


Session = Annotated[str | None, typer.Option("--session", "-s", help="Goes on in this conversation")]
Members = Annotated[
    str | None,
    typer.Option("--committee", help="Who deliberates before the answer: names separated by commas, or active"),
]
Rounds = Annotated[int | None, typer.Option("--rounds", min=1, max=10, help="Rounds of the committee")]
NoThinking = Annotated[bool, typer.Option("--no-thinking", help="Shows the answer and the tools only")]


@app.command()
def run(
    model: Annotated[str | None, typer.Option(help="The generator's model (LOCAL2_MODEL, gemma4:e4b)")] = None,
    respondent_b: Annotated[bool, typer.Option("--respondent-b", help="Runs the second respondent too")] = False,
    model_b: Annotated[str | None, typer.Option(help="Its model (default: the generator's)")] = None,
    temperature_b: Annotated[float, typer.Option(min=0, max=2, help="Its sampling temperature")] = 0.5,
    api_port: Annotated[
        int | None, typer.Option(min=1, max=65_535, help="Port of the HTTP API (default: LOCAL2_API_PORT, 8765)")
    ] = None,
    search: Annotated[str | None, typer.Option(help="searxng, brave, tavily or mock (default: what is there)")] = None,
    headless: Annotated[bool, typer.Option("--headless", help="Plain lines, for logs and other programs")] = False,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of everything kept (LOCAL2_DATA_DIR, .local2)")] = None,
) -> None:
    """Runs the whole stack on this machine until Ctrl-C."""
    if search not in (None, "searxng", "brave", "tavily", "mock"):
        raise typer.BadParameter("searxng, brave, tavily or mock", param_hint="--search")
    given = {"api_port": api_port, "data_dir": data_dir}
    client = ClientSettings.load("cli", {name: value for name, value in given.items() if value is not None})
    options = RunOptions(
        data_dir=client.data_dir,
        api_host=client.api_host,
        api_port=client.api_port,
        model=model,
        respondent_b=respondent_b,
        model_b=model_b,
        temperature_b=temperature_b,
        search=search,
        headless=headless,
    )
    asyncio.run(Run(options, client, configured_redis(client)).until_stopped())


@app.command()
def ask(
    query: Annotated[
        str, typer.Argument(help="The question; - reads it from standard input; may be left out with --file")
    ] = "",
    session: Session = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object when the answer is complete")] = False,
    no_thinking: NoThinking = False,
    file: Annotated[
        list[Path] | None,
        typer.Option("--file", "-f", help="A file that belongs to the question; may be repeated"),
    ] = None,
    committee: Members = None,
    rounds: Rounds = None,
) -> None:
    """Asks one question. Ctrl-C cancels it, a second Ctrl-C leaves at once."""
    sitting = _committee(committee, rounds)
    text = sys.stdin.read().strip() if query == "-" else query
    if not text and not file:
        raise typer.BadParameter("give a question, a file (--file), or both", param_hint="QUERY")

    async def work() -> int:
        async with Api(ClientSettings.load("cli")) as api:
            return await ask_query(
                api,
                text,
                session=session,
                as_json=as_json,
                thinking=not no_thinking,
                console=console,
                errors=errors,
                attached=file or (),
                committee=sitting,
            )

    raise typer.Exit(asyncio.run(work()))


@app.command()
def chat(
    session: Session = None, no_thinking: NoThinking = False, committee: Members = None, rounds: Rounds = None
) -> None:
    """A conversation in the terminal."""
    settings, sitting = ClientSettings.load("cli"), _committee(committee, rounds)
    code = chat_loop(
        settings, session=session, thinking=not no_thinking, console=console, errors=errors, committee=sitting
    )
    raise typer.Exit(code)


def _committee(names: str | None, rounds: int | None) -> Committee | None:
    if names is None and rounds is not None:
        raise typer.BadParameter("needs --committee", param_hint="--rounds")
    return None if names is None else Committee.parse(names, rounds)


@app.command()
def cancel(query_id: Annotated[str, typer.Argument(help="The id that the query was given")]) -> None:
    """Stops a query."""
    state = operate.with_api(lambda api: api.post(f"/queries/{query_id}/cancel"))["state"]
    console.print(f"{query_id}: {state}")


@app.command()
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


@app.command()
def doctor(
    mend: Annotated[
        bool, typer.Option("--repair", help="Saves what can be read of damaged data, with the stack stopped")
    ] = False,
) -> None:
    """What is reachable, what is missing, and what to do about it; exit code 1 when something needed is missing."""
    if mend:
        client = ClientSettings.load("cli")
        said = repair(client.data_dir, embedded=configured_redis(client) is None)
        for line in said or [f"nothing is damaged in {client.data_dir}"]:
            console.print(printable(line))
        return
    found = asyncio.run(examine(World.load()))
    marks = {"ok": ("ok     ", "green"), "note": ("note   ", "yellow"), "missing": ("MISSING", "bold red")}
    for finding in found:
        mark, style = marks[finding.level]
        text = f" {finding.about}: {printable(finding.text)}"
        console.print(Text.assemble((mark, style), text))
        if finding.remedy:
            console.print(Text(f"        → {finding.remedy}", style="dim"))
    raise typer.Exit(1 if any(finding.level == "missing" for finding in found) else 0)


def _misused(exc: TyperException) -> None:
    """Says in one line what is wrong with a command line, and how it is right."""
    said, context = str(getattr(exc, "format_message", exc.__str__)()), getattr(exc, "ctx", None)
    if context is None or said == context.get_help():
        # a group without a command is answered with its help
        errors.print(said)
        return
    usage = " ".join(context.get_usage().split()).removeprefix("Usage: ")
    right = f"it is used so: {usage} ({context.command_path} --help says more)"
    errors.print(f"local2: {said.rstrip('.')}; {right}", style="red")


def main() -> None:
    """The entry point: what goes wrong is one sentence and status 1, or 2 for a wrong use or an unusable folder."""
    # as Ctrl-C does: what was started for a command ends with it
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except TyperException as exc:
        _misused(exc)
        sys.exit(2)
    except typer.Abort:
        errors.print("local2: given up; nothing was changed", style="red")
        sys.exit(1)
    except Local2Error as exc:
        errors.print(f"local2: {exc}", style="red")
        sys.exit(2 if isinstance(exc, UnusableFolder) else 1)
