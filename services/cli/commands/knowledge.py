"""The commands about knowledge: show, add, correct, forget, export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.table import Column, Table

from services.cli.api import rows
from services.cli.commands.operate import AsJson, Limit, print_json, save_lines, with_api
from services.cli.terminal import console
from services.cli.words import printable

knowledge = typer.Typer(no_args_is_help=True)


Since = Annotated[str | None, typer.Option(help="2026, 2026-05 or 2026-05-03")]
Until = Annotated[str | None, typer.Option(help="When it was over: 2026, 2026-05 or 2026-05-03")]
Was = Annotated[bool | None, typer.Option("--was/--is", help="It is over, or it is so")]


def _path(fact_id: str) -> str:
    return f"/knowledge/facts/{quote(fact_id, safe='')}"


def _body(was: bool | None, **values: Any) -> dict[str, Any]:
    holds = None if was is None else "was" if was else "is"
    return {name: value for name, value in {**values, "holds": holds}.items() if value is not None}


def _say(fact: dict[str, Any]) -> None:
    console.print(f"{printable(fact['id'])}  {printable(fact['text'])}")


@knowledge.command("show")
def show(
    about: Annotated[str, typer.Argument(help="A name, or the id of a fact; left out: everything")] = "",
    limit: Limit = 50,
    cursor: Annotated[str | None, typer.Option(help="Goes on where a page ended")] = None,
    why: Annotated[bool, typer.Option("--why", help="What each fact rests on")] = False,
    as_json: AsJson = False,
) -> None:
    """List your facts, newest first; with an id, why it is believed."""
    found = with_api(lambda api: api.get("/knowledge/facts", about=about, limit=limit, cursor=cursor))
    if about and not found["facts"] and _is_id(about):
        fact = with_api(lambda api: api.get(_path(about)))
        found = {"facts": [fact], "cursor": None, "total": 1}
        why = True
    if as_json:
        print_json(found)
        return
    facts = rows(found, "facts")
    if not facts:
        console.print("nothing is known")
        return
    table = Table(Column("id", min_width=max(len(fact["id"]) for fact in facts)), "fact", "confidence")
    for fact in facts:
        text = "\n  ".join([fact["text"], *(fact["why"] if why else ())])
        table.add_row(printable(fact["id"]), printable(text), f"{fact['confidence']:.2f}")
    console.print(table)
    if found["cursor"]:
        console.print(f"{len(facts)} of {found['total']}; next: --cursor '{found['cursor']}'")


def _is_id(text: str) -> bool:
    return len(text) == 24 and all(c in "0123456789abcdef" for c in text)


@knowledge.command("add")
def add(
    subject: Annotated[str, typer.Argument(help="A name; `me` for yourself")],
    relation: Annotated[str, typer.Argument(help="A few words, such as 'lives in'")],
    object_: Annotated[str, typer.Argument(metavar="OBJECT", help="A name")],
    since: Since = None,
    until: Until = None,
    was: Was = None,
) -> None:
    """Add a fact. It counts more than facts read from conversations."""
    body = _body(was, subject=subject, relation=relation, object=object_, since=since, until=until)
    _say(with_api(lambda api: api.call("POST", "/knowledge/facts", json=body)))


@knowledge.command("correct")
def correct(
    fact_id: Annotated[str, typer.Argument(help="Its id, as `show` tells it")],
    subject: Annotated[str | None, typer.Option(help="Who it is about")] = None,
    relation: Annotated[str | None, typer.Option(help="A few words, such as 'lives in'")] = None,
    object_: Annotated[str | None, typer.Option("--object", help="What it says of the subject")] = None,
    since: Since = None,
    until: Until = None,
    was: Was = None,
) -> None:
    """Correct a fact. An option that is left out changes nothing."""
    body = _body(was, subject=subject, relation=relation, object=object_, since=since, until=until)
    if not body:
        raise typer.BadParameter("say what is to be corrected, such as --object Porto or --until 2026-05")
    _say(with_api(lambda api: api.call("PATCH", _path(fact_id), json=body)))


@knowledge.command("forget")
def forget(fact_ids: Annotated[list[str], typer.Argument(help="Their ids, as `show` tells them")]) -> None:
    """Forget facts for good."""
    for fact_id in fact_ids:
        with_api(lambda api, fact_id=fact_id: api.delete(_path(fact_id)))  # type: ignore[misc]
        console.print(f"forgot {fact_id}")


@knowledge.command("export")
def export(
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A file; default: standard output")] = None,
) -> None:
    """Export your facts with their sources, one JSON object a line."""

    save_lines("/knowledge/export", out)
