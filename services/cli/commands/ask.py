"""`ask` and `chat`: a query, its stream in the terminal, and Ctrl-C as its cancel."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.table import Table
from rich.text import Text

from services.cli.api import Api, ApiError, rows
from services.cli.commands.answer_view import AnswerView
from services.cli.local_files import UnreadableFile, send
from services.cli.settings import ClientSettings
from services.cli.sse import QueryStream
from services.cli.terminal import Terminal
from services.cli.words import ago, counted, printable, reasons, typed
from shared.errors import Local2Error
from shared.zones import machine_zone

INTERRUPTED = 130
# Seconds after which it is said why nothing comes, where the stack knows.
QUIET = 5.0
HELP = "/new starts another conversation · /sessions lists them · /committee [names] [rounds] · /quit leaves"
# Names of UTC, the zone of machines without a configured one.
_UTC = frozenset({"UTC", "Etc/UTC", "UCT", "Etc/UCT", "Universal", "Etc/Universal", "Zulu", "Etc/Zulu",
                  "GMT", "Etc/GMT", "Greenwich", "Etc/Greenwich"})  # fmt: skip
# In the place of names: whoever the generator's settings name.
ACTIVE = "active"


@dataclass(frozen=True, slots=True)
class Committee:
    """Who deliberates before the answer, None: as the settings say; and for how many rounds, None likewise."""

    personas: list[str] | None = None
    rounds: int | None = None

    @staticmethod
    def parse(names: str, rounds: int | None = None) -> Committee:
        """`names`: separated by commas, or `active`. Raises Local2Error."""
        listed = [name.strip() for name in names.split(",") if name.strip()]
        if not listed:
            raise Local2Error(f"name who is to deliberate, separated by commas, or say {ACTIVE}")
        if rounds is not None and not 1 <= rounds <= 10:
            raise Local2Error(f"a committee has 1 to 10 rounds, not {rounds}")
        return Committee(None if listed == [ACTIVE] else listed, rounds)

    def fields(self) -> dict[str, Any]:
        """Of a query's body."""
        named = {} if self.personas is None else {"personas": self.personas}
        return {"mode": "committee", **named, **({} if self.rounds is None else {"rounds": self.rounds})}

    def __str__(self) -> str:
        who = ", ".join(self.personas) if self.personas else "whoever the settings name"
        return f"committee: {who}" + (f", {counted(self.rounds, 'round')}" if self.rounds else "")


async def ask(
    api: Api,
    query: str,
    *,
    session: str | None,
    as_json: bool,
    thinking: bool,
    console: Terminal,
    errors: Terminal,
    attached: Sequence[Path] = (),
    committee: Committee | None = None,
) -> int:
    """Asks once; the exit code. With `as_json` the only output is one JSON object. `attached`: files of this machine
    that belong to the question. `committee`: who deliberates first."""
    view = AnswerView(None if as_json else console, thinking=thinking)

    def waits(why: Sequence[str]) -> None:
        said = printable("; ".join(why))
        errors.print(f"local2: no answer yet ({said}); the question waits. What to do: {typed('doctor')}")

    stream = QueryStream(api, on_resume=lambda what: view.note(f"· {what}"))
    body: dict[str, Any] = {"query": query, **({"session_id": session} if session else {}), **_time_zone()}
    if committee is not None:
        body.update(committee.fields())
    try:
        if attached:
            body["attachments"] = [(await send(api, path))["id"] for path in attached]
        left = await _watch(api, stream, view, body, waits)
    except ApiError as exc:
        return _failed(exc.code, str(exc), stream, as_json, errors)
    except UnreadableFile as exc:
        return _failed("unreadable_file", str(exc), stream, as_json, errors)
    if left:
        return INTERRUPTED
    outcome = view.outcome
    if outcome is None or outcome.type == "cancelled":
        _failed("cancelled", "the query was cancelled", stream, as_json, errors)
        return INTERRUPTED
    if outcome.type == "failed":
        code, message = outcome.data.get("code"), outcome.data.get("message")
        return _failed(str(code or "failed"), str(message or "the query failed"), stream, as_json, errors)
    if as_json:
        _emit({"query_id": stream.query_id, "session_id": stream.session_id, **outcome.data})
    return 0


def _time_zone() -> dict[str, str]:
    """Return the field of a query's body for this machine's zone.

    Empty for UTC, the zone of most containers: the zone of the key or of the deployment is then more likely right.
    """
    zone = machine_zone()
    return {"time_zone": zone} if zone and zone not in _UTC else {}


async def _watch(
    api: Api, stream: QueryStream, view: AnswerView, body: dict[str, Any], waits: Callable[[Sequence[str]], None]
) -> bool:
    """Shows the stream to its end. True when the user left without waiting for it.

    waits: is told what is missing when nothing has come for a while.
    """
    interrupts = asyncio.Event()
    leaving = asyncio.Event()
    cancels: list[asyncio.Task[None]] = []

    async def cancel() -> None:
        try:
            await api.post(f"/queries/{stream.query_id}/cancel")
        except ApiError as exc:
            view.note(f"· the cancel failed: {exc}")

    def interrupt() -> None:
        if interrupts.is_set() or stream.query_id is None:
            leaving.set()
            return
        interrupts.set()
        view.note("· cancelling; Ctrl-C again leaves without waiting")
        cancels.append(asyncio.create_task(cancel()))

    begun = asyncio.Event()

    async def show() -> None:
        async with aclosing(stream.ask(body)) as events:
            async for event in events:
                begun.set()
                view.show(event)

    async def explain() -> None:
        await asyncio.sleep(QUIET)
        with suppress(httpx.HTTPError):
            if not begun.is_set() and (why := reasons(await api.http.get("/ready"))) and not begun.is_set():
                waits(why)

    with _on_interrupt(interrupt):
        showing = asyncio.create_task(show())
        waiting = asyncio.create_task(leaving.wait())
        cancels.append(asyncio.create_task(explain()))
        try:
            await asyncio.wait({showing, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if not showing.done():
                return True
            await showing
            return False
        finally:
            for task in (showing, waiting, *cancels):
                task.cancel()
            await asyncio.gather(showing, waiting, *cancels, return_exceptions=True)


@contextmanager
def _on_interrupt(handler: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, handler)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _failed(code: str, message: str, stream: QueryStream, as_json: bool, errors: Terminal) -> int:
    if as_json:
        _emit({"query_id": stream.query_id, "session_id": stream.session_id,
               "error": {"code": code, "message": message}})  # fmt: skip
    else:
        errors.print(f"local2: {printable(message)}", style="red")
    return 1


def _emit(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")


def chat(
    settings: ClientSettings,
    *,
    session: str | None,
    thinking: bool,
    console: Terminal,
    errors: Terminal,
    committee: Committee | None = None,
) -> int:
    """A conversation until /quit or the end of input. `committee`: who deliberates before each answer.

    Between two questions no event loop runs: its handling of Ctrl-C would not end the prompt.
    """
    session = session or new_session()
    console.print(f"session {session} · {HELP}", style="dim")

    async def question(text: str) -> None:
        async with Api(settings) as api:
            await ask(
                api, text, session=session, as_json=False, thinking=thinking, console=console, errors=errors,
                committee=committee,
            )  # fmt: skip

    async def got(path: str) -> Any:
        """None when it was refused, which is said."""
        async with Api(settings) as api:
            try:
                return await api.get(path)
            except ApiError as exc:
                errors.print(f"local2: {exc}", style="red")
                return None

    def say(text: str) -> None:
        console.print(Text(printable(text), style="dim"))

    while True:
        try:
            line = console.input(Text("you: ", "bold")).strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return 0
        match line.split():
            case []:
                continue
            case ["/quit" | "/exit"]:
                return 0
            case ["/new"]:
                session = new_session()
                console.print(f"session {session}", style="dim")
            case ["/sessions"]:
                if (found := asyncio.run(got("/sessions"))) is not None:
                    console.print(sessions_table(rows(found, "sessions"), current=session))
            case ["/committee"]:
                if (found := asyncio.run(got("/personas"))) is not None:
                    say(f"there are {', '.join(found['personas'])}; {ACTIVE}: {', '.join(found['active_personas'])}")
                say(f"{committee or 'no committee'} · /committee NAMES [ROUNDS], separated by commas · /committee off")
            case ["/committee", "off"]:
                committee = None
                say("no committee")
            case ["/committee", *_]:
                try:
                    committee = _sitting(line.removeprefix("/committee").strip())
                    say(str(committee))
                except Local2Error as exc:
                    errors.print(f"local2: {exc}", style="red")
            case [command, *_] if command.startswith("/"):
                console.print(HELP, style="dim")
            case _:
                asyncio.run(question(line))


def _sitting(text: str) -> Committee:
    """What follows /committee: names, which may have spaces, then perhaps a number of rounds. Raises Local2Error."""
    names, _, last = text.rpartition(" ")
    return Committee.parse(names, int(last)) if names and last.isdigit() else Committee.parse(text)


def new_session() -> str:
    return str(uuid.uuid4())


def sessions_table(sessions: list[dict[str, Any]], current: str | None = None) -> Table:
    table = Table()
    # An id that is cut off is of no use. The question's column alone gives way (a column that may not wrap keeps its
    # width); where even that is not enough, the id is folded.
    table.add_column("session", no_wrap=True)
    table.add_column("first question")
    table.add_column("last used", no_wrap=True)
    for row in sessions:
        mark = " *" if row.get("session_id") == current else ""
        table.add_row(
            Text(f"{row.get('session_id')}{mark}", no_wrap=False, overflow="fold"),
            Text(printable(str(row.get("title", ""))), no_wrap=True, overflow="ellipsis"),
            ago(row.get("updated")),
        )
    return table
