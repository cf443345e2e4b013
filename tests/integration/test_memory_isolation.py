"""Random interleavings of several users' writes, deletions and searches: nobody ever sees another's engram."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

from services.memory.engram import Engram
from services.memory.index import entry
from services.memory.keywords import KeywordIndex
from services.memory.settings import MemorySettings
from services.memory.store import Store, open_store
from services.memory.vectors import Vector

USERS = ("ann", "bob", "Ann", "ann.", "b")
DIMENSION = 8
# `make test` takes a few; LOCAL2_TEST_INTERLEAVINGS=10000 was run before a release.
STEPS = int(os.environ.get("LOCAL2_TEST_INTERLEAVINGS", "400"))


def vector(rng: random.Random) -> Vector:
    place = [rng.gauss(0, 1) for _ in range(DIMENSION)]
    length = sum(x * x for x in place) ** 0.5
    return Vector("m", [x / length for x in place])


async def step(store: Store, words: KeywordIndex, rng: random.Random, number: int) -> int:
    """One random action of one random user; the number of hits that were looked at."""
    user, engram_id = rng.choice(USERS), f"{rng.randrange(20)}-0:A"
    match rng.choice(("put", "put", "delete", "near", "words", "get", "drop")):
        case "put":
            said = Engram(engram_id, user, "turn", number, number, query="the same words", answer=f"of {user}")
            await store.put(user, [(said, vector(rng))])
            await asyncio.to_thread(words.add, user, [entry(said)])
        case "delete":
            await store.delete(user, [engram_id])
            await asyncio.to_thread(words.remove, user, [engram_id])
        case "drop" if rng.random() < 0.1:
            await store.drop_user(user)
            await asyncio.to_thread(words.remove_user, user)
        case "near":
            found = await store.query(user, vector(rng), 20)
            return await seen(store, user, [one.id for one in found])
        case "words":
            found = await asyncio.to_thread(words.search, user, "same words", 20)
            return await seen(store, user, [one for hit in found.hits for one in (hit.id, *hit.later)])
        case _:
            return await seen(store, user, [f"{n}-0:A" for n in range(20)])
    return 0


async def seen(store: Store, user: str, ids: list[str]) -> int:
    found = await store.get(user, ids)
    for engram in found.values():
        assert (engram.user_id, engram.answer) == (user, f"of {user}")
    return len(found)


async def test_no_interleaving_shows_one_user_anothers_engrams(tmp_path: Path) -> None:
    rng = random.Random(STEPS)
    words = KeywordIndex(tmp_path / "words")
    looked = 0
    async with open_store(MemorySettings(data_dir=tmp_path)) as store:
        for number in range(0, STEPS, 4):
            looked += sum(await asyncio.gather(*(step(store, words, rng, number + n) for n in range(4))))
    words.close()
    assert looked > STEPS / 4
