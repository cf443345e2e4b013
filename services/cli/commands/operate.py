"""The commands for operators: dead letters, keys, sessions, export, cancel."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.table import Table

from services.cli.api import Api, ApiError, rows, unreachable
from services.cli.commands.ask import sessions_table
from services.cli.local_files import whole_file
from services.cli.settings import ClientSettings
from services.cli.terminal import console, errors
from services.cli.words import ago, counted, printable

# The most turns that the gateway gives at once.
_PAGE = 200
_EXPORT_SECONDS = 3_600.0

AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of a table")]
Limit = Annotated[int, typer.Option("--limit", "-n", min=1, max=200, help="How many at most")]

dead_letters = typer.Typer(no_args_is_help=True)
keys = typer.Typer(no_args_is_help=True)
sessions = typer.Typer(no_args_is_help=True)
export = typer.Typer(no_args_is_help=True)


def with_api(work: Callable[[Api], Coroutine[Any, Any, Any]]) -> Any:
    """Runs a piece of work with a client of the API."""

    async def opened() -> Any:
        async with Api(ClientSettings.load("cli")) as api:
            return await work(api)

    return asyncio.run(opened())


def save_lines(path: str, out: Path | None) -> None:
    """The lines of an export as they come: to a file, which is there whole or not at all, or to standard output."""

    async def read(api: Api) -> None:
        try:
            await copy(api)
        except httpx.HTTPError as exc:
            raise unreachable(api.base_url, exc) from exc

    async def copy(api: Api) -> None:
        async with api.http.stream("GET", path, timeout=_EXPORT_SECONDS) as response:
            if not response.is_success:
                await response.aread()
                raise api.refusal(response)
            if out is None:
                async for text in response.aiter_text():
                    print(text, end="")
                return
            count = 0
            with whole_file(out) as file:
                async for part in response.aiter_bytes():
                    file.write(part)
                    count += part.count(b"\n")
            errors.print(f"{counted(count, 'row')} in {out}")

    with_api(read)


def print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False, indent=2))


@dead_letters.command("list")
def list_dead_letters(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=500, help="How many at most")] = 50,
    as_json: AsJson = False,
) -> None:
    """The oldest dead letters."""
    answer = with_api(lambda api: api.get("/dead-letters", limit=limit))
    found = rows(answer, "dead_letters")
    if as_json:
        print_json(found)
        return
    table = Table("id", "stream", "group", "deliveries", "reason")
    for row in found:
        reason = row.get("reason") or row.get("malformed", "")
        shown = (row["id"], row.get("stream", ""), row.get("group", ""), row.get("deliveries", ""), reason)
        table.add_row(*(printable(str(value)) for value in shown))
    console.print(table if found else "no dead letters")
    if len(found) < answer["total"]:
        console.print(f"{len(found)} of {answer['total']}")


@dead_letters.command("show")
def show_dead_letter(letter_id: Annotated[str, typer.Argument(help="Its id in the list")]) -> None:
    """One dead letter with its original fields."""
    found = rows(with_api(lambda api: api.get("/dead-letters", limit=1, cursor=before(letter_id))), "dead_letters")
    if not found or found[0]["id"] != letter_id:
        raise ApiError("not_found", f"there is no dead letter {letter_id}")
    print_json(found[0])


def before(entry_id: str) -> str:
    """An id just below a stream entry's, so that a page after it begins with that entry."""
    high, _, low = entry_id.partition("-")
    if not (high.isdigit() and low.isdigit()):
        raise ApiError("bad_id", f"{entry_id} is not an id of the list, such as 1700000000000-0")
    return f"{high}-{int(low) - 1}" if int(low) else f"{max(0, int(high) - 1)}-{10**18 - 1}"


@dead_letters.command("replay")
def replay_dead_letter(letter_ids: Annotated[list[str], typer.Argument(help="Their ids in the list")]) -> None:
    """Puts dead letters back into the streams they came from."""
    for letter_id in letter_ids:
        with_api(lambda api, letter_id=letter_id: api.post(f"/dead-letters/{letter_id}/replay"))  # type: ignore[misc]
        console.print(f"replayed {letter_id}")


@dead_letters.command("drop")
def drop_dead_letter(letter_ids: Annotated[list[str], typer.Argument(help="Their ids in the list")]) -> None:
    """Removes dead letters for good."""
    for letter_id in letter_ids:
        with_api(lambda api, letter_id=letter_id: api.delete(f"/dead-letters/{letter_id}"))  # type: ignore[misc]
        console.print(f"dropped {letter_id}")


@keys.command("add")
def add_key(
    name: Annotated[str, typer.Argument(help="What it is for")],
    user: Annotated[str, typer.Option(help="Whose queries and sessions it opens; default: the name")] = "",
    admin: Annotated[bool, typer.Option("--admin", help="May also operate the stack")] = False,
    trusted: Annotated[
        bool,
        typer.Option("--trusted", help="For a program of several people: it may say whom and which chat it asks for"),
    ] = False,
    time_zone: Annotated[
        str, typer.Option(help="IANA zone of its questions that name none, for example Europe/Berlin")
    ] = "",
) -> None:
    """Makes a key and shows it once. Each has a name of its own."""
    body = {"name": name, "user_id": user or name, "role": "admin" if admin else "user", "trusted": trusted}
    if time_zone:
        body["time_zone"] = time_zone

    async def work(api: Api) -> Any:
        # the API lets programs name keys as they like; people tell them apart by their names
        same = [row for row in rows(await api.get("/keys"), "keys") if row["name"] == name]
        if same:
            raise ApiError(
                "name_taken",
                f"there is a key {name} already (id {same[0]['id']}), and it is not shown again: choose another name "
                f"(with --user {same[0]['user_id']} it opens the same conversations), or revoke that one first: "
                f"local2 keys revoke {same[0]['id']}",
            )
        return await api.post("/keys", body)

    made = with_api(work)
    console.print(f"id {made['id']}, user {made['user_id']}; the key is shown only now:")
    print(made["key"])


@keys.command("link")
def link() -> None:
    """A link that opens the console as you, once, within a minute."""
    base = ClientSettings.load("cli").base_url
    print(base + with_api(lambda api: api.post("/keys/link"))["path"])


@keys.command("list")
def list_keys(as_json: AsJson = False) -> None:
    """All keys, without their secrets."""
    found = rows(with_api(lambda api: api.get("/keys")), "keys")
    if as_json:
        print_json(found)
        return
    table = Table("id", "name", "user", "role", "trusted", "time zone", "made")
    for row in found:
        words = [printable(str(row.get(k, ""))) for k in ("id", "name", "user_id", "role")]
        zone = printable(row.get("time_zone") or "")
        table.add_row(*words, "yes" if row.get("trusted") else "", zone, ago(row["created"]))
    console.print(table)


@keys.command("zone")
def set_zone(
    key_id: Annotated[str, typer.Argument(help="Its id in the list")],
    zone: Annotated[str, typer.Argument(help="IANA name, for example Europe/Berlin; left out: the deployment's")] = "",
) -> None:
    """Sets the time zone of a key's questions that name none."""
    changed = with_api(lambda api: api.call("PATCH", f"/keys/{key_id}", json={"time_zone": zone or None}))
    console.print(f"{printable(changed['name'])}: {changed['time_zone'] or 'the zone of the deployment'}")


@keys.command("revoke")
def revoke_key(key_id: Annotated[str, typer.Argument(help="Its id in the list")]) -> None:
    """Makes a key useless."""
    with_api(lambda api: api.delete(f"/keys/{key_id}"))
    console.print(f"revoked {key_id}")


@sessions.command("list")
def list_sessions(limit: Limit = 50, as_json: AsJson = False) -> None:
    """Your conversations, the one used last first."""
    found = rows(with_api(lambda api: api.get("/sessions", limit=limit)), "sessions")
    if as_json:
        print_json(found)
    else:
        console.print(sessions_table(found) if found else "no sessions")


async def whole_session(api: Api, session_id: str, *, messages: bool = False) -> dict[str, Any]:
    """Return a session with all its turns, oldest first. `messages`: with those that the model reads."""
    found: dict[str, Any] = await api.get(f"/sessions/{session_id}", limit=_PAGE, messages=messages)
    page = found
    while page["earlier"] is not None:
        page = await api.get(f"/sessions/{session_id}", limit=_PAGE, before=page["earlier"], messages=False)
        found["turns"] = [*rows(page, "turns"), *found["turns"]]
    return {**found, "earlier": None}


@sessions.command("show")
def show_session(
    session_id: str,
    everything: Annotated[bool, typer.Option("--all", help="All turns, not just the newest 50")] = False,
    as_json: AsJson = False,
) -> None:
    """The turns of a conversation."""
    found = with_api(
        lambda api: (
            whole_session(api, session_id, messages=as_json)
            if everything
            else api.get(f"/sessions/{session_id}", messages=as_json)
        )
    )
    if as_json:
        print_json(found)
        return
    turns = rows(found, "turns")
    if earlier := found["total"] - len(turns):
        console.print(f"{earlier} earlier turns: --all shows them", style="dim")
        console.print()
    for turn in turns:
        console.print(printable(turn["query"]), style="bold")
        console.print(printable(turn["answer"]))
        console.print()


@sessions.command("delete")
def delete_session(session_id: str) -> None:
    """Removes a conversation and cancels what is unfinished in it."""
    with_api(lambda api: api.delete(f"/sessions/{session_id}"))
    console.print(f"deleted {session_id}")


@export.command("sessions")
def export_sessions(
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A file; default: standard output")] = None,
) -> None:
    """Export your conversations, one JSON object a line. Each has session_id, title and turns."""

    async def read(api: Api) -> list[str]:
        lines, offset, page = [], 0, 100
        while True:
            found = rows(await api.get("/sessions", limit=page, offset=offset), "sessions")
            for info in found:
                whole = await whole_session(api, info["session_id"])
                lines.append(json.dumps({**info, "turns": whole["turns"]}, ensure_ascii=False))
            if len(found) < page:
                return lines
            offset += page

    text = "".join(f"{line}\n" for line in with_api(read))
    if out is None:
        print(text, end="")
    else:
        out.write_text(text, encoding="utf-8")
