"""Texts to vectors: what each embedding model wants, batches, patience while the model is away, and who stands in.

A server that cannot embed at all (it was started without, does not have the model, refuses the key) is not waited for:
the built-in model stands in where it is installed, else memories are kept without a vector and found by their words.
The server is looked at again now and then; `space` says whose vectors are made now.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from services.memory.throttle import Pace
from services.memory.vectors import NO_VECTOR, Space, Vector
from shared.errors import ModelError
from shared.llm.builtin import NAME as BUILT_IN
from shared.llm.factory import ClosableEmbeddingModel
from shared.llm.port import (
    AccessRefused,
    ContextOverflow,
    EmbeddingModel,
    ModelMissing,
    ModelRejected,
    NotOffered,
)
from shared.telemetry.logging import get_logger

log = get_logger()

# A search does not wait longer than this for its vector: it goes on with the words alone.
QUERY_TIMEOUT = 4.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 10.0
# How often a server is looked at that is away; of one that cannot embed ever more rarely.
_PROBE_SECONDS, _LONGEST_PROBE = 5.0, 60.0
_PROBE = "ping"
# A text this short that the model refuses is not refused for its length.
_SHORT = 200
# With one of these the server says no for good, whatever the text.
_FINAL = (NotOffered, ModelMissing, AccessRefused)


@dataclass(frozen=True, slots=True)
class Profile:
    """What a model was trained with, and how much text it reads."""

    document: str = ""
    query: str = ""
    max_chars: int = 6_000


_PROFILES = {
    "nomic-embed-text": Profile("search_document: ", "search_query: "),
    "all-minilm": Profile(max_chars=1_000),
    "mxbai-embed-large": Profile(query="Represent this sentence for searching relevant passages: ", max_chars=1_800),
    "snowflake-arctic-embed": Profile(
        query="Represent this sentence for searching relevant passages: ", max_chars=1_800
    ),
    "embeddinggemma": Profile("title: none | text: ", "task: search result | query: "),
}


def profile(model: str) -> Profile:
    """By the model's name, without its path and tag."""
    name = model.rpartition("/")[2].partition(":")[0].lower()
    return _PROFILES.get(name, Profile())


@dataclass(slots=True)
class _Wish:
    text: str
    vector: asyncio.Future[Vector]


class Embedder:
    """`documents` waits as long as the model is away; `query` does not.

    stand_in: the built-in model, None where it is not installed or not wanted.
    """

    def __init__(
        self,
        backend: ClosableEmbeddingModel,
        model: str,
        batch: int,
        pace: Pace,
        stand_in: EmbeddingModel | None = None,
    ) -> None:
        self._backend = backend
        self.model = model
        self._batch = batch
        self._pace = pace
        self._stand_in = stand_in
        self._wishes: asyncio.Queue[_Wish] = asyncio.Queue()
        self._running: list[_Wish] = []
        # why nothing can be embedded just now
        self.away: str | None = None
        # why the server does not embed at all, and since when (the loop's time)
        self.lacking: str | None = None
        self.lacking_since = 0.0
        # measured; None until the first vector, and where there is no model
        self.space: Space | None = None
        # set whenever `space` is another one than before
        self.moved = asyncio.Event()

    @property
    def waiting(self) -> int:
        return self._wishes.qsize() + len(self._running)

    @property
    def using(self) -> str:
        """Whose vectors are made now; nobody's is ''."""
        if self.lacking is None:
            return self.model
        return "" if self._stand_in is None else BUILT_IN

    @property
    def trouble(self) -> str | None:
        """What is not as it should be, as a sentence for people; None when all is well."""
        if self.lacking is None:
            return self.away and f"embedding model {self.model}: {self.away}"
        instead = "by their words alone" if self._stand_in is None else f"by the small built-in model {BUILT_IN}"
        return f"embedding model {self.model}: {self.lacking}; until then memories are found {instead}" + (
            f" ({self.away})" if self.away else ""
        )

    async def documents(self, texts: Sequence[str]) -> list[Vector]:
        """One vector a text, NO_VECTOR where there is no model or it refuses the text; texts of several callers share
        a call."""
        loop = asyncio.get_running_loop()
        wishes = [_Wish(text, loop.create_future()) for text in texts]
        for wish in wishes:
            self._wishes.put_nowait(wish)
        try:
            return [await wish.vector for wish in wishes]
        finally:
            for wish in wishes:
                wish.vector.cancel()

    async def soon(self, texts: Sequence[str], timeout: float = QUERY_TIMEOUT) -> list[Vector] | None:
        """The same without waiting for a model that is away: None then, and when it refuses one of the texts."""
        return await self._at_once(texts, timeout, query=False)

    async def plain(self, texts: Sequence[str], timeout: float) -> list[Vector]:
        """Vectors of the texts as they are, without what the model wants before a document or a question.

        Raises ModelError: nobody embeds now, or the model refuses one of the texts.
        """
        if self.away is not None:
            raise ModelError(str(self.trouble))
        try:
            async with asyncio.timeout(timeout):
                found = await self._embed(texts, prefixed=False)
        except TimeoutError as exc:
            raise ModelError(f"{self.using} did not answer within {timeout:g} s") from exc
        if any(vector is NO_VECTOR for vector in found):
            raise ModelError(str(self.trouble))
        return found

    async def query(self, text: str) -> Vector | None:
        """The vector of a question; None while there is no model that answers."""
        found = await self._at_once([text], QUERY_TIMEOUT, query=True)
        return found[0] if found and found[0] is not NO_VECTOR else None

    async def _at_once(self, texts: Sequence[str], timeout: float, *, query: bool) -> list[Vector] | None:
        if self.away is not None:
            return None
        try:
            async with asyncio.timeout(timeout):
                return await self._embed(texts, query=query)
        except (ModelError, TimeoutError) as exc:
            if not isinstance(exc, ModelRejected | ContextOverflow):
                self._note(str(exc) or f"{self.using} did not answer within {timeout:g} s")
            return None

    async def _embed(self, texts: Sequence[str], *, query: bool = False, prefixed: bool = True) -> list[Vector]:
        """Raises ModelError: the model is away, or refuses one of the texts."""
        if self.lacking is None:
            try:
                return await self._asked(self._backend, self.model, texts, query=query, prefixed=prefixed)
            except _FINAL as exc:
                self._lack(str(exc))
        if self._stand_in is not None:
            try:
                return await self._asked(self._stand_in, BUILT_IN, texts, query=query, prefixed=prefixed)
            except ModelError as exc:
                # it is in this process: what fails once fails again
                log.error("embedding.no_stand_in", reason=str(exc))
                self._stand_in, self.space = None, None
        return [NO_VECTOR for _ in texts]

    async def _asked(
        self, source: EmbeddingModel, name: str, texts: Sequence[str], *, query: bool, prefixed: bool = True
    ) -> list[Vector]:
        wants = profile(name)
        prefix = (wants.query if query else wants.document) if prefixed else ""
        found = await source.embed(name, [prefix + text[: wants.max_chars] for text in texts])
        if source is self._backend and self.lacking is not None:
            self.lacking = None
            log.info("embedding.back", model=name)
        self._note(None)
        vectors = [Vector(name, values) for values in found]
        if vectors and name == self.using and self.space != vectors[0].space:
            self.space = vectors[0].space
            self.moved.set()
        return vectors

    def _lack(self, reason: str) -> None:
        if self.lacking is None:
            log.warning("embedding.none", model=self.model, reason=reason, instead=self._stand_in and BUILT_IN)
            self.lacking_since = asyncio.get_running_loop().time()
            self.space = None
        self.lacking = reason
        self._note(None)

    def _note(self, reason: str | None) -> None:
        if reason is not None and self.away is None:
            log.warning("embedding.away", model=self.using, reason=reason)
        elif reason is None and self.away is not None:
            log.info("embedding.back", model=self.using)
        self.away = reason

    async def run(self) -> None:
        """Serves `documents` until cancelled, one call at a time: searches find the model free in between."""
        while True:
            self._running = [await self._wishes.get()]
            most, began = await self._pace.turn(self._batch)
            while len(self._running) < most and not self._wishes.empty():
                self._running.append(self._wishes.get_nowait())
            self._running = [wish for wish in self._running if not wish.vector.done()]
            if self._running:
                await self._serve(self._running)
                await self._pace.done(began)
            self._running = []

    async def _serve(self, wishes: list[_Wish]) -> None:
        pause = _FIRST_PAUSE
        while wishes := [wish for wish in wishes if not wish.vector.done()]:
            try:
                vectors = await self._embed([wish.text for wish in wishes])
            except (ModelRejected, ContextOverflow) as exc:
                await self._refused(wishes, exc)
                return
            except ModelError as exc:
                self._note(str(exc))
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
            else:
                for wish, vector in zip(wishes, vectors, strict=True):
                    if not wish.vector.done():
                        wish.vector.set_result(vector)
                return

    async def _refused(self, wishes: list[_Wish], exc: ModelError) -> None:
        """One of the texts is too much for the model: each by itself, and that one shorter. A model that refuses the
        plainest of texts refuses all."""
        if len(wishes) > 1:
            for wish in wishes:
                await self._serve([wish])
            return
        (wish,) = wishes
        try:
            await self._embed([_PROBE])
        except (ModelRejected, ContextOverflow) as always:
            self._lack(str(always))
        except ModelError as passing:
            self._note(str(passing))
        else:
            limit = min(len(wish.text), profile(self.using).max_chars)
            if limit <= _SHORT:
                # it is still found by its words
                log.warning("embedding.refused", model=self.using, reason=str(exc))
                wish.vector.set_result(NO_VECTOR)
                return
            wish.text = wish.text[: limit // 2]
        await self._serve(wishes)

    async def probe(self) -> None:
        """Call `look` now and then, until cancelled."""
        pause = _PROBE_SECONDS
        while True:
            pause = _PROBE_SECONDS if self.lacking is None else min(2 * pause, _LONGEST_PROBE)
            await self.look()
            await asyncio.sleep(pause)

    async def look(self) -> None:
        """Ask a model that is away, cannot embed, or was never asked, whether it embeds now."""
        if self.lacking is not None:
            await self._look_again()
        elif self.away is not None or self.space is None:
            await self._look()

    async def _look(self) -> None:
        try:
            async with asyncio.timeout(QUERY_TIMEOUT * 3):
                await self._embed([_PROBE])
        except (ModelRejected, ContextOverflow) as exc:
            self._lack(str(exc))
        except (ModelError, TimeoutError) as exc:
            self._note(str(exc) or f"{self.using} does not answer")

    async def _look_again(self) -> None:
        try:
            async with asyncio.timeout(QUERY_TIMEOUT * 3):
                await self._asked(self._backend, self.model, [_PROBE], query=False)
        except (ModelRejected, ModelMissing) as exc:
            self.lacking = str(exc)
        except (ModelError, TimeoutError) as exc:
            # one that is away now may still not embed when it is back
            log.info("embedding.still_none", model=self.model, reason=str(exc) or "no answer")


@asynccontextmanager
async def open_embedder(
    backend: ClosableEmbeddingModel, model: str, batch: int, pace: Pace, stand_in: EmbeddingModel | None = None
) -> AsyncIterator[Embedder]:
    """An embedder with what it does in the background. A failure there that is not a model's is a bug, and ends the
    block: nothing would be taken in any more."""
    embedder = Embedder(backend, model, batch, pace, stand_in)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(embedder.run()), group.create_task(embedder.probe())]
            try:
                yield embedder
            finally:
                for task in tasks:
                    task.cancel()
    finally:
        await backend.aclose()
