"""`local2 import`: conversations and memories out of other products' exports."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from services.cli.api import Api, ApiError
from services.cli.commands.operate import with_api
from services.cli.imports import chatgpt, letta, openwebui
from services.cli.imports.files import documents
from services.cli.imports.talks import Found, Note, Talk
from services.cli.terminal import console
from services.cli.words import counted, printable

app = typer.Typer(no_args_is_help=True)

# What one request carries; a memory line must stay under the API's limit for lines.
_PART_BYTES, _PART_SESSIONS, _PART_TURNS = 2_000_000, 100, 2_000
_LINES = 200
_LINE_CHARS, _LINE_BYTES = 100_000, 190_000
# Every line is embedded while the API waits.
_SECONDS = 900.0

File = Annotated[Path, typer.Argument(help="The export: its file, a folder, or the archive that it came in")]
Write = Annotated[bool, typer.Option("--write", "--yes", help="Takes it in; without it, nothing is changed")]
Memories = Annotated[
    bool, typer.Option("--memories/--no-memories", help="Whether the conversations are remembered, too")
]


@app.command("openwebui")
def from_openwebui(file: File, write: Write = False, memories: Memories = True) -> None:
    """Open WebUI: Settings → Data Controls → Export Chats. Also the JSON of one chat, or of GET /api/v1/memories/."""
    _bring_in(_found(file, openwebui.NAMES, openwebui.read), write, memories)


@app.command("chatgpt")
def from_chatgpt(file: File, write: Write = False, memories: Memories = True) -> None:
    """ChatGPT: Settings → Data controls → Export data. The archive, or the conversations.json in it."""
    _bring_in(_found(file, chatgpt.NAMES, chatgpt.read), write, memories)


@app.command("letta")
def from_letta(file: File, write: Write = False, memories: Memories = True) -> None:
    """Letta: an agent file (.af)."""
    _bring_in(_found(file, letta.NAMES, letta.read), write, memories)


def _found(path: Path, names: Sequence[str], read: Callable[[str, Any, Found], None]) -> Found:
    """All that an export holds, before anything is written. Raises FileTrouble."""
    found = Found()
    for name, document in documents(path, names):
        read(name, document, found)
    return found


def _bring_in(found: Found, write: bool, memories: bool) -> None:
    talks, turns = counted(len(found.talks), "conversation"), counted(found.turns, "turn")
    _say(f"{talks} with {turns}, {counted(len(found.notes), 'memory', 'memories')}")
    for what, count in sorted(found.left_out.items()):
        if count:
            _say(f"  left out: {what}: {count:,}")
    if not write:
        _say("nothing was changed; --write takes it in")
        return
    states, added, lines = with_api(lambda api: _write(api, found, memories))
    _say(f"sessions: {states['added']} added or longer ({counted(added, 'turn')}), {states['there']} already there")
    if states["different"]:
        _say(f"  left as they are, because they differ from what was imported before: {states['different']}")
    _say(f"memories: {lines['new']} added, {lines['there']} already there")


async def _write(api: Api, found: Found, memories: bool) -> tuple[Counter[str], int, Counter[str]]:
    """(what became of the sessions, turns added, what became of memories). Nothing is there twice."""
    states: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    added = 0
    for part in _parts(found.talks):
        answer = await api.post("/sessions/import", {"sessions": [_session(talk) for talk in part]}, _SECONDS)
        told = answer["sessions"]
        states.update(one["state"] for one in told)
        added += sum(one["turns_added"] for one in told)
        for talk, one in zip(part, told, strict=True):
            if memories and one["state"] != "different":
                lines += await _remember(api, list(_remembered(talk, one["session_id"])))
    return states, added, lines + await _remember(api, [_noted(note) for note in found.notes])


def _session(talk: Talk) -> dict[str, Any]:
    turns = [{"query": turn.query, "answer": turn.answer, "time": turn.time} for turn in talk.turns]
    return {"session_id": talk.name, "title": talk.title, "turns": turns}


def _remembered(talk: Talk, session_id: str) -> Iterator[dict[str, Any]]:
    for turn in talk.turns:
        said = {"query": _cut(turn.query), "answer": _cut(turn.answer)}
        yield {**said, "session_id": session_id, "time": turn.time}


def _noted(note: Note) -> dict[str, Any]:
    return {"content": _cut(note.content), **({} if note.time is None else {"time": note.time})}


def _cut(text: str) -> str:
    """As much as memory keeps of a text."""
    return text[:_LINE_CHARS].encode()[:_LINE_BYTES].decode(errors="ignore")


def _parts(talks: Sequence[Talk]) -> Iterator[list[Talk]]:
    """Conversations, as many as go into one request; a very long one is several."""
    part: list[Talk] = []
    size = turns = 0
    for talk in itertools.chain.from_iterable(one.pieces(_PART_BYTES, _PART_TURNS) for one in talks):
        if part and (size + talk.size > _PART_BYTES or turns + len(talk.turns) > _PART_TURNS):
            yield part
            part, size, turns = [], 0, 0
        part.append(talk)
        size += talk.size
        turns += len(talk.turns)
        if len(part) == _PART_SESSIONS:
            yield part
            part, size, turns = [], 0, 0
    if part:
        yield part


async def _remember(api: Api, lines: Sequence[dict[str, Any]]) -> Counter[str]:
    taken: Counter[str] = Counter()
    for at in range(0, len(lines), _LINES):
        content = b"\n".join(map(orjson.dumps, lines[at : at + _LINES]))
        headers = {"content-type": "application/x-ndjson"}
        answer = await api.call("POST", "/memory/import", content=content, headers=headers, timeout=_SECONDS)
        if answer["failed"]:
            raise ApiError(
                "import", f"memory refused {counted(answer['failed'], 'line')}: {answer['errors'][0]['message']}"
            )
        taken += Counter(new=answer["imported"] - answer["there"], there=answer["there"])
    return taken


def _say(text: str) -> None:
    console.print(printable(text))
