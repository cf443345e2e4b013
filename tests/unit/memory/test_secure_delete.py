"""Removed words leave the keyword files while no question is answered."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support.on_disk import having
from support.waiting import always, eventually

from services.memory.keywords import Entry, KeywordIndex
from services.memory.secure_delete import Erasing

WORD = "xylograph"


async def test_removed_words_leave_the_disk_once_nothing_is_answered(tmp_path: Path) -> None:
    keywords = KeywordIndex(tmp_path)
    answering = True

    async def busy() -> bool:
        return answering

    keywords.add("ann", [Entry(f"e{number}", f"{WORD} {number} " * 60) for number in range(30)])
    keywords.add("ann", [Entry("kept", "something else")])
    keywords.remove("ann", [f"e{number}" for number in range(30)])
    running = asyncio.create_task(Erasing(keywords, busy, 0).run())
    try:
        assert having(WORD, tmp_path)
        await always(lambda: bool(keywords.unclean), 1, "it waits for the answer")
        answering = False
        await eventually(lambda: not having(WORD, tmp_path), 20, "no file has the word")
        assert [hit.id for hit in keywords.search("ann", "something", 5).hits] == ["kept"]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        keywords.close()
