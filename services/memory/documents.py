"""Files of users, and the library of the documents among them: taken in, read, given vectors, found, removed."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import imagesize

from services.memory.blobs import BlobsAway
from services.memory.chunks import chunked, whole
from services.memory.document_reader import DocumentReader
from services.memory.embedding import Embedder
from services.memory.formats import HEAD, IMAGES, KINDS, TYPES, FileRefused, kind_of
from services.memory.incoming import Incoming
from services.memory.library import Bare, Library, LibraryDamaged, LibraryFull, Limits
from services.memory.passages import File, Passage
from services.memory.ranking import min_score_for
from services.memory.settings import DocumentSettings, MemorySettings
from services.memory.vectors import NO_VECTOR, Space
from services.memory.writer import Hook
from shared.bus.keys import DOCUMENT_VECTORS
from shared.contracts import MEMORY_READ, MemoryRead, Outgoing
from shared.envelope import Message
from shared.errors import TransientError
from shared.participant.background import retry_while_transient
from shared.participant.service import Context
from shared.telemetry.logging import get_logger

log = get_logger()

# How much the share of a query's words counts against the similarity in meaning, and what a passage must have of
# either to be a hit at all; measured with `make eval-documents`.
WORDS = 0.5
LEAST_WORDS = 0.25
# The least cosine similarity with all-MiniLM: passages are longer than engrams, so a short question fits them less.
LEAST_SIMILARITY_MINILM = 0.2
# Candidates of each of the two searches for one place in the result.
_PER_PLACE = 6
_LEASE_SECONDS = 30
_LOOK_SECONDS = 5.0
_TIDY_SECONDS = 3_600.0
_WAIT = 0.05
_CUT = "the text is longer than what is read of a document: its end is left out"
# A process that reads it was killed together with the memory, again and again.
_ABANDONED = "it could not be read"


class _Elsewhere(Exception):
    """Vectors are made in another space by now, or by another replica."""


@dataclass(frozen=True, slots=True)
class Found:
    """A passage with its relevance (0…1)."""

    passage: Passage
    relevance: float


class Documents:
    def __init__(
        self,
        context: Context[MemorySettings],
        library: Library,
        reader: DocumentReader,
        embedder: Embedder,
        fault: Hook,
    ) -> None:
        self._context = context
        self.library = library
        self._reader = reader
        self._embedder = embedder
        self._fault = fault
        # files that wait to be read, by user, as far as this replica knows; those that are being read
        self._waiting: dict[str, dict[str, None]] = {}
        self._reading: dict[tuple[str, str], asyncio.Future[None]] = {}
        # users with chunks that may have no vector, and what wakes who makes them
        self._due: set[str] = set()
        self._wake = asyncio.Event()

    @property
    def settings(self) -> DocumentSettings:
        return self._context.settings.documents

    # ── taking in ────────────────────────────────────────────────────────────────────────────────────────────

    async def take(
        self, user_id: str, incoming: Incoming, name: str, mime: str, keep_seconds: float | None, added: int | None
    ) -> tuple[File, bool]:
        """The user's file, and whether it is new. Its text is read soon. Raises FileRefused."""
        kind = kind_of(name, mime, await asyncio.to_thread(_head, incoming))
        if kind in IMAGES:
            await asyncio.to_thread(self._check_image, incoming, name)
        now = self._context.bus.now_ms()
        adding = partial(
            self.library.add,
            *(user_id, incoming.path, name, TYPES[kind], incoming.digest),
            read=kind not in IMAGES,
            expires=None if keep_seconds is None else now + int(keep_seconds * 1000),
            added=now if added is None else added,
            most=Limits(self.settings.max_files, self.settings.max_total_bytes),
        )
        try:
            file, new = await asyncio.to_thread(adding)
        except LibraryFull as exc:
            raise FileRefused("quota_exceeded", str(exc)) from exc
        self._fault("added")
        if file.state == "reading":
            # once more for one that waits already: its entry on the bus may be lost
            await self._wish([(user_id, file.id)])
        return file, new

    async def _wish(self, files: Sequence[tuple[str, str]]) -> None:
        for user_id, id in files:
            self._waiting.setdefault(user_id, {})[id] = None
        wishes = [MemoryRead(user_id=user_id, file_id=id) for user_id, id in files]
        await self._context.bus.publish(*(MEMORY_READ.of(wish, user_id=wish.user_id) for wish in wishes))

    def _check_image(self, incoming: Incoming, name: str) -> None:
        """Its size is in its head: nothing is unpacked."""
        most = self.settings
        size = incoming.path.stat().st_size
        if size > most.max_image_bytes:
            raise FileRefused(
                "too_large", f"{name} has {size} bytes, and an image may have {most.max_image_bytes}: make it smaller"
            )
        try:
            width, height = imagesize.get(str(incoming.path))
        except Exception as exc:
            # whatever a broken head makes it raise
            raise FileRefused("damaged", f"{name} cannot be read as an image") from exc
        if width <= 0 or height <= 0:
            raise FileRefused("damaged", f"{name} cannot be read as an image: it does not say how large it is")
        if width * height > most.max_image_pixels:
            raise FileRefused(
                "too_large",
                f"{name} has {width} x {height} pixels, and an image may have {most.max_image_pixels}: make it smaller",
            )

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────

    async def read(self, message: Message[MemoryRead]) -> Iterable[Outgoing]:
        """Reads a file's text into the library; doing it again changes nothing.

        Everybody else who waits, and has waited since before this user's last file was read, has one read first: who
        adds hundreds of files does not delay who adds one.
        """
        user_id, id = message.payload.user_id, message.payload.file_id
        self._waiting.setdefault(user_id, {})[id] = None
        # users are in the order of their last turns
        ahead = [other for other in self._waiting if other != user_id]
        for other in ahead[: list(self._waiting).index(user_id)]:
            if files := self._waiting.get(other):
                with contextlib.suppress(TransientError):
                    # it has a wish of its own, which waits
                    await self._read_once(other, next(iter(files)))
        # for as long as it takes, however long bucket or disk are in the way
        await retry_while_transient(partial(self._read_once, user_id, id))
        return ()

    async def _read_once(self, user_id: str, id: str) -> None:
        """Reads a file, or waits for whoever is at it. The user's next turn comes after everybody else's."""
        if (files := self._waiting.pop(user_id, None)) is not None:
            files.pop(id, None)
            if files:
                self._waiting[user_id] = files
        while (other := self._reading.get((user_id, id))) is not None:
            # what has failed there is done here
            await asyncio.shield(other)
        done = self._reading[user_id, id] = asyncio.get_running_loop().create_future()
        try:
            await self._read(user_id, id)
        except BlobsAway as exc:
            raise TransientError(str(exc)) from exc
        except LibraryDamaged as exc:
            # Waiting does not help: the restore of a backup adds the file again.
            log.error("document.not_read", reason=str(exc))
        finally:
            del self._reading[user_id, id]
            done.set_result(None)

    async def _read(self, user_id: str, id: str) -> None:
        file = await asyncio.to_thread(self.library.file, user_id, id)
        if file is None or file.state != "reading":
            return
        self._fault("reading")
        try:
            data = await asyncio.to_thread(self._bytes, user_id, file)
            found = await self._reader.read(data, KINDS[file.type], file.name)
        except FileNotFoundError:
            await asyncio.to_thread(self.library.fail, user_id, id, "the file is not there any more: add it again")
        except FileRefused as exc:
            log.info("document.refused", reason=str(exc))
            await asyncio.to_thread(self.library.fail, user_id, id, str(exc))
        else:
            chunks = chunked(found.blocks, self.settings.chunk, across=file.type == TYPES["text"])
            note = _CUT if found.cut else ""
            await asyncio.to_thread(self.library.fill, user_id, id, found.title, chunks, note)
            self._fault("filled")
            self._due.add(user_id)
            self._wake.set()
            log.info("document.read", chunks=len(chunks))

    def _bytes(self, user_id: str, file: File) -> bytes:
        content = self.library.content(user_id, file)
        return content if isinstance(content, bytes) else content.read_bytes()

    async def give_up(self, message: Message[MemoryRead], reason: str) -> Iterable[Outgoing]:
        wish = message.payload
        with contextlib.suppress(LibraryDamaged):
            await asyncio.to_thread(self.library.fail, wish.user_id, wish.file_id, f"{_ABANDONED}: {reason}")
        return ()

    async def settled(self, user_id: str, id: str, seconds: float) -> File | None:
        """The file when it has been read, or after so many seconds as it is then."""
        until = asyncio.get_running_loop().time() + seconds
        while True:
            file = await asyncio.to_thread(self.library.file, user_id, id)
            if file is None or file.state != "reading" or asyncio.get_running_loop().time() >= until:
                return file
            # another replica may be at it
            await asyncio.sleep(_WAIT)

    async def remove(self, user_id: str, id: str) -> bool:
        """Whether there was such a file. Its words are overwritten soon afterwards."""
        found = await asyncio.to_thread(self.library.remove, user_id, id)
        self._wake.set()
        return found

    # ── vectors ──────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Keeps the library in order until cancelled: every chunk gets a vector of the model in use, and what is over
        or left behind goes."""
        await self._begin()
        done: Space | None = None
        tidied = asyncio.get_running_loop().time()
        while True:
            try:
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                done = await self._place_all(done)
            except (TransientError, BlobsAway) as exc:
                log.warning("documents.waiting", reason=str(exc))
            for user_id in list(self.library.unclean):
                await self._overwrite(user_id)
            if asyncio.get_running_loop().time() - tidied > _TIDY_SECONDS:
                tidied = asyncio.get_running_loop().time()
                await asyncio.to_thread(self.library.tidy)

    async def _overwrite(self, user_id: str) -> None:
        try:
            while await asyncio.to_thread(self.library.overwrite, user_id):
                # whoever else wants to write does so in between
                await asyncio.sleep(0)
        except (sqlite3.Error, BlobsAway, LibraryDamaged) as exc:
            # a full disk, a damaged file: the next tidying finds it again
            self.library.unclean.discard(user_id)
            log.warning("documents.not_overwritten", reason=str(exc))

    async def _begin(self) -> None:
        """What was to be read when a process died is wished for again."""
        await asyncio.to_thread(self.library.tidy)
        users = await asyncio.to_thread(self.library.readable_users)
        while True:
            try:
                for user_id in users:
                    with contextlib.suppress(LibraryDamaged):
                        unread = await asyncio.to_thread(self.library.unread, user_id)
                        await self._wish([(user_id, id) for id in unread])
                return
            except TransientError as exc:
                log.warning("documents.waiting", reason=str(exc))
                await asyncio.sleep(_LOOK_SECONDS)

    async def _place_all(self, done: Space | None) -> Space | None:
        """The space in which every chunk has a vector now, as far as is known."""
        space = self._embedder.space
        if space is None or (space == done and not self._due) or not await self._lease():
            return done
        users = self._due if space == done else await asyncio.to_thread(self.library.readable_users)
        # whose turn it is, with the last chunk that was looked at; one batch a turn, whatever somebody has
        turns: dict[str, int | None] = dict.fromkeys(sorted(users), 0)
        self._due.clear()
        try:
            while turns:
                for user_id, after in list(turns.items()):
                    try:
                        turns[user_id] = await self._place(user_id, space, after or 0)
                    except LibraryDamaged as exc:
                        turns[user_id] = None
                        log.error("documents.no_vectors", reason=str(exc))
                turns = {user_id: after for user_id, after in turns.items() if after is not None}
                turns.update(dict.fromkeys(self._due, 0))
                self._due.clear()
        except _Elsewhere:
            return done
        finally:
            # broken off by whatever it was: there is something left to do for these
            self._due.update(turns)
        return space

    async def _lease(self) -> bool:
        """One replica of all does it; another may go on where it stopped."""
        return await self._context.bus.lease(DOCUMENT_VECTORS, self._context.replica, _LEASE_SECONDS * 1000)

    async def _place(self, user_id: str, space: Space, after: int) -> int | None:
        """Gives the user's next chunks their vectors; the last of them, None when there was none. Raises _Elsewhere."""
        bare = await asyncio.to_thread(self.library.bare, user_id, space, self._context.settings.embed_batch, after)
        if not bare:
            return None
        vectors = await self._embedder.documents([embedded(one) for one in bare])
        if self._embedder.space != space or not await self._lease():
            raise _Elsewhere
        placed = [(one.n, vector) for one, vector in zip(bare, vectors, strict=True) if vector is not NO_VECTOR]
        await asyncio.to_thread(self.library.place, user_id, placed)
        self._fault("placed")
        return bare[-1].n

    # ── finding ──────────────────────────────────────────────────────────────────────────────────────────────

    async def search(
        self, user_id: str, query: str, limit: int | None = None, only: Sequence[str] | None = None
    ) -> list[Found]:
        """Return the best passages, best first.

        only: ids of files to search; then passages that fit the query less fill the result. If none fits, the first
        passage of each file leads.
        """
        most = limit or self.settings.n_results
        vector = await self._embedder.query(query) if query.strip() else None
        passages = await asyncio.to_thread(self.library.search, user_id, query, vector, most * _PER_PLACE, only)
        fitting = ranked(passages, least_similarity_for(self._embedder.using))
        return (fitting if only is None else filled(fitting, passages))[:most]

    async def content(self, user_id: str, id: str, *, text: bool, wait: float) -> tuple[File, Path | bytes] | None:
        """Return the user's file with its bytes, or with its text as a whole.

        text: the text, which is waited for `wait` seconds if it has not been read. None: the file is not there.
        """
        file = await (self.settled(user_id, id, wait) if text else asyncio.to_thread(self.library.file, user_id, id))
        if file is None:
            return None
        if text:
            return file, whole(await asyncio.to_thread(self.library.text, user_id, file)).encode()
        try:
            return file, await asyncio.to_thread(self.library.content, user_id, file)
        except FileNotFoundError:
            return None


def embedded(bare: Bare) -> str:
    """What is embedded of a chunk: where it stands says what it is about."""
    return "\n".join(part for part in (bare.title, bare.chunk.place, bare.chunk.text) if part)


def least_similarity_for(embedding_model: str) -> float:
    """Return the least similarity of a fitting passage for an embedding model, by the model's name."""
    return LEAST_SIMILARITY_MINILM if "minilm" in embedding_model.lower() else min_score_for(embedding_model)


def ranked(passages: Iterable[Passage], least: float) -> list[Found]:
    """Those that have to do with the query, best first. `least`: similarity below which the words must tell."""
    found = [
        Found(passage, (1 - WORDS) * max(passage.similarity or 0.0, 0.0) + WORDS * passage.words)
        for passage in passages
        if (passage.similarity or 0.0) >= least or passage.words >= LEAST_WORDS
    ]
    return sorted(found, key=lambda one: (-one.relevance, one.passage.n))


def filled(fitting: Sequence[Found], passages: Iterable[Passage]) -> list[Found]:
    """Return the fitting passages and then the others, best first. If none fits, the first of each file leads."""
    everything = ranked(passages, -1.0)
    first = {one.passage.file.id: one for one in sorted(everything, key=lambda one: -one.passage.n)}
    leading = fitting or sorted(first.values(), key=lambda one: one.passage.n)
    chosen = {one.passage.n for one in leading}
    return [*leading, *(one for one in everything if one.passage.n not in chosen)]


def _head(incoming: Incoming) -> bytes:
    with incoming.path.open("rb") as file:
        return file.read(HEAD)
