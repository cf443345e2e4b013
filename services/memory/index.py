"""The keyword index and the catalog of one replica. Both follow the store, which is the truth.

A replica applies its own changes at once, and those of others as they come on `memory.changed`. Its mark says up to
which change its index is complete. Where the stream no longer has all changes after the mark, the replica rebuilds the
index from the store; a replica of a Chroma server does so at each start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import orjson

from services.memory.catalog import Catalog
from services.memory.engram import Engram
from services.memory.keywords import Entry, KeywordIndex, KeywordIndexDamaged, Seen
from services.memory.store import Placed, Store
from services.memory.text import keyword_text
from services.memory.vectors import Vector
from shared.bus import order
from shared.contracts import MEMORY_CHANGED, MemoryChanged
from shared.envelope import Envelope
from shared.errors import DecodeError, TransientError
from shared.participant.service import Context
from shared.telemetry.logging import get_logger

log = get_logger()

R = TypeVar("R")

_MARK_SECONDS = 2.0
_RETRY_SECONDS = 1.0
# Files that are read in one go, and how many threads read some.
_PART, _ABREAST = 100, 4


def entry(engram: Engram, vector: Vector | None = None) -> Entry:
    data = orjson.dumps(engram.flat()).decode()
    # half precision is enough to compare by
    place, model = None, ""
    if vector is not None and vector.model:
        place, model = np.asarray(vector.values, dtype=np.float16).tobytes(), vector.model
    if not engram.shown:
        # No search and no conversation finds it. Its data is kept for a repair of the store.
        return Entry(engram.id, "", "", data, place, model, "", engram.time)
    text = keyword_text(*engram.said(), engram.said_at)
    return Entry(engram.id, text, engram.before, data, place, model, talk_of(engram), engram.time)


def talk_of(engram: Engram) -> str:
    """What the turns of one session with one respondent have in common; '' for what stands in no session's order."""
    in_order = engram.session_id and engram.kind != "topic"
    return f"{engram.respondent_id}:{engram.session_id}" if in_order else ""


def engrams_of(found: Mapping[str, str], user_id: str) -> dict[str, Engram]:
    """What the index has kept of engrams, read; nothing of another user, which must not be there."""
    read = (Engram.from_flat(one, orjson.loads(data)) for one, data in found.items() if data)
    return {engram.id: engram for engram in read if engram.user_id == user_id}


def similarities(hits: Iterable[Seen], vector: Vector) -> dict[str, float]:
    """The cosine of each one with the vector, where its own is known and can be compared."""
    size = 2 * len(vector.values)
    placed = [hit for hit in hits if hit.vector is not None and hit.model == vector.model and len(hit.vector) == size]
    if not placed:
        return {}
    places = np.frombuffer(b"".join(hit.vector or b"" for hit in placed), dtype=np.float16).reshape(len(placed), -1)
    found = places.astype(np.float32) @ np.asarray(vector.values, dtype=np.float32)
    return {hit.id: float(value) for hit, value in zip(placed, found, strict=True)}


class Index:
    def __init__(self, context: Context[Any], store: Store, keywords: KeywordIndex) -> None:
        self._context = context
        self._store = store
        self._keywords = keywords
        self.catalog = Catalog()
        self.ready = asyncio.Event()
        # Removals while the store is being read: it may have been read before them.
        self._removed: list[tuple[str, list[str] | None]] = []
        self._at = "0-0"
        # Own changes that may have been applied after a newer one of another writer.
        self._look_again: set[str] = set()

    # ── this replica's own changes ───────────────────────────────────────────────────────────────────────────

    async def put(
        self,
        user_id: str,
        engrams: Sequence[Engram],
        vectors: Mapping[str, Vector] | None = None,
        *,
        look_again: bool = False,
    ) -> None:
        """Call it after the store has them. `vectors`: those that were written with them.

        look_again: another writer may have changed them since; they are read once more from the store afterwards.
        """
        await self._add(user_id, [Placed(engram, (vectors or {}).get(engram.id)) for engram in engrams])
        if look_again:
            self._look_again.update(engram.id for engram in engrams)
        await self._tell(MemoryChanged(user_id=user_id, put=[engram.id for engram in engrams]))

    async def remove(self, user_id: str, ids: Sequence[str]) -> None:
        await self._remove(user_id, ids)
        await self._tell(MemoryChanged(user_id=user_id, removed=list(ids)))

    async def remove_user(self, user_id: str) -> None:
        await self._remove_user(user_id)
        await self._tell(MemoryChanged(user_id=user_id, all=True))

    async def look(self, user_id: str, work: Callable[[KeywordIndex], R]) -> R | None:
        """Return what the work finds in the keyword index, in a thread. None if the user's file is damaged; it is
        rebuilt then."""
        try:
            return await asyncio.to_thread(work, self._keywords)
        except KeywordIndexDamaged as exc:
            log.error("keywords.damaged", reason=str(exc))
            self._context.supervise("repair words", partial(self._repair, user_id))
            return None

    async def _tell(self, change: MemoryChanged) -> None:
        await self._context.bus.publish(MEMORY_CHANGED.of(change, user_id=change.user_id))

    async def _add(self, user_id: str, placed: Sequence[Placed]) -> None:
        self.catalog.add([one.engram for one in placed])
        try:
            await asyncio.to_thread(lambda: self._keywords.add(user_id, self._entries(placed)))
        except KeywordIndexDamaged as exc:
            log.error("keywords.damaged", reason=str(exc))
            await self._repair(user_id)

    def _entries(self, placed: Iterable[Placed]) -> list[Entry]:
        return [entry(one.engram, one.vector) for one in placed]

    async def _remove(self, user_id: str, ids: Sequence[str]) -> None:
        if not self.ready.is_set():
            self._removed.append((user_id, list(ids)))
        self.catalog.remove(user_id, ids)
        try:
            await asyncio.to_thread(self._keywords.remove, user_id, list(ids))
        except KeywordIndexDamaged as exc:
            # the damaged file is gone, and what was to be removed with it
            log.error("keywords.damaged", reason=str(exc))
            await self._repair(user_id)

    async def _remove_user(self, user_id: str) -> None:
        if not self.ready.is_set():
            self._removed.append((user_id, None))
        self.catalog.remove_user(user_id)
        await asyncio.to_thread(self._keywords.remove_user, user_id)

    async def _repair(self, user_id: str) -> None:
        """Rebuild the user's index from the store; repeat that if engrams were added or removed meanwhile."""
        ids: list[str] | None = None
        while (there := self.catalog.ids(user_id)) != ids:
            ids = there
            try:
                placed = await self._store.placed(user_id, ids)
            except TransientError as exc:
                log.warning("index.waits", reason=str(exc))
                await asyncio.sleep(_RETRY_SECONDS)
                ids = None
                continue
            await asyncio.to_thread(self._replace, user_id, placed)

    def _replace(self, user_id: str, placed: Mapping[str, Placed]) -> None:
        self._keywords.replace(user_id, self._entries(placed.values()))

    # ── the store and the other replicas ─────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Reads the store, then follows the changes of other replicas; until cancelled."""
        follower, said = None, ""
        while True:
            try:
                if follower is None:
                    start = await self._start()
                    follower = self._context.tail.follow(MEMORY_CHANGED.stream, start)
                await self._follow(follower)
            except TransientError as exc:
                if str(exc) != said:
                    log.warning("index.waits", reason=str(exc))
                    said = str(exc)
                await asyncio.sleep(_RETRY_SECONDS)

    async def _start(self) -> str:
        """Fill the catalog, and rebuild the index if it missed changes. Return the id after which to follow them."""
        newest: str = await self._context.bus.newest(MEMORY_CHANGED.stream)
        mark = await asyncio.to_thread(self._keywords.mark)
        start = newest if mark is None or await self._missed(mark) else mark
        if start == mark:
            await self._load()
        else:
            # A collection that cannot be read raises here: until then its engrams are in this index only.
            users = {one.user_id for one in await self._store.collections()}
            log.info("index.rebuild", mark=mark, users=len(users))
            await asyncio.to_thread(self._keywords.clear)
            async for user_id, placed in self._store.scan():
                await self._fill(user_id, placed)
        self.ready.set()
        removed, self._removed = self._removed, []
        for user_id, ids in removed:
            await (self._remove_user(user_id) if ids is None else self._remove(user_id, ids))
        if start != mark:
            await asyncio.to_thread(self._keywords.set_mark, start)
        log.info("index.ready", engrams=len(self.catalog), users=len(self.catalog.users()))
        return start

    async def _load(self) -> None:
        """Fill the catalog from the index, and from the store for users whose files vanished or cannot be read."""
        # at the same time: both take half a millisecond for each user
        users, _ = await asyncio.gather(self._store.users(), self._load_known())
        for user_id in users - set(self.catalog.users()):
            async for placed in self._store.of_user(user_id):
                await self._add(user_id, placed)

    async def _load_known(self) -> None:
        files = await asyncio.to_thread(self._keywords.files)
        parts = [files[at : at + _PART] for at in range(0, len(files), _PART)]
        # Several parts at once: a slow disk reads them in a fraction of the time.
        for at in range(0, len(parts), _ABREAST):
            if self._store.damage is not None:
                return
            reading = (asyncio.to_thread(self._keywords.known, part) for part in parts[at : at + _ABREAST])
            for engrams in await asyncio.gather(*reading):
                # what this replica has added meanwhile is newer
                self.catalog.add(one for one in engrams if self.catalog.owner(one.id) is None)

    async def _fill(self, user_id: str, placed: Sequence[Placed]) -> None:
        self.catalog.add([one.engram for one in placed])
        await asyncio.to_thread(self._keywords.add, user_id, self._entries(placed))

    async def _missed(self, mark: str) -> bool:
        """Whether the stream no longer has everything after the mark."""
        oldest = await self._context.bus.range(MEMORY_CHANGED.stream, "-", "+", 1)
        if not oldest:
            # an empty stream behind an old mark: Redis has lost what was told
            return mark != "0-0"
        return order(mark) < order(oldest[0][0]) and mark != "0-0"

    async def _follow(self, follower: Any) -> None:
        loop = asyncio.get_running_loop()
        saved = loop.time()
        while True:
            for entry_id, fields in await follower.next():
                try:
                    envelope = Envelope.parse(MEMORY_CHANGED.name, entry_id, fields)
                    change = MEMORY_CHANGED.decode(envelope)
                except DecodeError as exc:
                    log.warning("index.malformed_change", entry_id=entry_id, reason=str(exc))
                    continue
                if envelope.source != self._context.bus.source or self._look_again.intersection(change.put):
                    self._look_again.difference_update(change.put)
                    await self._apply(change)
                self._at = entry_id
            if loop.time() - saved > _MARK_SECONDS:
                saved = loop.time()
                await asyncio.to_thread(self._keywords.set_mark, self._at)

    async def _apply(self, change: MemoryChanged) -> None:
        while True:
            try:
                self._store.forget_lists(change.user_id)
                if change.all:
                    await self._remove_user(change.user_id)
                    return
                found = await self._store.placed(change.user_id, change.put)
                if found:
                    await self._add(change.user_id, list(found.values()))
                if gone := [*change.removed, *(one for one in change.put if one not in found)]:
                    await self._remove(change.user_id, gone)
                return
            except TransientError as exc:
                log.warning("index.waits", reason=str(exc))
                await asyncio.sleep(_RETRY_SECONDS)
