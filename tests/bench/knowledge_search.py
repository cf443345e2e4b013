"""Search in knowledge beside a bare SQL query of the same data; how fast it is filled; memory of the process.

As a program it is the process that is measured: it fills a graph to a number of facts, and prints a line of JSON.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import psutil
from tables import table

from services.knowledge.claims import Claim, Turn, claim
from services.knowledge.search import Search
from services.knowledge.sqlite import open_sqlite
from services.knowledge.statements import NEWEST, of_name
from services.knowledge.store import Store

USER = "ann"
# Claims of one write, as an import has them; a response has a few.
BATCH, ALONE = 500, 3
RELATIONS = ("lives in", "works at", "likes", "is friend of", "is sister of", "owns", "plays", "knows")
# What the user himself says: every tenth fact is about him.
ABOUT_THE_USER = 0.1
DAY_MS = 86_400_000
PAIRS = "aeiou", "bdfgklmnprstvz"


def _word(number: int) -> str:
    vowels, others = PAIRS
    text = ""
    for _ in range(4):
        number, consonant = divmod(number, len(others))
        number, vowel = divmod(number, len(vowels))
        text += others[consonant] + vowels[vowel]
    return text.capitalize()


class Life:
    """People and places; a few are talked of often."""

    def __init__(self, facts: int) -> None:
        self._dice = random.Random(1)
        self.names = [_word(number * 7919) for number in range(max(100, facts // 5))]
        self._number = 0

    def some(self) -> str:
        return self.names[int(len(self.names) * self._dice.random() ** 2)]

    def claims(self, count: int, each: int) -> list[Claim]:
        made: list[Claim] = []
        while len(made) < count:
            source = self._number + len(made) // each
            turn = Turn(f"{source}:A", USER, f"s{source // 8}", 1_700_000_000_000 + source * 60_000, "")
            subject = "me" if self._dice.random() < ABOUT_THE_USER else self.some()
            found = claim(turn, subject, self._dice.choice(RELATIONS), self.some(), by="model")
            if found is not None:
                made.append(found)
        self._number += count
        return made


async def _measured(folder: Path, facts: int, questions: int) -> dict[str, Any]:
    process = psutil.Process()
    life = Life(facts)
    async with open_sqlite(folder / "knowledge.sqlite") as graph:
        store = Store(graph)
        search = Search(store)
        began = time.perf_counter()
        for _ in range(facts // BATCH):
            await store.import_claims(USER, life.claims(BATCH, ALONE))
        filled = time.perf_counter() - began
        lone = [life.claims(ALONE, ALONE) for _ in range(200)]
        began = time.perf_counter()
        for claims in lone:
            turn = Turn(f"x{claims[0].source}", USER, "s", claims[0].said, "")
            await store.replace_claims(turn, claims, settled=True)
        alone = time.perf_counter() - began
        began = time.perf_counter()
        await search.names(USER)
        first = time.perf_counter() - began
        names = [life.some() for _ in range(questions)]
        bare, one, two = [], [], []
        for name in names:
            bare.append(await _timed(graph.read(NEWEST, {**of_name(USER, name.lower()), "n": 20})))
            one.append(await _timed(search.find(USER, [name], [], 20, 1)))
            two.append(await _timed(search.find(USER, [name], [], 20, 2)))
        user = [await _timed(search.find(USER, ["me"], [], 20, 2)) for _ in range(max(20, questions // 10))]
        return {
            "facts": await store.count(USER),
            "names": len(await store.keys(USER)),
            "claims_per_second": facts / filled,
            "responses_per_second": len(lone) / alone,
            "first_ms": 1000 * first,
            "bare": _spread(bare),
            "one hop": _spread(one),
            "two hops": _spread(two),
            "the user": _spread(user),
            "rss_mb": process.memory_info().rss / 1e6,
        }


async def _timed(asking: Any) -> float:
    began = time.perf_counter()
    await asking
    return 1000 * (time.perf_counter() - began)


def _spread(values: Sequence[float]) -> dict[str, float]:
    ranked = sorted(values)
    return {"p50": ranked[len(ranked) // 2], "p99": ranked[min(len(ranked) - 1, int(len(ranked) * 0.99))]}


def measure(folder: Path, facts: int, questions: int) -> dict[str, Any]:
    """In a process of its own, whose memory is looked at."""
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, __file__, str(folder), str(facts), str(questions)], check=True, capture_output=True, text=True
    )
    found: dict[str, Any] = orjson.loads(done.stdout.splitlines()[-1])
    return found


def report(found: dict[str, Any]) -> str:
    rows = [
        [what, *(f"{found[what][part]:.2f}" for part in ("p50", "p99"))]
        for what in ("bare", "one hop", "two hops", "the user")
    ]
    text = table(f"knowledge: a search among {found['facts']:,} claims", ["ms", "p50", "p99"], rows)
    more = (
        f"{found['names']:,} names; {found['claims_per_second']:.0f} claims/s taken in, "
        f"{found['responses_per_second']:.0f} responses/s; names read in {found['first_ms']:.0f} ms; "
        f"{found['rss_mb']:.0f} MB resident"
    )
    return f"{text}\n  {more}"


if __name__ == "__main__":
    place, number, asked = sys.argv[1:]
    print(orjson.dumps(asyncio.run(_measured(Path(place), int(number), int(asked)))).decode())
