"""The commands about memory: search, list, show, delete, topics, export, import."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.table import Column, Table

from services.cli.api import Api, ApiError, rows
from services.cli.commands.operate import AsJson, Limit, print_json, save_lines, with_api
from services.cli.terminal import console
from services.cli.words import ago, counted, printable

memory = typer.Typer(no_args_is_help=True)
topics = typer.Typer(no_args_is_help=True, help="Facts kept under an exact name")
memory.add_typer(topics, name="topics")

# An import is sent as it is read; the memory embeds it meanwhile.
_IMPORT_SECONDS = 3_600.0
_SHOWN = 60


def _short(text: Any) -> str:
    flat = " ".join(str(text or "").split())
    return printable(flat if len(flat) <= _SHOWN else flat[: _SHOWN - 1] + "…")


def _said(engram: dict[str, Any]) -> str:
    return str(engram["query"] or engram["content"] or "")


def _ids(engrams: list[dict[str, Any]]) -> Column:
    """A column of whole ids, however narrow the terminal is: other commands want them."""
    return Column("id", min_width=max((len(engram["id"]) for engram in engrams), default=0))


def _rating(engram: dict[str, Any]) -> str:
    parts = [
        "" if engram["score"] is None else f"{engram['score']}/5",
        _compared(engram["pairwise_winner"], engram["pairwise_verdict"]),
        engram["sentiment"] or "",
    ]
    return ", ".join(part for part in parts if part)


def _compared(won: bool | None, verdict: str | None) -> str:
    """What the comparison with the other respondent said of an engram."""
    if won is None:
        return verdict or ""
    return "better of two" if won else "worse of two"


@memory.command("search")
def search(
    query: Annotated[str, typer.Argument(help="What to look for")],
    also: Annotated[list[str] | None, typer.Option(help="Something more to look for; may be repeated")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=50, help="How many at most, of each")] = 5,
    hybrid: Annotated[bool | None, typer.Option("--hybrid/--vectors", help="By words too, or by vectors alone")] = None,
    rerank: Annotated[
        bool | None, typer.Option("--rerank/--no-rerank", help="Only what helps, by a second look")
    ] = None,
    log: Annotated[
        bool, typer.Option("--log", help="Also what was said before and after, as the model reads it")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """The memories that a model would be given for this, best first."""
    how = {"queries": also or None, "hybrid": hybrid, "do_rerank": rerank, "log": log or None}
    found = with_api(lambda api: api.get("/memory", query=query, limit=limit, **how))
    if as_json:
        print_json(found)
        return
    table = Table("relevance", "when", "said", "answer", "rating", _ids(found["hits"]))
    for hit in rows(found, "hits"):
        answer = _short(hit["answer"])
        table.add_row(f"{hit['relevance']:.2f}", ago(hit["time"]), _short(_said(hit)), answer, _rating(hit), hit["id"])
    console.print(table if found["hits"] else "nothing found")
    if found["degraded"]:
        console.print(f"note: {printable(found['degraded'])}", style="yellow")
    if (reranked := found.get("rerank")) and reranked["trouble"]:
        console.print(f"note: {printable(reranked['trouble'])}", style="yellow")
    if found.get("log"):
        console.print(printable(found["text"].partition("\n\n===")[2].partition("\n")[2]))


@memory.command("list")
def list_engrams(
    limit: Limit = 20,
    cursor: Annotated[str | None, typer.Option(help="Goes on where a page ended")] = None,
    as_json: AsJson = False,
) -> None:
    """Your engrams, newest first."""
    found = with_api(lambda api: api.get("/memory/engrams", limit=limit, cursor=cursor))
    if as_json:
        print_json(found)
        return
    table = Table("when", "by", "said", "rating", _ids(found["engrams"]))
    for engram in rows(found, "engrams"):
        by = engram["respondent_id"] or engram["kind"]
        table.add_row(ago(engram["time"]), by, _short(_said(engram)), _rating(engram), printable(engram["id"]))
    console.print(table if found["engrams"] else "nothing is remembered")
    if found["cursor"]:
        console.print(f"{len(found['engrams'])} of {found['total']}; next: --cursor '{found['cursor']}'")


@memory.command("show")
def show(engram_id: Annotated[str, typer.Argument(help="Its id in the list")]) -> None:
    """One engram with everything that is known of it."""
    print_json(with_api(lambda api: api.get(f"/memory/engrams/{quote(engram_id, safe='')}")))


@memory.command("delete")
def delete(
    engram_ids: Annotated[list[str] | None, typer.Argument(help="Their ids in the list")] = None,
    everything: Annotated[bool, typer.Option("--everything", help="Your whole memory, topics too")] = False,
    export: Annotated[Path | None, typer.Option(help="With --everything: a file to export it to first")] = None,
) -> None:
    """Forgets engrams for good."""
    if everything == bool(engram_ids):
        raise typer.BadParameter("give ids, or --everything")
    if everything:
        if export is not None:
            save_lines("/memory/export", export)
        elif not typer.confirm("Forget your whole memory, without an export?"):
            raise typer.Exit(1)
        count = with_api(lambda api: api.delete("/memory?everything=true"))["deleted"]
        console.print(f"forgot {counted(count, 'engram')}")
        return
    for engram_id in engram_ids or ():
        path = f"/memory/engrams/{quote(engram_id, safe='')}"
        with_api(lambda api, path=path: api.delete(path))  # type: ignore[misc]
        console.print(f"forgot {engram_id}")


@memory.command("export")
def export_memory(
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A file; default: standard output")] = None,
) -> None:
    """All your engrams and topics: one JSON object a line."""
    save_lines("/memory/export", out)


@memory.command("import")
def import_memory(path: Annotated[Path, typer.Argument(help="JSON lines, as the export writes them")]) -> None:
    """Takes in engrams and topics; the same line twice is one engram."""

    async def parts() -> AsyncIterator[bytes]:
        with path.open("rb") as file:
            while part := file.read(65_536):
                yield part

    async def send(api: Api) -> Any:
        headers = {"content-type": "application/x-ndjson"}
        return await api.call("POST", "/memory/import", content=parts(), headers=headers, timeout=_IMPORT_SECONDS)

    if not path.is_file():
        raise ApiError("no_file", f"there is no file {path}")
    done = with_api(send)
    for error in sorted(done["errors"], key=lambda error: int(error["line"])):
        console.print(f"line {error['line']}: {printable(error['message'])}", style="yellow")
    console.print(f"took in {done['imported']}, refused {done['failed']}")
    if done["failed"]:
        raise typer.Exit(1)


@topics.command("list")
def list_topics(as_json: AsJson = False) -> None:
    """All of them."""
    found = rows(with_api(lambda api: api.get("/memory/topics")), "topics")
    if as_json:
        print(json.dumps(found, ensure_ascii=False, indent=2))
        return
    table = Table("topic", "content", "saved")
    for topic in found:
        table.add_row(printable(topic["topic"]), printable(topic["content"]), ago(topic["time"]))
    console.print(table if found else "no topics")


@topics.command("save")
def save_topic(
    topic: Annotated[str, typer.Argument(help="Begins with user., project. or constraint.")],
    content: Annotated[str, typer.Argument(help="One sentence")],
) -> None:
    """Keeps something under a name, in place of what was there."""
    with_api(lambda api: api.call("PUT", f"/memory/topics/{quote(topic, safe='')}", json={"content": content}))
    console.print(f"saved {topic}")


@topics.command("delete")
def delete_topic(names: Annotated[list[str], typer.Argument(help="Their names")]) -> None:
    """Forgets topics for good."""
    for topic in names:
        with_api(lambda api, topic=topic: api.delete(f"/memory/topics/{quote(topic, safe='')}"))  # type: ignore[misc]
        console.print(f"forgot {topic}")
