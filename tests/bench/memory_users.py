"""A memory of many users, embedded: its start, the first search of each, resident memory, open files, one deletion.

As a program it is one of two processes: `fill` writes the users' engrams, `search` opens the store anew, as after a
restart, and asks for users one after the other. Each prints a line of JSON.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import psutil
from children import Child, Participant
from memory_search import MODEL, Vectors, Words, Writer
from stack import IDLE_SECONDS, ready
from tables import Target, table

from services.cli.launch.embedded_redis import EmbeddedRedis
from services.memory.index import entry
from services.memory.keywords import KeywordIndex
from services.memory.recall import Recall, Wanted
from services.memory.settings import MemorySettings
from services.memory.store import Store, open_store
from services.memory.vectors import Vector
from shared.bus import Bus
from shared.participant.registry import Registry

EACH = 4
ASKED = 300
# Engrams of the one user of whom one is deleted.
LARGE = "large"
DELETED = 20
_LISTED_SECONDS = 300.0


def _user(number: int) -> str:
    return f"user-{number}"


async def _write(store: Store, keywords: KeywordIndex, writer: Writer, user_id: str, count: int) -> None:
    for at in range(0, count, 500):
        part = min(500, count - at)
        engrams = [replace(one, user_id=user_id) for one in writer.engrams(at, part)]
        vectors = [Vector(MODEL, place.tolist()) for place in writer.vectors(part)]
        placed = list(zip(engrams, vectors, strict=True))
        await store.put(user_id, placed)
        await asyncio.to_thread(keywords.add, user_id, [entry(*one) for one in placed])


@contextmanager
def _index(folder: Path) -> Iterator[KeywordIndex]:
    keywords = KeywordIndex(MemorySettings(data_dir=folder).words)
    try:
        yield keywords
    finally:
        keywords.close()


async def fill(folder: Path, users: int, large: int) -> None:
    writer = Writer()
    began = time.perf_counter()
    async with open_store(MemorySettings(data_dir=folder)) as store:
        with _index(folder) as keywords:
            await _write(store, keywords, writer, LARGE, large)
            for number in range(users):
                await _write(store, keywords, writer, _user(number), EACH)
            # As after an ordinary stop: the next start does not rebuild the keyword index.
            keywords.set_mark("0-0")
    print(orjson.dumps({"seconds": time.perf_counter() - began}).decode(), flush=True)


async def search(folder: Path, users: int) -> None:
    settings = MemorySettings(data_dir=folder, min_score=0.2)
    writer, vectors, dice = Writer(), Vectors(), random.Random(1)
    with _index(folder) as keywords:
        async with open_store(settings) as store:
            recall = Recall(store, Words(keywords), vectors)  # type: ignore[arg-type]
            times, found = list[float](), 0
            for number in dice.sample(range(users), min(ASKED, users)):
                vectors.next = writer.near(writer.vectors(1)[0])
                wanted = Wanted((writer.text(6),))
                began = time.perf_counter()
                hits = (await recall.search(_user(number), wanted, settings)).hits
                times.append(1_000 * (time.perf_counter() - began))
                found += bool(hits)
            process = psutil.Process()
            # the first has to open everything
            parts = {f"search p{part}": float(np.percentile(times[1:], part)) for part in (50, 99)}
            size = {"resident": process.memory_info().rss / 1e6, "files": float(process.num_fds())}
            deletion = await _deletion(store, keywords)
        began = time.perf_counter()
        while keywords.overwrite(LARGE):
            pass
    later = {"overwritten": time.perf_counter() - began}
    print(orjson.dumps({**parts, **size, **deletion, **later, "first": times[0], "found": found}).decode(), flush=True)


async def _deletion(store: Store, keywords: KeywordIndex) -> dict[str, float]:
    """Milliseconds until one engram of a user with many is found by nobody, in the middle of some."""
    there = [one.engram.id async for page in store.of_user(LARGE) for one in page]
    times = []
    for engram_id in random.Random(2).sample(there, DELETED):
        began = time.perf_counter()
        await store.delete(LARGE, [engram_id])
        await asyncio.to_thread(keywords.remove, LARGE, [engram_id])
        times.append(1_000 * (time.perf_counter() - began))
    return {"deletion p50": float(np.percentile(times, 50)), "deletion p90": float(np.percentile(times, 90))}


async def _listed(redis_url: str) -> None:
    """Wait until memory has listed all engrams: from then on it counts, exports and deletes too."""
    async with Bus(redis_url, "bench/listed") as bus:
        registry = Registry(bus, heartbeat=0)
        while not any(one.facts.get("indexed") for one in await registry.replicas(fresh=True)):
            await asyncio.sleep(0.1)


def start(place: Path, folder: Path) -> dict[str, float]:
    """Seconds until the participant is ready on this store, and until it has listed all engrams; its processor time
    until then in seconds, and its idle memory in MB."""
    with EmbeddedRedis(folder / "redis-users", port=0) as server:
        # no model server: the vectors stay as they are
        env = {"LOCAL2_REDIS_URL": server.url, "LOCAL2_DATA_DIR": str(place), "OLLAMA_HOST": "http://127.0.0.1:1"}
        began = time.perf_counter()
        with Participant(["-m", "services.memory"], folder / "memory-start.log", env) as participant:
            process = psutil.Process(participant.pid)
            asyncio.run(ready(server.url, {"memory"}))
            found = {"ready": time.perf_counter() - began}
            asyncio.run(asyncio.wait_for(_listed(server.url), _LISTED_SECONDS))
            found |= {"start": time.perf_counter() - began, "start cpu": sum(process.cpu_times()[:2])}
            time.sleep(IDLE_SECONDS)
            return {**found, "idle": process.memory_info().rss / 1e6}


def measure(folder: Path, users: int, large: int) -> dict[str, float]:
    place, log = folder / "memory-users", folder / "memory-users.log"
    lines = []
    for what in ("fill", "search"):
        with Child([__file__, what, str(place), str(users), str(large)], log, {}) as child:
            lines.append(child.read())
        if what == "fill":
            lines.append(start(place, folder))
    filled, started, searched = lines
    return {**filled, **started, **searched, "users": users, "large": large}


def report(found: Mapping[str, float]) -> tuple[str, list[Target]]:
    users, large = f"{found['users']:,.0f} users", f"{found['large']:,.0f} engrams"
    rows = [
        ["start until ready, until all is listed (s)", f"{found['ready']:.1f}", f"{found['start']:.1f}"],
        ["processor time of the start (s), idle memory (MB)", f"{found['start cpu']:.1f}", f"{found['idle']:.0f}"],
        ["first search of a user, p50 and p99 (ms)", f"{found['search p50']:.1f}", f"{found['search p99']:.1f}"],
        ["resident memory (MB), open files", f"{found['resident']:.0f}", f"{found['files']:.0f}"],
        [f"deleting one of {large}, p50 and p90 (ms)", f"{found['deletion p50']:.1f}", f"{found['deletion p90']:.1f}"],
        ["overwriting deleted words in the keyword file (s)", f"{found['overwritten']:.1f}", ""],
    ]
    shown = table(f"Memory of {users}, embedded, opened anew", ["", "", ""], rows)
    return shown, [
        Target(f"start of memory with {users}", found["start"], 15, " s"),
        Target(f"idle memory of memory with {users}", found["idle"], 200, " MB"),
        Target(f"first search of one of {users}, p99", found["search p99"], 400, " ms"),
        Target(f"resident memory with {users}", found["resident"], 500, " MB"),
        Target(f"deleting one of {large}, p50", found["deletion p50"], 20, " ms"),
    ]


if __name__ == "__main__":
    numbers: Sequence[int] = [int(one) for one in sys.argv[3:]]
    if sys.argv[1] == "fill":
        asyncio.run(fill(Path(sys.argv[2]), *numbers))
    else:
        asyncio.run(search(Path(sys.argv[2]), numbers[0]))
