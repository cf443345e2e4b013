"""How well memories are found: `python tests/eval/memory/run.py [FILE …]` prints a table per file.

Without files: the held-out halves of the data sets (test.jsonl, talks-test.jsonl); --train shows the halves that the
settings were chosen on. Embeds with all-MiniLM (int8) from its wheel, searches the user's turns exactly, and finds and
ranks by memory's own code; lines come as by an import, with session, time and grades. --weights JSON takes other
weights than the shipped ones. Exit status 1 when the shipped way (hybrid, weighted) finds less than another one that
filters as it does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from eval.memory.data_set import DEPTH, DataSet, Measures, Turn, load, report

from services.demo_model.wheels import embedding_file
from services.memory import recall
from services.memory.catalog import Catalog
from services.memory.engram import Engram, Note
from services.memory.index import entry
from services.memory.ingest import embedded_text
from services.memory.keywords import KeywordIndex
from services.memory.ranking import Weights
from services.memory.recall import Recall, Wanted
from services.memory.settings import MemorySettings
from services.memory.store import Near
from services.memory.turn_linking import overdue
from services.memory.vectors import Vector
from shared.envelope import now_ms
from shared.llm.minilm import Embedder

HERE = Path(__file__).parent
MODEL = "all-minilm"
FILES = ("test.jsonl", "talks-test.jsonl")
TRAIN = ("train.jsonl", "talks-train.jsonl")
SHIPPED = "hybrid, weighted (shipped)"
# One or two questions of a hundred are no difference.
NOISE = 0.02


def ways(shipped: Weights) -> dict[str, dict[str, Any]]:
    """Settings of memory by what they are called in the table."""
    unrated = shipped.model_copy(update={"critic": 0.0, "winner": 0.0, "feedback": 0.0, "age": 0.0})
    alone = {"beside": 0.0}
    return {
        "keyword only": {"weights": unrated.model_copy(update={"keyword": 1.0, **alone})},
        "dense only": {"weights": unrated.model_copy(update={"keyword": 0.0, **alone})},
        "hybrid, each turn alone": {"weights": unrated.model_copy(update=alone)},
        "hybrid": {"weights": unrated},
        SHIPPED: {"weights": shipped},
        "- weighted, no least score": {"weights": shipped, "min_score": 0.0},
    }


@dataclass
class Exact:
    """In the place of the vector store: every vector is looked at."""

    ids: Sequence[str]
    vectors: np.ndarray

    async def query(self, _user_id: str, vector: Vector, limit: int, _hidden: Set[str]) -> list[Near]:
        found = self.vectors @ np.asarray(vector.values, dtype=np.float32)
        return [Near(self.ids[at], float(found[at])) for at in np.argsort(-found, kind="stable")[:limit]]


@dataclass
class Words:
    """The part of memory's index that a search uses."""

    keywords: KeywordIndex
    catalog: Catalog = field(default_factory=Catalog)

    async def look(self, _user_id: str, work: Callable[[KeywordIndex], Any]) -> Any:
        return work(self.keywords)


@dataclass
class Vectors:
    """In the place of the embedder: the vectors of the questions, made before."""

    known: Mapping[str, Vector]
    using: str = MODEL
    trouble: str | None = None

    async def query(self, text: str) -> Vector:
        return self.known[text]


def engram(turn: Turn, user: str, session: str) -> Engram:
    """As an import makes it."""
    at = int(turn.time.timestamp() * 1_000)
    notes: dict[str, dict[str, Any]] = {}
    if turn.score is not None:
        notes["critique"] = {"score": turn.score}
    if turn.won is not None:
        notes["pairwise"] = {"winner": "A" if turn.won else "B"}
    if turn.feedback is not None:
        notes["reward"] = {"reward": turn.feedback}
    return Engram(
        turn.id,
        user,
        "turn",
        at,
        at + 1,
        session,
        respondent_id="A",
        query=turn.query,
        answer=turn.answer,
        notes={kind: Note("", values) for kind, values in notes.items()},
    )


def prepared(data: DataSet, embedder: Embedder, keywords: KeywordIndex) -> tuple[dict[str, Exact], dict[str, Vector]]:
    """Everything taken in: each user's vectors, and those of the questions by their text."""
    stores = {}
    for user in data.users():
        engrams: list[Engram] = []
        for talk in data.conversations:
            if talk.user == user:
                said = [engram(turn, user, talk.id) for turn in talk.turns]
                marked = [replace(one, id=f"import:{one.id}") for one in said]
                due = overdue([], marked)
                engrams += [replace(one, before=due.get(f"import:{one.id}", "")) for one in said]
        vectors, _ = embedder.embed([embedded_text(one) for one in engrams])
        placed = [entry(one, Vector(MODEL, vector)) for one, vector in zip(engrams, vectors, strict=True)]
        keywords.add(user, placed)
        stores[user] = Exact([one.id for one in engrams], vectors)
    texts = list(dict.fromkeys(question.query for question in data.questions))
    vectors, _ = embedder.embed(texts)
    return stores, {text: Vector(MODEL, vector.tolist()) for text, vector in zip(texts, vectors, strict=True)}


async def measure(
    data: DataSet, embedder: Embedder, folder: Path, chosen: Mapping[str, Mapping[str, Any]]
) -> dict[str, Measures]:
    """What each way finds."""
    keywords = KeywordIndex(folder)
    stores, vectors = prepared(data, embedder, keywords)
    results = {way: Measures() for way in chosen}
    for way, values in chosen.items():
        settings = MemorySettings(_env_file=None, **values)  # type: ignore[call-arg]
        for question in data.questions:
            search = Recall(stores[question.user], Words(keywords), Vectors(vectors))  # type: ignore[arg-type]
            at = int(question.time.timestamp() * 1_000) if question.time else now_ms()
            with mock.patch.object(recall, "now_ms", lambda at=at: at):
                found = await search.search(question.user, Wanted((question.query,), DEPTH), settings)
            results[way].add(question, [hit.id for hit, _ in found.hits])
    keywords.close()
    return results


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="eval-memory", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="data sets of the same form")
    parser.add_argument("--train", action="store_true", help="the halves that the settings were chosen on, too")
    parser.add_argument("--weights", type=json.loads, default={}, help="other weights than the shipped ones, as JSON")
    options = parser.parse_args(argv)
    files = options.files or [HERE / name for name in ([*TRAIN, *FILES] if options.train else FILES)]
    embedder = Embedder(embedding_file())
    status = 0
    for path in files:
        data = load(path)
        with tempfile.TemporaryDirectory(prefix="local2-eval-") as folder:
            results = asyncio.run(measure(data, embedder, Path(folder), ways(Weights(**options.weights))))
        turns = sum(len(one.turns) for one in data.conversations)
        print(f"{path.name}: {len(data.users())} users, {turns} turns, {len(data.questions)} questions ({MODEL})\n")
        print(report(path.stem, results), end="\n\n")
        shipped = results[SHIPPED].row()
        for way in ("keyword only", "dense only", "hybrid"):
            if any((results[way].row()[name] or 0.0) > (shipped[name] or 0.0) + NOISE for name in ("recall@10", "MRR")):
                print(f"{way} finds more than what is shipped\n")
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
