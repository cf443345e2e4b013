"""Data sets of conversations with questions whose evidence is known, and the measures of what was found.

The form is JSON lines of two kinds (docs/memory-retrieval.md):
{"kind": "conversation", "id": …, "user": …, "turns": [{"id", "time", "query", "answer", score, won, feedback}]}
{"kind": "question", "id": …, "user": …, "type": …, "time": …, "query": …, "evidence": [ids of turns]}
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import mean
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from shared.errors import Local2Error
from shared.participant.settings import describe

# How many hits are looked at.
DEPTH = 10


class _Line(BaseModel):
    # other data sets carry more than is used here
    model_config = ConfigDict(frozen=True, extra="ignore")


class Turn(_Line):
    """One query with its answer, or one thing said (then `answer` is empty)."""

    id: str = Field(min_length=1)
    time: AwareDatetime
    query: str = Field(min_length=1)
    answer: str = ""
    score: float | None = Field(default=None, ge=1, le=5)
    won: bool | None = None
    feedback: float | None = Field(default=None, ge=-1, le=1)


class Conversation(_Line):
    kind: Literal["conversation"] = "conversation"
    id: str = Field(min_length=1)
    user: str = "user"
    turns: tuple[Turn, ...]


class Question(_Line):
    """`evidence` is empty for a question that the conversations do not answer."""

    kind: Literal["question"] = "question"
    id: str = Field(min_length=1)
    user: str = "user"
    type: str = "question"
    time: datetime | None = None
    query: str = Field(min_length=1)
    evidence: tuple[str, ...] = ()


_LINE: TypeAdapter[Conversation | Question] = TypeAdapter(
    Annotated[Conversation | Question, Field(discriminator="kind")]
)


class DataSetError(Local2Error):
    """A file does not have the form; the text names the line."""


@dataclass(frozen=True, slots=True)
class DataSet:
    conversations: tuple[Conversation, ...]
    questions: tuple[Question, ...]

    def users(self) -> list[str]:
        named = [one.user for one in self.conversations] + [one.user for one in self.questions]
        return list(dict.fromkeys(named))


def load(path: Path) -> DataSet:
    """Raises DataSetError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise DataSetError(f"{path} cannot be read: {exc}") from exc
    conversations: list[Conversation] = []
    questions: list[Question] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            item = _LINE.validate_json(line)
        except ValidationError as exc:
            kinds = 'its "kind" must be "conversation" or "question"'
            said = kinds if exc.errors()[0]["type"].startswith("union_tag") else describe(exc)
            raise DataSetError(f"{path}, line {number}: {said}") from exc
        if isinstance(item, Conversation):
            conversations.append(item)
        else:
            questions.append(item)
    owners: dict[str, str] = {}
    for conversation in conversations:
        for turn in conversation.turns:
            if turn.id in owners:
                raise DataSetError(f"{path}: the turn id {turn.id} occurs twice")
            owners[turn.id] = conversation.user
    for question in questions:
        for id_ in question.evidence:
            if owners.get(id_) != question.user:
                raise DataSetError(f"{path}: question {question.id} names {id_}, which its user has not said")
    if not questions:
        raise DataSetError(f"{path} has no questions")
    return DataSet(tuple(conversations), tuple(questions))


@dataclass(slots=True)
class Measures:
    """What one way of searching found, question by question."""

    recall5: list[float] = field(default_factory=list)
    recall10: list[float] = field(default_factory=list)
    reciprocal: list[float] = field(default_factory=list)
    by_type: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    false_hits: list[int] = field(default_factory=list)

    def add(self, question: Question, found: Sequence[str]) -> None:
        if not question.evidence:
            self.false_hits.append(len(found[:DEPTH]))
            return
        wanted = set(question.evidence)
        self.recall5.append(len(wanted & set(found[:5])) / len(wanted))
        self.recall10.append(len(wanted & set(found[:DEPTH])) / len(wanted))
        self.reciprocal.append(next((1 / rank for rank, id_ in enumerate(found, start=1) if id_ in wanted), 0.0))
        self.by_type[question.type].append(self.recall5[-1])

    @property
    def false_rate(self) -> float | None:
        """The share of the unanswerable questions for which something was found all the same."""
        return mean(bool(hits) for hits in self.false_hits) if self.false_hits else None

    def row(self) -> dict[str, float | None]:
        return {
            "recall@5": mean(self.recall5) if self.recall5 else None,
            "recall@10": mean(self.recall10) if self.recall10 else None,
            "MRR": mean(self.reciprocal) if self.reciprocal else None,
            "false hits": self.false_rate,
            "hits each": mean(self.false_hits) if self.false_hits else None,
        }


def report(title: str, ways: Mapping[str, Measures]) -> str:
    """The table of several ways of searching, and recall@5 by type of question."""
    names = ("recall@5", "recall@10", "MRR", "false hits", "hits each")
    rows = [(way, [_cell(measures.row()[name]) for name in names]) for way, measures in ways.items()]
    kinds = list(dict.fromkeys(kind for measures in ways.values() for kind in measures.by_type))
    parts = [_table(title, names, rows)]
    if kinds:
        by_type = [
            (way, [_cell(mean(values) if (values := measures.by_type.get(kind)) else None) for kind in kinds])
            for way, measures in ways.items()
        ]
        parts.append(_table("recall@5 by type of question", kinds, by_type))
    return "\n\n".join(parts)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _table(title: str, heads: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    lines = [f"{title:28}" + "".join(f"{head:>14}" for head in heads)]
    lines += [f"{way:28}" + "".join(f"{cell:>14}" for cell in cells) for way, cells in rows]
    return "\n".join(lines)
