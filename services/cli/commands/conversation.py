"""`local2 ask`, `local2 chat`, `local2 cancel`: their options."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from services.cli.api import Api
from services.cli.commands.ask import Committee
from services.cli.commands.ask import ask as ask_query
from services.cli.commands.ask import chat as chat_loop
from services.cli.commands.operate import with_api
from services.cli.settings import ClientSettings
from services.cli.terminal import console, errors

Session = Annotated[str | None, typer.Option("--session", "-s", help="Goes on in this conversation")]
Members = Annotated[
    str | None,
    typer.Option("--committee", help="Who deliberates before the answer: names separated by commas, or active"),
]
Rounds = Annotated[int | None, typer.Option("--rounds", min=1, max=10, help="Rounds of the committee")]
NoThinking = Annotated[bool, typer.Option("--no-thinking", help="Shows the answer and the tools only")]


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
    """Ask one question. Ctrl-C cancels it, a second Ctrl-C leaves at once."""
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


def chat(
    session: Session = None, no_thinking: NoThinking = False, committee: Members = None, rounds: Rounds = None
) -> None:
    """Chat in the terminal."""
    settings, sitting = ClientSettings.load("cli"), _committee(committee, rounds)
    code = chat_loop(
        settings, session=session, thinking=not no_thinking, console=console, errors=errors, committee=sitting
    )
    raise typer.Exit(code)


def _committee(names: str | None, rounds: int | None) -> Committee | None:
    if names is None and rounds is not None:
        raise typer.BadParameter("needs --committee", param_hint="--rounds")
    return None if names is None else Committee.parse(names, rounds)


def cancel(query_id: Annotated[str, typer.Argument(help="The id that the query was given")]) -> None:
    """Stop a query."""
    state = with_api(lambda api: api.post(f"/queries/{query_id}/cancel"))["state"]
    console.print(f"{query_id}: {state}")
