"""Reads pages in processes of their own, which are kept warm, and killed when a page takes more than it may."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from services.web_fetch.errors import FetchError
from services.web_fetch.page import Page
from shared.reading.parts import part
from shared.reading.pdf import Why, is_pdf
from shared.reading.process import Died, ReadingProcess
from shared.telemetry.logging import get_logger

log = get_logger()

PROCESSES = 2
# A page with more of either may take seconds.
LARGE_BYTES, LARGE_TAGS = 500_000, 10_000
# The memory of a process that has read so many pages, or a large one, is in pieces.
MANY_PAGES = 500
_CHILD = "services.web_fetch.child"
_PDF_CHILD = "shared.reading.pdf_child"
_UNREADABLE: dict[Why, str] = {
    "password": "the PDF is protected by a password",
    "encryption": "the PDF is encrypted in a way that is not understood: {}",
    "damaged": "the PDF is damaged and cannot be read: {}",
    "no_text": "the PDF has no text on its {} pages, only pictures (a scan)",
}


@dataclass(frozen=True, slots=True)
class Reading:
    """A part of a page's text: `after` is where the next one begins, `cut` says that the page was longer than read.

    links: of the whole main text, each with `text` and `url`. refresh: the URL of the page's refresh, or "". note: why
    only a part of the page was read, if the reason is not the size limit. has_text: the page has more than a title.
    """

    title: str
    text: str
    chars: int
    after: int
    cut: bool
    links: list[dict[str, str]]
    refresh: str
    note: str = ""
    has_text: bool = True


class Reader:
    """A fixed number of places, each with a warm process or none yet."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(PROCESSES)
        self._idle: list[ReadingProcess] = []
        self._alive = 0
        # Of large pages one is read at a time: for the others there is always a place.
        self._large = asyncio.Lock()

    async def read(self, page: Page, offset: int, max_chars: int, seconds: float = 10.0) -> Reading:
        """Return a part of the page's text. Raises FetchError.

        A page that is too heavy for the extractor is read again without parsing. seconds: after this time the parser
        begins no further page of a PDF.
        """
        if page.pdf:
            return await self._read_pdf(page, offset, max_chars, seconds)
        request = {
            "url": str(page.url),
            "declared": page.declared,
            "content_type": page.content_type,
            "cut": page.cut,
            "offset": offset,
            "max_chars": max_chars,
        }
        large = len(page.data) > LARGE_BYTES or page.data.count(b"<") > LARGE_TAGS
        async with self._large if large else contextlib.nullcontext():
            for plain in (False, True):
                try:
                    answer = await self._ask({**request, "plain": plain}, page.data, large=large)
                    return Reading(**answer, note=page.note)
                except Died:
                    log.warning("page.too_heavy", url=str(page.url), bytes=len(page.data), plain=plain)
        raise FetchError("the page takes more time or memory than a page may")

    async def _read_pdf(self, page: Page, offset: int, max_chars: int, seconds: float) -> Reading:
        async with self._places:
            # The PDF's process takes the place, and the memory, of a process that reads pages.
            if self._idle and self._alive >= PROCESSES:
                await self._end(self._idle.pop())
            child = await self._start(_PDF_CHILD)
            try:
                answer = await child.ask({"seconds": seconds}, page.data)
            except Died as exc:
                log.warning("pdf.too_heavy", url=str(page.url), bytes=len(page.data))
                raise FetchError("the PDF takes more time or memory than a PDF may") from exc
            finally:
                await self._end(child)
        if "why" in answer:
            if answer["why"] == "damaged" and not is_pdf(page.data):
                raise FetchError(f"the file is not a PDF, although its content type is {page.content_type!r}")
            raise FetchError(_UNREADABLE[answer["why"]].format(answer["detail"]))
        text = _with_pages(answer["blocks"])
        offset = min(offset, len(text))
        shown, after = part(text, offset, max_chars)
        cut = answer["read"] < answer["pages"]
        note = f"the PDF has {answer['pages']} pages, of which {answer['read']} were read" if cut else ""
        return Reading(answer["title"], shown, len(text), after, cut, [], "", note)

    async def _ask(self, request: dict[str, Any], data: bytes, *, large: bool) -> dict[str, Any]:
        async with self._places:
            # A large page is its process's last one: it leaves the warm process to the others where it can.
            warm = bool(self._idle) and (not large or self._alive >= PROCESSES)
            child = self._idle.pop() if warm else await self._start(_CHILD)
            keep = False
            try:
                answer = await child.ask(request, data)
                keep = not large and child.asked < MANY_PAGES
            finally:
                if keep:
                    self._idle.append(child)
                else:
                    await self._end(child)
            return answer

    async def _start(self, module: str) -> ReadingProcess:
        self._alive += 1
        try:
            return await ReadingProcess.start(module)
        except BaseException:
            self._alive -= 1
            raise

    async def _end(self, child: ReadingProcess) -> None:
        self._alive -= 1
        await child.end()

    async def close(self) -> None:
        """Ends the processes; those that are at a page are ended by whoever waits for it."""
        while self._idle:
            await self._end(self._idle.pop())


def _with_pages(blocks: list[tuple[int, str]]) -> str:
    """Return the paragraphs as lines below their page numbers."""
    pages = groupby(blocks, key=itemgetter(0))
    return "\n\n".join("\n".join([f"[page {number}]", *(text for _, text in found)]) for number, found in pages)


@asynccontextmanager
async def open_reader() -> AsyncIterator[Reader]:
    reader = Reader()
    try:
        yield reader
    finally:
        await reader.close()
