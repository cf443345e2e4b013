"""How well a running stack finds memories: `python tests/eval/memory/stack.py FILE` asks its HTTP API.

Each user of the data set becomes a new user of the stack, with a key. Memories and keys are removed at the end, also
after a failure. It needs an administrator's key. --json prints one object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

from pydantic import SecretStr

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from eval.memory.data_set import DEPTH, Conversation, DataSet, Measures, Turn, load, report

from services.cli.api import Api, ApiError, rows
from services.cli.settings import ClientSettings
from services.cli.words import counted
from shared.errors import Local2Error

# Turns of one import: the gateway bounds a request, and its answer waits for the vectors.
IMPORT_LINES = 50
IMPORT_TIMEOUT = 120.0
# Questions asked at the same time.
AT_ONCE = 4


class EvalRefused(Local2Error):
    """The stack cannot be measured without touching somebody's memory."""


async def measure(
    settings: ClientSettings, data: DataSet, progress: Callable[[str], None]
) -> tuple[Measures, list[float]]:
    """What the stack finds, and how long each search took. Raises EvalRefused, ApiError."""
    measures, seconds = Measures(), list[float]()
    limit = asyncio.Semaphore(AT_ONCE)
    async with Api(settings) as admin, AsyncExitStack() as stack:
        await _require_keys(settings)
        for user in data.users():
            api = await stack.enter_async_context(_new_user(settings, admin))
            talks = [talk for talk in data.conversations if talk.user == user]
            progress(f"{user}: importing {counted(sum(len(talk.turns) for talk in talks), 'turn')}")
            places = await _import(api, talks)

            async def ask(query: str, api: Api = api) -> tuple[list[dict[str, Any]], float]:
                async with limit:
                    began = time.perf_counter()
                    found = rows(await api.get("/memory", query=query, limit=DEPTH), "hits")
                    return found, time.perf_counter() - began

            questions = [question for question in data.questions if question.user == user]
            progress(f"{user}: {counted(len(questions), 'question')}")
            for question, (hits, took) in zip(
                questions, await asyncio.gather(*(ask(one.query) for one in questions)), strict=True
            ):
                measures.add(question, [places.get((hit["session_id"], hit["time"]), "") for hit in hits])
                seconds.append(took)
    return measures, seconds


async def _require_keys(settings: ClientSettings) -> None:
    """With authentication off every key is the same user, whose memory this must not touch."""
    async with Api(_with_key(settings, uuid4().hex)) as stranger:
        try:
            await stranger.get("/memory/engrams", limit=1)
        except ApiError as exc:
            if exc.status == 401:
                return
            raise
    raise EvalRefused(
        "this stack does not ask for keys, so it has no users to keep apart; start it with authentication"
    )


def _with_key(settings: ClientSettings, key: str) -> ClientSettings:
    return settings.model_copy(update={"api_key": SecretStr(key)})


@asynccontextmanager
async def _new_user(settings: ClientSettings, admin: Api) -> AsyncIterator[Api]:
    """A client of a user that did not exist; the user's memory and key are removed at the end."""
    name = f"eval-{uuid4().hex[:12]}"
    made = await admin.post("/keys", {"name": name, "user_id": name, "role": "user"})
    try:
        async with Api(_with_key(settings, made["key"]), timeout=60.0) as api:
            try:
                yield api
            finally:
                await api.delete("/memory?everything=true")
    finally:
        with suppress(ApiError):
            await admin.delete(f"/keys/{made['id']}")


async def _import(api: Api, talks: Sequence[Conversation]) -> dict[tuple[str, int], str]:
    """The turns by the session and time under which they are found again."""
    places: dict[tuple[str, int], str] = {}
    lines: list[str] = []
    for number, talk in enumerate(talks, start=1):
        session, last = f"eval-{number}", 0
        for turn in talk.turns:
            # turns of a session may share a time, as where only its date is known
            last = max(last + 1, int(turn.time.timestamp() * 1_000))
            places[session, last] = turn.id
            lines.append(json.dumps(_line(session, last, turn)))
    for at in range(0, len(lines), IMPORT_LINES):
        part = lines[at : at + IMPORT_LINES]
        answer = await api.call(
            "POST",
            "/memory/import",
            content="\n".join(part).encode(),
            headers={"content-type": "application/x-ndjson"},
            timeout=IMPORT_TIMEOUT,
        )
        if answer["imported"] != len(part):
            raise ApiError(
                "import", f"imported {answer['imported']} of {counted(len(part), 'turn')}: {answer.get('errors')}"
            )
    return places


def _line(session: str, time_ms: int, turn: Turn) -> dict[str, Any]:
    """A turn as an export would have it, with its ratings."""
    stamp = f"{time_ms:015d}{0:020d}"
    known: dict[str, dict[str, Any]] = {}
    if turn.score is not None:
        known["critique"] = {"score": round(turn.score), "critique": "", "rubric": ""}
    if turn.won is not None:
        known["pairwise"] = {"winner": "A" if turn.won else "B"}
    if turn.feedback is not None:
        known["reward"] = {"reward": turn.feedback, "source": "eval"}
    return {
        "query": turn.query,
        "answer": turn.answer,
        "session_id": session,
        "time": time_ms,
        "metadata": {
            "respondent_id": "A",
            "annotations": {kind: {"stamp": stamp, "values": values} for kind, values in known.items()},
        },
    }


def main(arguments: Sequence[str]) -> int:
    """Print the measures. The status is 1 if the stack cannot be measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="conversations and questions as JSON lines (docs/memory-retrieval.md)")
    parser.add_argument("--json", action="store_true", help="the measures as one JSON object")
    given = parser.parse_args(arguments)
    try:
        data = load(given.file)
        progress: Callable[[str], None] = lambda text: print(text, file=sys.stderr)  # noqa: E731
        measures, seconds = asyncio.run(measure(ClientSettings.load("cli"), data, progress))
    except Local2Error as exc:
        print(exc, file=sys.stderr)
        return 1
    milliseconds = 1_000 * median(seconds)
    if given.json:
        print(json.dumps({**measures.row(), "questions": len(data.questions), "p50_ms": round(milliseconds, 1)}))
    else:
        print(report(given.file.stem, {"this stack": measures}))
        print(f"\n{counted(len(data.questions), 'question')}, median {milliseconds:.0f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
