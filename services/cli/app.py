"""The `local2` command. The module of a command is imported when that command is called."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

import typer
import typer.core
from typer.exceptions import TyperException

from shared.errors import Local2Error

_COMMANDS_AT = "services.cli.commands"


@dataclass(frozen=True, slots=True)
class Place:
    """The function of a command, or the Typer of a group, as `module:name`."""

    place: str
    help: str

    def load(self, name: str) -> Any:
        """Import the command and return it as Typer runs it."""
        module, attribute = self.place.split(":")
        target = getattr(import_module(module), attribute)
        holder = _typer()
        if isinstance(target, typer.Typer):
            holder.add_typer(target, name=name, help=self.help)
        else:
            holder.command(name, help=self.help)(target)
        return typer.main.get_group(holder).commands[name]


COMMANDS = {
    "run": Place(f"{_COMMANDS_AT}.run:run", "Run the whole stack on this machine until Ctrl-C."),
    "ask": Place(
        f"{_COMMANDS_AT}.conversation:ask", "Ask one question. Ctrl-C cancels it, a second Ctrl-C leaves at once."
    ),
    "chat": Place(f"{_COMMANDS_AT}.conversation:chat", "Have a conversation in the terminal."),
    "cancel": Place(f"{_COMMANDS_AT}.conversation:cancel", "Stop a query."),
    "doctor": Place(
        f"{_COMMANDS_AT}.doctor:doctor",
        "Show what is reachable and what is missing, with a remedy. The exit code is 1 if a needed part is missing.",
    ),
    "stories": Place(
        "local2_stories.command:stories",
        "Run the acceptance stories against the running stack. The exit code is 1 if a check fails.",
    ),
    "sessions": Place(f"{_COMMANDS_AT}.operate:sessions", "Conversations."),
    "memory": Place(f"{_COMMANDS_AT}.memory:memory", "Memories of your conversations."),
    "knowledge": Place(
        f"{_COMMANDS_AT}.knowledge:knowledge", "Facts about you and the people and places of your life."
    ),
    "files": Place(f"{_COMMANDS_AT}.files:files", "Your files, and the documents among them."),
    "import": Place(
        f"{_COMMANDS_AT}.importing:app",
        "Conversations and memories of other assistants. Without --write it only lists them.",
    ),
    "export": Place(f"{_COMMANDS_AT}.preferences:export", "Data out of LoCAL2, as JSON lines."),
    "backup": Place(
        f"{_COMMANDS_AT}.backup:backup",
        "Write everything that the stack stores into one file, but for the queries that run.",
    ),
    "restore": Place(
        f"{_COMMANDS_AT}.backup:restore",
        "Put a backup back, by default into an empty stack. After an interruption, run it again.",
    ),
    "retention": Place(f"{_COMMANDS_AT}.retention:retention", "How long each kind of data stays."),
    "leaderboard": Place(
        f"{_COMMANDS_AT}.preferences:leaderboard", "Rank configurations by the judge and by users' votes."
    ),
    "judge": Place(
        f"{_COMMANDS_AT}.preferences:judge",
        "Show whether the judge can be trusted: its agreement with users, and its biases.",
    ),
    "experiment": Place(f"{_COMMANDS_AT}.experiment:experiment", "Another configuration on trial with respondent B."),
    "eval": Place(f"{_COMMANDS_AT}.eval_answers:app", "Measure the answers of a running stack."),
    "mcp": Place(f"{_COMMANDS_AT}.mcp:mcp", "Tools of MCP servers (docs/mcp.md)."),
    "keys": Place(f"{_COMMANDS_AT}.operate:keys", "API keys."),
    "dead-letters": Place(f"{_COMMANDS_AT}.operate:dead_letters", "Messages that could not be handled."),
}


def _typer(cls: type[typer.core.TyperGroup] = typer.core.TyperGroup) -> typer.Typer:
    return typer.Typer(
        name="local2",
        cls=cls,
        help="LoCAL2: a local-first assistant. The model orchestrates; everything else is a participant on a bus.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )


class LazyGroup(typer.core.TyperGroup):
    """The group of COMMANDS. Its help imports none of them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        # Typer lists these names, and suggests one for a mistyped name.
        names: dict[str, Any] = dict.fromkeys(COMMANDS)
        self.commands.update(names)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command, or return None if there is no such command."""
        return COMMANDS[cmd_name].load(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands of `local2 --help`."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, place.help) for name, place in COMMANDS.items()])


app = _typer(LazyGroup)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"local2 {version('local2')}")
        raise typer.Exit


@app.callback()
def _options(
    _show: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version")
    ] = False,
) -> None:
    pass


def _print(text: str, style: str | None = "red") -> None:
    from services.cli.terminal import errors

    errors.print(text, style=style)


def _misused(exc: TyperException) -> None:
    """Print in one line what is wrong with a command line, and its usage."""
    said, context = str(getattr(exc, "format_message", exc.__str__)()), getattr(exc, "ctx", None)
    if context is None or said == context.get_help():
        # a group without a command is answered with its help
        _print(said, None)
        return
    usage = " ".join(context.get_usage().split()).removeprefix("Usage: ")
    right = f"it is used so: {usage} ({context.command_path} --help says more)"
    _print(f"local2: {said.rstrip('.')}; {right}")


def main() -> None:
    """Run the command line. An error is one sentence and status 1, or 2 for a wrong use or an unusable folder."""
    # as Ctrl-C does: the processes that a command started end with it
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except TyperException as exc:
        _misused(exc)
        sys.exit(2)
    except typer.Abort:
        _print("local2: given up; nothing was changed")
        sys.exit(1)
    except Local2Error as exc:
        _print(f"local2: {exc}")
        sys.exit(getattr(exc, "exit_status", 1))
