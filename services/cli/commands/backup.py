"""`local2 backup` and `local2 restore`: everything that the stack keeps, as one file."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import httpx
import orjson
import typer

from services.cli.api import Api, ApiError, unreachable
from services.cli.local_files import FileTrouble, whole_file
from services.cli.settings import ClientSettings
from services.cli.terminal import Progress, console, errors
from services.cli.words import counted, typed
from shared.participant.backup import MEDIA_TYPE, Summary, examine

_PIECE = 256 * 1024
# A gateway reads and checks the whole file before its first word; a page of a backup may take a while too.
_PATIENCE = httpx.Timeout(1_800.0, connect=5.0)

Without = Annotated[list[str] | None, typer.Option("--without", help="Leave this section out (memories, keys, …)")]


# ── backup ───────────────────────────────────────────────────────────────────────────────────────────────────────


def backup(
    file: Annotated[Path, typer.Argument(help="The file to write, for example local2-2026-06-01.backup")],
    without: Without = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there")] = False,
) -> None:
    """Writes everything that the stack keeps into one file. Queries that are being answered are not in it."""
    if file.exists() and not force:
        raise FileTrouble(f"{file} is there already: choose another name, or replace it with --force")

    async def work() -> Summary:
        async with Api(ClientSettings.load("cli")) as api:
            return await _save(api, file, without or ())

    summary = asyncio.run(work())
    _say(f"{file}: {_counted(summary.counts)}, {file.stat().st_size:,} bytes, complete")
    for name in summary.header.without:
        errors.print(f"{name} are NOT in this file (--without {name})", style="yellow")
    for note in summary.header.notes:
        errors.print(f"note: {note}", style="yellow")


async def _save(api: Api, file: Path, without: Sequence[str]) -> Summary:
    """The backup under its name only when it is whole; what was there before stays until then."""
    with whole_file(file) as out:
        await _download(api, out, without)
        out.flush()
        os.fsync(out.fileno())
        out.seek(0)
        return await asyncio.to_thread(examine, out)


async def _download(api: Api, out: BinaryIO, without: Sequence[str]) -> None:
    try:
        async with api.http.stream("GET", "/backup", params={"without": list(without)}, timeout=_PATIENCE) as answer:
            if not answer.is_success:
                await answer.aread()
                raise api.refusal(answer)
            size = 0
            async with Progress(console, errors) as progress:
                async for piece in answer.aiter_raw(_PIECE):
                    await asyncio.to_thread(out.write, piece)
                    size += len(piece)
                    progress(f"saving: {size:,} bytes", "saving")
    except httpx.HTTPError as exc:
        raise unreachable(api.base_url, exc) from exc


# ── restore ──────────────────────────────────────────────────────────────────────────────────────────────────────


def restore(
    file: Annotated[Path, typer.Argument(help="A file that `local2 backup` wrote")],
    merge: Annotated[bool, typer.Option("--merge", help="Keep what is there, add what is missing")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Remove what is there first")] = False,
    without: Without = None,
    check: Annotated[bool, typer.Option("--check", help="Only look whether the file is whole; needs no stack")] = False,
) -> None:
    """Puts a backup back, into an empty stack unless said otherwise. After an interruption, run it again."""
    if merge and replace:
        raise typer.BadParameter("either --merge or --replace", param_hint="--merge")
    summary = _examined(file)
    if check:
        _say(f"{file}: {_counted(summary.counts)}, made by LoCAL2 {summary.header.product}, complete")
        return
    mode = "merge" if merge else "replace" if replace else "empty"

    async def work() -> dict[str, Any]:
        async with Api(ClientSettings.load("cli")) as api:
            return await _send(api, file, file.stat().st_size, mode, without or ())

    told = asyncio.run(work())
    for name, tally in told.items():
        counts = [f"{tally[what]} {word}" for what, word in _WORDS if tally[what] or what == "written"]
        _say(f"{name}: {', '.join(counts)}")
        for reason in tally["reasons"]:
            errors.print(f"  left out: {reason}", style="yellow")
    for name in summary.header.without:
        errors.print(f"{name}: not in this file", style="yellow")


_WORDS = (("written", "restored"), ("kept", "already there"), ("skipped", "left out"))


def _examined(file: Path) -> Summary:
    try:
        with file.open("rb") as content:
            return examine(content)
    except OSError as exc:
        raise FileTrouble(f"{file} cannot be read: {exc.strerror or exc}") from exc


async def _send(api: Api, file: Path, size: int, mode: str, without: Sequence[str]) -> dict[str, Any]:
    """What became of each section. Raises ApiError."""
    last: dict[str, Any] = {}
    params = {"mode": mode, "without": list(without)}
    headers = {"content-type": MEDIA_TYPE, "content-length": str(size)}
    sent = api.http.stream("POST", "/restore", params=params, content=_pieces(file), headers=headers, timeout=_PATIENCE)
    try:
        async with Progress(console, errors) as progress:
            progress("the gateway checks the file")
            async with sent as answer:
                if not answer.is_success:
                    await answer.aread()
                    raise api.refusal(answer)
                async for line in answer.aiter_lines():
                    last = orjson.loads(line)
                    if "section" in last:
                        progress(*_step(last))
    except httpx.ConnectError as exc:
        raise unreachable(api.base_url, exc) from exc
    except (httpx.HTTPError, orjson.JSONDecodeError) as exc:
        raise _broken(exc) from exc
    if "error" in last:
        raise ApiError(last["error"]["code"], last["error"]["message"])
    if "restored" not in last:
        raise _broken(None)
    restored: dict[str, Any] = last["restored"]
    return restored


def _step(line: dict[str, Any]) -> tuple[str, str]:
    """Return a sentence for a line of a section, and the name of its step."""
    section = line["section"]
    if line.get("removed") is not None:
        return f"{section}: {line['removed']:,} removed", f"{section}: removing"
    # The last lines say how many of these were restored, and how many were there already.
    return f"{section}: {line['done']:,} of {line['of']:,} done", f"{section}: restoring"


def _broken(exc: Exception | None) -> ApiError:
    said = f" ({exc})" if exc is not None and str(exc) else ""
    return ApiError(
        "interrupted",
        f"the connection ended before the restore was complete{said}: when the stack is up again, run the same "
        f"command, it goes on where it stopped ({typed('doctor')} says what is wrong)",
    )


async def _pieces(file: Path) -> AsyncIterator[bytes]:
    with file.open("rb") as content:
        while piece := await asyncio.to_thread(content.read, _PIECE):
            yield piece


# The nouns for the records of a section, singular and plural.
_THINGS = {
    "settings": ("participant's settings", "participants' settings"),
    "sessions": ("session", "sessions"),
    "memories": ("memory", "memories"),
    "files": ("file", "files"),
    "preferences": ("preference", "preferences"),
    "knowledge": ("fact", "facts"),
    "keys": ("key", "keys"),
}


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(counted(number, *_THINGS.get(name, (name, name))) for name, number in counts.items())


def _say(text: str) -> None:
    console.print(text)
