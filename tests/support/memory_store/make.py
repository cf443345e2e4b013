"""Writes the data of `1.5-compiled.tar.xz`: run it in a checkout of commit 7417499, which used Chroma's compiled part.

A second start of that version then added its index of the queue; the folder was packed afterwards.
"""

from __future__ import annotations

import asyncio
import math
import sys
from pathlib import Path

from services.memory.engram import Engram
from services.memory.index import entry
from services.memory.keywords import KeywordIndex
from services.memory.settings import MemorySettings
from services.memory.store import open_store
from services.memory.vectors import NO_VECTOR, Vector


def turn(number: int) -> Engram:
    query_id = f"{number}-0"
    said = (f"question {number}?", f"answer {number}")
    return Engram(f"{query_id}:A", "ann", "turn", 1_000 + number, 1_000 + number, "s1", query_id, "A", *said)


def vector(number: int) -> Vector:
    return Vector("m", [math.cos(number / 200), math.sin(number / 200), 0.0, 0.0])


async def main(folder: Path) -> None:
    settings = MemorySettings(data_dir=folder)
    words = KeywordIndex(settings.words)
    async with open_store(settings) as store:
        for at in range(0, 1_100, 100):
            many = [(turn(number), vector(number)) for number in range(at, at + 100)]
            await store.put("ann", many)
            words.add("ann", [entry(*one) for one in many])
        few = [
            (Engram("topic:ben", "ben", "topic", 5, 5, topic="user.pet", content="A cat."), NO_VECTOR),
            (Engram("7-0:B", "ben", "turn", 7, 7, "s2", "7-0", "B", "shadow?", "hidden"), vector(7)),
            (Engram("8-0:A", "ben", "turn", 8, 8, "s2", "8-0", "A", "gone?", "deleted"), vector(8)),
        ]
        await store.put("ben", few)
        words.add("ben", [entry(*one) for one in few])
        await store.delete("ben", ["8-0:A"])
        words.remove("ben", ["8-0:A"])
    words.set_mark("0-0")
    words.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
