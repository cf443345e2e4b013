"""`local2 eval answers FILE`: what the agent adds to its model, by the stack's own judge.

Each question is answered by the whole system and by its model alone; the judge compares the two in both orders. A
question has a session of its own, which is deleted afterwards with what memory, grades and preferences got of it.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from uuid import uuid4

import typer
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.table import Table
from rich.text import Text

from services.cli.api import QUERY_TIMEOUT, Api, ApiError
from services.cli.settings import ClientSettings
from services.cli.terminal import console, errors
from services.cli.words import printable
from shared.errors import SettingsError
from shared.participant.settings import describe
from shared.shares import wilson

Outcome = Literal["won", "tied", "lost", "failed"]
ALL = "all"
_FORM = 'one line of it is {"question": "…", "kind": "…"}'
# One plain call of the model: no instructions of the assistant's, no tools, nothing remembered.
_ALONE = "local2-utility"
# Nothing can be asked after one of these.
_HOPELESS = (401, 403)


class Question(BaseModel):
    """A line of the file. `reference`: an answer that is right, for the judge alone."""

    model_config = ConfigDict(extra="forbid", str_strip_whitespace=True)

    question: str = Field(min_length=1)
    kind: str = Field(default="", max_length=100)
    reference: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the whole system did on a question; `why`: the judge's words, or what failed."""

    question: Question
    outcome: Outcome
    why: str


@dataclass(slots=True)
class Tally:
    """Outcomes of one kind of question."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)

    def row(self) -> dict[str, Any]:
        """Counts, and the share of decided comparisons that the whole system won, with its 95 % interval."""
        decided = self.outcomes["won"] + self.outcomes["lost"]
        share = self.outcomes["won"] / decided if decided else None
        low, high = wilson(self.outcomes["won"], decided) if decided else (None, None)
        counts = {name: self.outcomes[name] for name in get_args(Outcome)}
        return {"questions": self.outcomes.total(), **counts, "share": share, "low": low, "high": high}


def load(path: Path) -> list[Question]:
    """The questions of a file of JSON lines. Raises SettingsError, which names the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise SettingsError(f"{path} cannot be read: {exc}") from exc
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append(Question.model_validate_json(line))
        except ValidationError as exc:
            raise SettingsError(f"{path}, line {number}: {describe(exc)}; {_FORM}") from exc
    if not found:
        raise SettingsError(f"{path} has no questions; {_FORM}")
    return found


async def verdicts(api: Api, questions: list[Question]) -> AsyncIterator[Verdict]:
    """One after the other: a model at home answers one question at a time. Raises ApiError when none can be asked."""
    for question in questions:
        try:
            yield await _compared(api, question)
        except ApiError as exc:
            if exc.status in _HOPELESS or exc.code == "unreachable":
                raise
            yield Verdict(question, "failed", str(exc))


async def _compared(api: Api, question: Question) -> Verdict:
    session = f"eval-{uuid4().hex}"
    try:
        whole = await api.post("/query", {"query": question.question, "session_id": session}, timeout=QUERY_TIMEOUT)
        asked = {"model": _ALONE, "messages": [{"role": "user", "content": question.question}]}
        alone = await api.post("/v1/chat/completions", asked, timeout=QUERY_TIMEOUT)
        args = {
            "question": question.question,
            "answer_a": whole["answer"],
            "answer_b": alone["choices"][0]["message"]["content"],
            "reference": question.reference,
        }
        judged = await api.post("/tools/compare_answers/call", {"args": args}, timeout=QUERY_TIMEOUT)
    finally:
        await _delete(api, session)
    if judged["error"]:
        return Verdict(question, "failed", judged["error"])
    outcomes: dict[str, Outcome] = {"A": "won", "B": "lost", "tie": "tied"}
    return Verdict(question, outcomes[judged["data"]["winner"]], judged["data"]["reason"])


async def _delete(api: Api, session: str) -> None:
    try:
        await api.delete(f"/sessions/{session}")
    except ApiError as exc:
        # a question that was refused made none
        if exc.status != 404:
            raise


def tallies(found: list[Verdict]) -> dict[str, Tally]:
    """By kind of question, in the order of the file; all of them last."""
    each: dict[str, Tally] = {}
    for verdict in found:
        if verdict.question.kind:
            each.setdefault(verdict.question.kind, Tally()).outcomes[verdict.outcome] += 1
    each[ALL] = Tally(Counter(verdict.outcome for verdict in found))
    return each


def report(found: list[Verdict]) -> Table:
    """`won` and the share are the whole system's."""
    table = Table("questions", "", "won", "tied", "lost", "failed", "won of the decided", "95 %",
                  title="The whole system against its model alone", title_justify="left")  # fmt: skip
    for kind, tally in tallies(found).items():
        row = tally.row()
        share = "-" if row["share"] is None else f"{row['share']:.0%}"
        interval = "" if row["share"] is None else f"{row['low']:.0%} – {row['high']:.0%}"
        counts = [str(row[name]) for name in ("questions", *get_args(Outcome))]
        table.add_row(Text(kind), *counts, share, interval)
    return table


app = typer.Typer(no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keep `answers` a command of its own name."""


@app.command("answers")
def answers(
    file: Annotated[
        Path, typer.Argument(help="Questions as JSON lines: question, kind?, reference? (docs/judging.md)")
    ],
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="The first so many questions")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Counts and verdicts as one JSON object")] = False,
) -> None:
    """Compare the whole system with its model alone, by the judge. Both answer each question of the file."""
    questions = load(file)[:limit]
    found: list[Verdict] = []

    async def ask() -> None:
        async with Api(ClientSettings.load("cli")) as api:
            async for verdict in verdicts(api, questions):
                found.append(verdict)
                if not as_json or verdict.outcome == "failed":
                    why = f": {verdict.why}" if verdict.outcome == "failed" else ""
                    errors.print(printable(f"{len(found)}/{len(questions)} {verdict.outcome}{why}"), style="dim")

    asyncio.run(ask())
    if as_json:
        kinds = {kind: tally.row() for kind, tally in tallies(found).items()}
        each = [{**one.question.model_dump(), "outcome": one.outcome, "why": one.why} for one in found]
        print(json.dumps({"kinds": kinds, "verdicts": each}))
    else:
        console.print(report(found))
    if all(one.outcome == "failed" for one in found):
        raise typer.Exit(1)
