"""Removed words leave the disk: a background task merges them out of the users' keyword files and overwrites them.

A removal itself is quick: rows are overwritten at once (SQLite's `secure_delete`), and no search finds the engram. FTS5
keeps removed words in its segments until they are merged.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Awaitable, Callable

from services.memory.keywords import KeywordIndex, KeywordIndexDamaged
from shared.telemetry.logging import get_logger

log = get_logger()

# Longest wait (seconds) for a moment without a question in progress.
_PATIENCE = 60.0
# Seconds between two polls.
_LOOK = 0.5


class Erasing:
    """answering: whether a question is being answered. gather: seconds in which further removals may come."""

    def __init__(self, keywords: KeywordIndex, answering: Callable[[], Awaitable[bool]], gather: float) -> None:
        self._keywords = keywords
        self._answering = answering
        self._gather = gather

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await asyncio.sleep(_LOOK)
            if not self._keywords.unclean:
                continue
            await asyncio.sleep(self._gather)
            until = time.monotonic() + _PATIENCE
            while await self._answering() and time.monotonic() < until:
                await asyncio.sleep(_LOOK)
            for user_id in list(self._keywords.unclean):
                await self._overwrite(user_id)

    async def _overwrite(self, user_id: str) -> None:
        try:
            while await asyncio.to_thread(self._keywords.overwrite, user_id):
                # a search gets the file in between
                await asyncio.sleep(0)
        except KeywordIndexDamaged as exc:
            # the file is gone; the next search rebuilds it
            log.error("keywords.damaged", reason=str(exc))
        except sqlite3.Error as exc:
            log.warning("memory.erasing_waits", reason=str(exc))
            await asyncio.sleep(_PATIENCE)
