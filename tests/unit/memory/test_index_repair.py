"""A user's words that are made anew while something is removed, or comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.memory.engram import Engram
from services.memory.index import Index
from services.memory.keywords import KeywordIndex
from services.memory.store import Placed


def engram(word: str) -> Engram:
    return Engram(word, "ann", "turn", 1_000, 1_000, query=f"what of {word}", answer=f"a {word}")


def damage(folder: Path) -> None:
    for file in folder.glob("*.db*"):
        file.write_bytes(b"no database" * 1_000)


@pytest.mark.parametrize("meanwhile", ["removed", "added"])
async def test_what_happens_while_the_words_are_made_anew_holds(tmp_path: Path, meanwhile: str) -> None:
    kept = {one: engram(one) for one in ("harbour", "lantern")}
    reading, go_on = asyncio.Event(), asyncio.Event()
    begun: list[asyncio.Task[None]] = []

    async def placed(_user_id: str, ids: list[str]) -> dict[str, Placed]:
        found = {one: Placed(kept[one], None) for one in ids if one in kept}
        if not reading.is_set():
            reading.set()
            await go_on.wait()
        return found

    async def published(_message: Any) -> None:
        return

    def supervise(_name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        begun.append(asyncio.create_task(work()))

    words = KeywordIndex(tmp_path)
    context: Any = SimpleNamespace(bus=SimpleNamespace(publish=published), supervise=supervise)
    store: Any = SimpleNamespace(placed=placed)
    index = Index(context, store, words)
    index.ready.set()
    await index.put("ann", list(kept.values()))
    words.close()
    damage(tmp_path)
    assert await index.look("ann", lambda known: known.count("ann")) is None
    await reading.wait()
    if meanwhile == "removed":
        del kept["harbour"]
        await index.remove("ann", ["harbour"])
    else:
        kept["anchor"] = engram("anchor")
        await index.put("ann", [kept["anchor"]])
    go_on.set()
    await asyncio.gather(*begun)
    found = {one: words.search("ann", one, 5).hits for one in ("harbour", "lantern", "anchor")}
    words.close()
    assert {one for one, hits in found.items() if hits} == set(kept)
