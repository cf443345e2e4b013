"""The commands about files: list, add, rm, search."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer
from rich.table import Column, Table

from services.cli.api import Api, ApiError, rows
from services.cli.commands.operate import AsJson, Limit, print_json, with_api
from services.cli.local_files import UnreadableFile, send
from services.cli.terminal import console, errors
from services.cli.words import ago, printable

files = typer.Typer(no_args_is_help=True)

# What the API says of one file; the next one may be taken.
_OF_THE_FILE = (400, 413, 415, 422)

Files = Annotated[list[Path], typer.Argument(help="Text, Markdown, HTML, PDF, PNG, JPEG, WebP or GIF")]


@files.command("add")
def add(paths: Files) -> None:
    """Add files to your documents. A file that is there already stays as it is. A refused file does not stop the
    others; the exit code is 1 then."""

    async def work(api: Api) -> bool:
        refused = False
        for path in paths:
            try:
                file = await send(api, path)
            except (UnreadableFile, ApiError) as exc:
                if isinstance(exc, ApiError) and exc.status not in _OF_THE_FILE:
                    raise
                refused = True
                said = str(exc) if str(path) in str(exc) or path.name in str(exc) else f"{path}: {exc}"
                errors.print(f"local2: {printable(said)}", style="red")
            else:
                console.print(f"{file['id']}  {printable(file['name'])}")
        return refused

    if with_api(work):
        raise typer.Exit(1)


@files.command("list")
def listed(limit: Limit = 50, as_json: AsJson = False) -> None:
    """List your files, newest first."""
    answer = with_api(lambda api: api.get("/files", limit=limit))
    if as_json:
        print_json(answer)
        return
    found = rows(answer, "files")
    ids = Column("id", min_width=max((len(file["id"]) for file in found), default=0))
    table = Table(ids, "name", "state", "size", "added")
    for file in found:
        state = printable(f"{file['state']}: {file['reason']}" if file["reason"] else file["state"])
        table.add_row(file["id"], printable(file["name"]), state, f"{file['size']:,}", ago(file["added"]))
    console.print(table)


@files.command("rm")
def remove(ids: Annotated[list[str], typer.Argument(help="Ids, as `files list` shows them")]) -> None:
    """Remove files and their text; no search finds them any more."""

    async def work(api: Api) -> None:
        for id in ids:
            await api.delete(f"/files/{quote(id, safe='')}")
            console.print(f"removed {id}")

    with_api(work)


@files.command("search")
def search(
    query: Annotated[str, typer.Argument(help="What to look for")],
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=50, help="How many at most")] = 5,
    as_json: AsJson = False,
) -> None:
    """Show the passages that a model would get for a query, best first."""
    found = with_api(lambda api: api.get("/documents", query=query, limit=limit))
    if as_json:
        print_json(found)
    else:
        console.print(printable(found["text"]))
