"""Search in memory against a bare Chroma query of the same data; how fast it is filled; memory of the process.

As a program it is the process that is measured: it fills a store to each of the sizes, and prints a line of JSON each.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import chromadb
import httpx
import numpy as np
import orjson
import psutil
from children import Child
from tables import Target, table

from services.memory.catalog import Catalog
from services.memory.engram import Engram
from services.memory.index import entry
from services.memory.keywords import KeywordIndex
from services.memory.recall import Recall, Wanted
from services.memory.settings import MemorySettings
from services.memory.store import open_store
from services.memory.vectors import Vector
from shared.envelope import now_ms
from shared.llm.builtin import NAME, BuiltInEmbeddings, installed

DIMENSION = 384
MODEL = "bench"
USER = "ann"
BATCH = 500
TARGET_SIZE = 100_000
# Clusters in which the vectors lie, as texts of a few hundred topics do.
TOPICS = 300
VOCABULARY = 30_000
WORDS = {"query": 10, "answer": 45}
DAY_MS = 86_400_000
ASKED_ABOUT = 2_000


class Writer:
    """Texts and vectors like those of conversations: few words are common, most are rare; topics lie together."""

    def __init__(self) -> None:
        self._dice = random.Random(1)
        self._numbers = np.random.default_rng(1)
        self.words = [_word(number) for number in range(VOCABULARY)]
        self._weights = list(itertools.accumulate(1 / (number + 3) for number in range(VOCABULARY)))
        self._centres = self._numbers.normal(size=(TOPICS, DIMENSION))

    def text(self, words: int) -> str:
        return " ".join(self._dice.choices(self.words, cum_weights=self._weights, k=words))

    def vectors(self, count: int) -> np.ndarray:
        places = self._centres[self._numbers.integers(0, TOPICS, count)]
        return self._unit(places + 0.8 * self._numbers.normal(size=(count, DIMENSION)))

    def near(self, vector: Sequence[float]) -> list[float]:
        """The vector of a question about it."""
        place: list[float] = self._unit(np.asarray(vector) + 0.04 * self._numbers.normal(size=DIMENSION)).tolist()
        return place

    def question(self, engram: Engram) -> str:
        """Words of the engram as a person would ask with them, and one that it does not have."""
        own = [word for word in f"{engram.query} {engram.answer}".split() if word not in self.words[:50]]
        return " ".join([*self._dice.sample(own, min(4, len(own))), self._dice.choice(self.words)])

    def engrams(self, first: int, count: int) -> list[Engram]:
        now, before, made = now_ms(), "", []
        for number in range(first, first + count):
            query, answer = self.text(WORDS["query"]), self.text(WORDS["answer"])
            at = now - self._dice.randrange(200 * DAY_MS)
            made.append(
                Engram(
                    f"{at}-{number}:A",
                    USER,
                    "turn",
                    at,
                    at,
                    f"s{number // 8}",
                    f"{at}-{number}",
                    "A",
                    query,
                    answer,
                    before=before,
                    model="bench",
                    generator_id="GeneratorAgent",
                )
            )
            before = f"{query}\n{answer}"
        return made

    @staticmethod
    def _unit(vectors: np.ndarray) -> np.ndarray:
        unit: np.ndarray = (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)).astype(np.float32)
        return unit


def _word(number: int) -> str:
    """A pronounceable word of its own for each number."""
    letters, number = "", number + 80
    while number:
        letters += "bcdfghklmnprstvz"[number % 16] + "aeiou"[number // 16 % 5]
        number //= 80
    return letters


class Words:
    """The part of memory's index that a search uses."""

    def __init__(self, keywords: KeywordIndex) -> None:
        self._keywords = keywords
        self.catalog = Catalog()

    async def look(self, _user_id: str, work: Callable[[KeywordIndex], Any]) -> Any:
        return await asyncio.to_thread(work, self._keywords)


class Vectors:
    """In the place of the embedding model: the vector of the next question. At once, or when the built-in model has
    embedded the question (`embedding`), whose vector lies nowhere near the made ones."""

    using = MODEL
    trouble = None

    def __init__(self) -> None:
        self.next: list[float] = []
        self.embedding = False
        path = installed()
        if path is None:
            raise SystemExit("the built-in embedding model is not installed: make setup")
        self._model = BuiltInEmbeddings(path)

    async def query(self, text: str) -> Vector:
        if self.embedding:
            await self._model.embed(NAME, [text])
        return Vector(MODEL, self.next)


async def fill(folder: Path, chroma_url: str, sizes: Sequence[int], questions: int) -> None:
    """Prints what was measured at each size."""
    settings = MemorySettings(data_dir=folder, min_score=0.2, chroma_url=chroma_url or None)
    writer, vectors = Writer(), Vectors()
    keywords = KeywordIndex(folder / "words")
    async with open_store(settings) as store:
        recall = Recall(store, Words(keywords), vectors)  # type: ignore[arg-type]
        there: list[tuple[Engram, np.ndarray]] = []
        first = 0
        for size in sizes:
            began = time.perf_counter()
            for at in range(first, size, BATCH):
                count = min(BATCH, size - at)
                batch = list(zip(writer.engrams(at, count), writer.vectors(count), strict=True))
                placed = [(engram, Vector(MODEL, place.tolist())) for engram, place in batch]
                await store.put(USER, placed)
                await asyncio.to_thread(keywords.add, USER, [entry(*one) for one in placed])
                # a few are asked about later; to keep all would be measured as the store's memory
                there += batch[:: max(1, size // ASKED_ABOUT)]
            rate = (size - first) / (time.perf_counter() - began)
            found = await search(recall, keywords, vectors, writer, settings, there, questions)
            resident = psutil.Process().memory_info().rss / 1e6
            first = size
            print(orjson.dumps({**found, "size": size, "engrams/s": rate, "resident": resident}).decode(), flush=True)
    keywords.close()


def bare_collection(settings: MemorySettings) -> Any:
    """Return the user's collection by Chroma's own client; for a folder it shares what the store has open."""
    options = chromadb.Settings(anonymized_telemetry=False)
    if settings.chroma_url:
        address = urlsplit(settings.chroma_url)
        client = chromadb.HttpClient(address.hostname or "", address.port or 80, settings=options)
    else:
        client = chromadb.PersistentClient(str(settings.folder), settings=options)
    (collection,) = [one for one in client.list_collections() if (one.metadata or {}).get("user_id") == USER]
    return collection


async def search(
    recall: Recall,
    keywords: KeywordIndex,
    vectors: Vectors,
    writer: Writer,
    settings: MemorySettings,
    there: Sequence[tuple[Engram, np.ndarray]],
    questions: int,
) -> dict[str, float]:
    """Milliseconds of a search, of one by vectors alone, of the bare query, of search and bare query with the question
    embedded first, and of the keywords alone; they take turns question by question."""
    collection = await asyncio.to_thread(bare_collection, settings)
    dice = random.Random(len(there))
    times: dict[str, list[float]] = {name: [] for name in ("recall", "vectors", "bare", "used", "bare used", "words")}
    hits = 0
    for number in range(questions + 3):
        engram, place = dice.choice(there)
        question, vectors.next = writer.question(engram), writer.near(place)

        async def recalled(question: str = question, hybrid: bool = True) -> Any:
            return await recall.search(USER, Wanted((question,), hybrid=hybrid), settings)

        async def by_vectors(question: str = question) -> Any:
            return await recalled(question, hybrid=False)

        async def bare(question: str = question) -> Any:
            vector = await vectors.query(question)
            return collection.query(query_embeddings=[vector.values], n_results=settings.top_k)

        async def words(question: str = question) -> Any:
            return keywords.search(USER, question, 30)

        order = list(zip(times, (recalled, by_vectors, bare, recalled, bare, words), strict=True))
        dice.shuffle(order)
        for name, run in order:
            vectors.embedding = "used" in name
            began = time.perf_counter()
            result = await run()
            took = 1_000 * (time.perf_counter() - began)
            # what is loaded at first use does not count
            if number >= 3:
                times[name].append(took)
                hits += name == "recall" and engram.id in [hit.id for hit, _ in result.hits]
    found = {
        f"{name} p{part}": float(np.percentile(values, part)) for name, values in times.items() for part in (50, 99)
    }
    return {**found, "found": hits / questions}


@contextmanager
def chroma_server(folder: Path) -> Iterator[str]:
    """The server that comes with Chroma's package; gives its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("chroma")), "run", "--host", "127.0.0.1", "--port", str(port)]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([*command, "--path", str(folder)], stdout=quiet, stderr=quiet)
    try:
        deadline = time.monotonic() + 30
        while True:
            with suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/api/v2/heartbeat", trust_env=False).status_code == 200:
                    break
            if time.monotonic() > deadline:
                raise TimeoutError("the Chroma server does not answer")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def measure(folder: Path, sizes: Sequence[int], questions: int, *, server: bool = False) -> list[dict[str, float]]:
    """One line a size; the store grows from each to the next. server: Chroma as a process of its own."""
    name = f"memory-search-{'server' if server else 'embedded'}"
    with ExitStack() as stack:
        url = stack.enter_context(chroma_server(folder / f"{name}-chroma")) if server else ""
        args = [__file__, str(folder / name), url, str(questions), *map(str, sizes)]
        child = stack.enter_context(Child(args, folder / f"{name}.log", {}))
        return [child.read() for _ in sizes]


def report(lines: Sequence[dict[str, float]], store: str) -> tuple[str, list[Target]]:
    rows = [list(_row(line)) for line in lines]
    heads = [
        "engrams",
        "search p50",
        "p99",
        "bare p50",
        "p99",
        "ratio p50",
        "vectors only",
        "as used p50",
        "bare",
        "ratio p50",
        "words p50",
        "found",
        "stored/s",
        "resident",
    ]
    targets = [
        Target(f"search at {line['size']:,.0f} engrams, {store}, question embedded, {what}", found, most, unit)
        for line in lines
        if line["size"] >= TARGET_SIZE
        for what, found, most, unit in (
            ("p50", line["used p50"], 30, " ms"),
            ("p50 against a bare query", _ratio_used(line), 2, " x"),
        )
    ]
    title = (
        f"Memory: hybrid search against a bare query of {store} (top 5), vectors given; by vectors only; and as it is "
        "used, the question embedded first in both. Resident: with the built-in embedding model"
    )
    return table(title, heads, rows), targets


def _ratio(line: dict[str, float]) -> float:
    return line["recall p50"] / line["bare p50"]


def _ratio_used(line: dict[str, float]) -> float:
    return line["used p50"] / line["bare used p50"]


def _row(line: dict[str, float]) -> Iterator[str]:
    yield f"{line['size']:,.0f}"
    for name in ("recall", "bare"):
        yield f"{line[f'{name} p50']:.1f} ms"
        yield f"{line[f'{name} p99']:.1f} ms"
    yield f"{_ratio(line):.2f} x"
    yield f"{line['vectors p50']:.1f} ms"
    yield f"{line['used p50']:.1f} ms"
    yield f"{line['bare used p50']:.1f} ms"
    yield f"{_ratio_used(line):.2f} x"
    yield f"{line['words p50']:.1f} ms"
    yield f"{100 * line['found']:.0f} %"
    yield f"{line['engrams/s']:,.0f}"
    yield f"{line['resident']:,.0f} MB"


if __name__ == "__main__":
    asyncio.run(fill(Path(sys.argv[1]), sys.argv[2], [int(size) for size in sys.argv[4:]], int(sys.argv[3])))
