"""What was deleted leaves the disk: a while after a deletion, whatever may still hold its words is overwritten.

A deletion itself is quick: rows and index entries are freed, and nobody is shown them any more. Whose they were is
written down first, so that a process that dies has it done by the next one. The work is the users' keyword files, in
small steps, and the embedded store's database, which is written anew as a whole: while nobody waits for an answer where
that is possible, and for a small part of the time.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import orjson

from services.memory.damage import DATABASE
from services.memory.keywords import KeywordIndex, KeywordIndexDamaged
from services.memory.store import Store
from shared.errors import TransientError
from shared.telemetry.logging import get_logger

log = get_logger()

# Seconds that it waits at most for a moment in which nobody is being answered.
PATIENCE = 60.0
_LOOK = 0.5
# After the store's database was written anew, so many times as long passes before it is again.
_REST = 10.0


class Due:
    """Whose deletions are still to be overwritten: a file with a line for each, so that it outlives the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.wanted = asyncio.Event()
        self._users: set[str] = self._read()
        if path.exists():
            # without a line that was not finished, which the next one would be part of
            self.done()

    def _read(self) -> set[str]:
        if not self._path.exists():
            return set()
        found = set()
        for line in self._path.read_bytes().splitlines():
            # a line that was not finished is of a deletion that was not begun
            try:
                found.add(str(orjson.loads(line)))
            except orjson.JSONDecodeError:
                continue
        return found

    @property
    def users(self) -> frozenset[str]:
        return frozenset(self._users)

    def add(self, user_id: str) -> None:
        """Call it before anything is deleted. Raises TransientError when the disk is full."""
        with self._lock:
            if user_id not in self._users:
                try:
                    with self._path.open("ab") as file:
                        file.write(orjson.dumps(user_id) + b"\n")
                except OSError as exc:
                    raise TransientError(f"{self._path} cannot be written: {exc.strerror or exc}") from exc
                self._users.add(user_id)
        self.wanted.set()

    def take(self) -> frozenset[str]:
        """What is due now; it stays written down until `done`."""
        with self._lock:
            self.wanted.clear()
            taken, self._users = frozenset(self._users), set()
            return taken

    def done(self, failed: frozenset[str] = frozenset()) -> None:
        """What was taken is overwritten, but for what has `failed`; what came since is still due."""
        with self._lock:
            self._users |= failed
            if not self._users:
                self._path.unlink(missing_ok=True)
                return
            fresh = self._path.with_suffix(".new")
            fresh.write_bytes(b"".join(orjson.dumps(one) + b"\n" for one in sorted(self._users)))
            os.replace(fresh, self._path)
        self.wanted.set()


class Erasing:
    """folder: of the embedded store; None for a server, whose disk is its own affair.

    answering: whether somebody is being answered just now. gather: seconds from the first deletion, in which others
    of its kind come.
    """

    def __init__(
        self,
        due: Due,
        store: Store,
        keywords: KeywordIndex,
        folder: Path | None,
        answering: Callable[[], Awaitable[bool]],
        gather: float,
    ) -> None:
        self._due = due
        self._store = store
        self._keywords = keywords
        self._folder = folder
        self._answering = answering
        self._gather = gather
        self.busy = False

    @property
    def pending(self) -> bool:
        return self.busy or bool(self._due.users)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._due.wanted.wait()
            await asyncio.sleep(self._gather)
            until = time.monotonic() + PATIENCE
            while await self._answering() and time.monotonic() < until:
                await asyncio.sleep(_LOOK)
            self.busy = True
            users, failed, began = self._due.take(), frozenset[str](), time.monotonic()
            try:
                await self._overwrite(users)
            except (TransientError, OSError, sqlite3.Error) as exc:
                log.warning("memory.erasing_waits", reason=str(exc))
                failed = users
            finally:
                # a cancelled one is still written down
                self.busy = False
            try:
                self._due.done(failed)
            except OSError as exc:
                # what is still due stands there as before
                log.warning("memory.erasing_waits", reason=str(exc))
                self._due.wanted.set()
            await asyncio.sleep(_REST * (time.monotonic() - began))

    async def _overwrite(self, users: frozenset[str]) -> None:
        for user_id in users:
            try:
                while await asyncio.to_thread(self._keywords.overwrite, user_id):
                    # whoever searches gets the file in between
                    await asyncio.sleep(0)
            except KeywordIndexDamaged as exc:
                # the file is gone; the next search has it made anew
                log.error("keywords.damaged", reason=str(exc))
        if self._folder is not None and self._store.damage is None and (self._folder / DATABASE).exists():
            # what would be read or written meanwhile waits, and does not fail
            await self._store.alone(_anew, self._folder)
        log.info("memory.erased", users=len(users))


def _anew(folder: Path) -> None:
    """Raises TransientError."""
    command = [sys.executable, "-m", "services.memory.overwrite", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TransientError(done.stderr.strip()[-500:] or f"the process ended with {done.returncode}")
