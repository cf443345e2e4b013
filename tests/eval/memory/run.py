"""How well memories are found: `python tests/eval/memory/run.py [FILE …]` prints a table per file.

Without files: the held-out half of the data set (test.jsonl); --train shows the half that the settings were chosen on.
Embeds with all-MiniLM (int8) from its wheel, searches the user's turns exactly, and ranks as memory does. Exit status 1
when the shipped way (hybrid, weighted) finds less than another one that filters as it does.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from services.demo_model.embedder import Embedder

from services.cli.commands.eval_data import DEPTH, DataSet, Measures, Question, Turn, load, report
from services.demo_model.wheels import embedding_file
from services.memory.keywords import Entry, KeywordIndex
from services.memory.ranking import Candidate, Weights, min_score_for, rank
from services.memory.text import dense_text, keyword_text

HERE = Path(__file__).parent
MODEL = "all-minilm"
# Candidates that each of the two searches brings.
FOUND = 40
SHIPPED = "hybrid, weighted (shipped)"
# One or two questions of a hundred are no difference.
NOISE = 0.02
UNRATED = Weights(critic=0, winner=0, feedback=0, age=0)

Way = Callable[[Sequence[Candidate]], list[str]]


def by_words(candidates: Sequence[Candidate]) -> list[str]:
    found = [one for one in candidates if one.keyword_rank is not None]
    return [one.id for one in sorted(found, key=lambda one: one.keyword_rank or 0)[:DEPTH]]


def by_vectors(candidates: Sequence[Candidate], least: float) -> list[str]:
    found = [one for one in candidates if (one.similarity or 0.0) >= least]
    return [one.id for one in sorted(found, key=lambda one: -(one.similarity or 0.0))[:DEPTH]]


def fused(candidates: Sequence[Candidate], weights: Weights, least: float) -> list[str]:
    return [hit.id for hit in rank(candidates, weights, top_k=DEPTH, min_score=least)]


def ways(least: float) -> dict[str, Way]:
    return {
        "keyword only": by_words,
        "dense only": lambda found: by_vectors(found, least),
        "hybrid": lambda found: fused(found, UNRATED, least),
        SHIPPED: lambda found: fused(found, Weights(), least),
        "- dense, no least score": lambda found: by_vectors(found, -1.0),
        "- weighted, no least score": lambda found: fused(found, Weights(), 0.0),
    }


class Memories:
    """One user's turns, ready to be searched."""

    def __init__(
        self, turns: Sequence[tuple[Turn, Turn | None]], embedder: Embedder, keywords: KeywordIndex, user: str
    ):
        self.turns = [turn for turn, _ in turns]
        self._vectors, _ = embedder.embed([dense_text(turn.query, turn.answer, turn.time) for turn in self.turns])
        self._keywords, self._user = keywords, user
        keywords.add(
            user,
            [
                Entry(
                    turn.id,
                    keyword_text(turn.query, turn.answer, turn.time),
                    f"{before.query}\n{before.answer}" if before else "",
                )
                for turn, before in turns
            ],
        )

    def candidates(self, question: Question, vector: np.ndarray) -> list[Candidate]:
        similarities = self._vectors @ vector
        words = {hit.id: hit for hit in self._keywords.search(self._user, question.query, FOUND)}
        near = {self.turns[place].id for place in np.argsort(-similarities, kind="stable")[:FOUND]}
        asked = question.time or datetime.now(UTC)
        found = []
        for turn, similarity in zip(self.turns, similarities, strict=True):
            if turn.id in near or turn.id in words:
                one = Candidate(
                    turn.id,
                    float(similarity),
                    score=turn.score,
                    won=turn.won,
                    feedback=turn.feedback,
                    age_days=max(0.0, (asked - turn.time).total_seconds() / 86_400),
                    question=turn.query,
                    text=turn.answer,
                )
                if hit := words.get(turn.id):
                    one = replace(one, keyword_rank=hit.rank, keyword_score=hit.score)
                found.append(one)
        return found


def measure(data: DataSet, embedder: Embedder, folder: Path) -> dict[str, Measures]:
    """What each way finds."""
    keywords = KeywordIndex(folder)
    memories = {}
    for user in data.users():
        talks = [one.turns for one in data.conversations if one.user == user]
        turns = [pair for turns in talks for pair in zip(turns, [None, *turns[:-1]], strict=True)]
        memories[user] = Memories(turns, embedder, keywords, user)
    results = {way: Measures() for way in ways(0.0)}
    vectors, _ = embedder.embed([question.query for question in data.questions])
    for question, vector in zip(data.questions, vectors, strict=True):
        candidates = memories[question.user].candidates(question, vector)
        for way, find in ways(min_score_for(MODEL)).items():
            results[way].add(question, find(candidates))
    keywords.close()
    return results


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="eval-memory", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="data sets of the same form")
    parser.add_argument("--train", action="store_true", help="the half that the settings were chosen on, too")
    options = parser.parse_args(argv)
    files = options.files or [*([HERE / "train.jsonl"] if options.train else []), HERE / "test.jsonl"]
    embedder = Embedder(embedding_file())
    status = 0
    for path in files:
        data = load(path)
        with tempfile.TemporaryDirectory(prefix="local2-eval-") as folder:
            results = measure(data, embedder, Path(folder))
        turns = sum(len(one.turns) for one in data.conversations)
        least = min_score_for(MODEL)
        print(f"{path.name}: {len(data.users())} users, {turns} turns, {len(data.questions)} questions; ", end="")
        print(f"least similarity {least:g} ({MODEL})\n")
        print(report(path.stem, results), end="\n\n")
        shipped = results[SHIPPED].row()
        for way in ("keyword only", "dense only", "hybrid"):
            if any((results[way].row()[name] or 0.0) > (shipped[name] or 0.0) + NOISE for name in ("recall@10", "MRR")):
                print(f"{way} finds more than what is shipped\n")
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
