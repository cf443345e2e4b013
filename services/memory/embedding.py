"""Texts to vectors: what each embedding model wants, batches, and patience while the model is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from services.memory.pace import Pace
from shared.errors import ModelError, PermanentError
from shared.llm.factory import ClosableEmbeddingModel
from shared.llm.port import ContextOverflow, ModelRejected
from shared.telemetry.logging import get_logger

log = get_logger()

# A search does not wait longer than this for its vector: it goes on with the words alone.
QUERY_TIMEOUT = 4.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 10.0
_PROBE_SECONDS = 5.0
# A text this short that the model refuses is not refused for its length.
_SHORT = 200
_NO_TEXT = "-"


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
    vector: asyncio.Future[list[float]]


class Embedder:
    """`documents` waits as long as the model is away; `query` does not."""

    def __init__(self, backend: ClosableEmbeddingModel, model: str, batch: int, pace: Pace) -> None:
        self._backend = backend
        self.model = model
        self.profile = profile(model)
        self._batch = batch
        self._pace = pace
        self._wishes: asyncio.Queue[_Wish] = asyncio.Queue()
        self._running: list[_Wish] = []
        self.away: str | None = None
        # whether the model has answered once
        self.known = False

    @property
    def waiting(self) -> int:
        return self._wishes.qsize() + len(self._running)

    async def documents(self, texts: Sequence[str]) -> list[list[float]]:
        """One vector a text; texts of several callers share a call. Raises PermanentError for a text that the model
        refuses."""
        loop = asyncio.get_running_loop()
        wishes = [_Wish(self._document(text), loop.create_future()) for text in texts]
        for wish in wishes:
            self._wishes.put_nowait(wish)
        try:
            return [await wish.vector for wish in wishes]
        finally:
            for wish in wishes:
                wish.vector.cancel()

    async def soon(self, texts: Sequence[str], timeout: float = QUERY_TIMEOUT) -> list[list[float]] | None:
        """The same without waiting for a model that is away: None then."""
        return await self._at_once([self._document(text) for text in texts], timeout)

    async def query(self, text: str) -> list[float] | None:
        """The vector of a question; None while the model is away."""
        found = await self._at_once([self.profile.query + text[: self.profile.max_chars]], QUERY_TIMEOUT)
        return found[0] if found else None

    async def _at_once(self, texts: Sequence[str], timeout: float) -> list[list[float]] | None:
        if self.away is not None:
            return None
        try:
            async with asyncio.timeout(timeout):
                return await self._embed(texts)
        except (ModelError, TimeoutError) as exc:
            if not isinstance(exc, ModelRejected | ContextOverflow):
                self._note(str(exc) or f"{self.model} did not answer within {timeout:g} s")
            return None

    def _document(self, text: str) -> str:
        return self.profile.document + text[: self.profile.max_chars]

    async def _embed(self, texts: Sequence[str]) -> list[list[float]]:
        vectors = await self._backend.embed(self.model, texts)
        self.known = True
        self._note(None)
        return vectors

    def _note(self, reason: str | None) -> None:
        if reason is not None and self.away is None:
            log.warning("embedding.away", model=self.model, reason=reason)
        elif reason is None and self.away is not None:
            log.info("embedding.back", model=self.model)
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
        while True:
            try:
                vectors = await self._embed([wish.text for wish in wishes])
            except (ModelRejected, ContextOverflow) as exc:
                await self._refused(wishes, exc)
                return
            except ModelError as exc:
                self._note(str(exc))
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
                wishes = [wish for wish in wishes if not wish.vector.done()]
                if not wishes:
                    return
            else:
                for wish, vector in zip(wishes, vectors, strict=True):
                    if not wish.vector.done():
                        wish.vector.set_result(vector)
                return

    async def _refused(self, wishes: list[_Wish], exc: ModelError) -> None:
        """One of the texts is too much for the model: each by itself, and that one shorter, until nothing is left."""
        if len(wishes) > 1:
            for wish in wishes:
                await self._serve([wish])
            return
        (wish,) = wishes
        if len(wish.text) > _SHORT:
            wish.text = wish.text[: len(wish.text) // 2]
        elif wish.text != _NO_TEXT:
            # it is still found by its words
            log.warning("embedding.refused", model=self.model, reason=str(exc))
            wish.text = _NO_TEXT
        else:
            if not wish.vector.done():
                wish.vector.set_exception(PermanentError(f"{self.model} refuses every text: {exc}"))
            return
        await self._serve(wishes)

    async def probe(self) -> None:
        """Looks now and then whether a model that is away, or was never asked, is there; until cancelled."""
        while True:
            if self.away is not None or not self.known:
                try:
                    async with asyncio.timeout(QUERY_TIMEOUT * 3):
                        await self._embed(["ping"])
                except (ModelError, TimeoutError) as exc:
                    self._note(str(exc) or f"{self.model} does not answer")
            await asyncio.sleep(_PROBE_SECONDS)


@asynccontextmanager
async def open_embedder(backend: ClosableEmbeddingModel, model: str, batch: int, pace: Pace) -> AsyncIterator[Embedder]:
    embedder = Embedder(backend, model, batch, pace)
    tasks = [asyncio.create_task(embedder.run()), asyncio.create_task(embedder.probe())]
    try:
        yield embedder
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await backend.aclose()
