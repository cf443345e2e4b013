"""A document in chunks, each with its place. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shared.reading.parts import part


@dataclass(frozen=True, slots=True)
class Block:
    """A paragraph, and where it stands: a page, the headings above it, or a line."""

    place: str
    text: str


@dataclass(frozen=True, slots=True)
class Chunk:
    place: str
    text: str


def chunked(blocks: Iterable[Block], size: int, *, across: bool) -> list[Chunk]:
    """Chunks of at most `size` characters. They end where a paragraph does, else a sentence, else a word.

    across: whether one chunk may hold paragraphs of several places; it is then at the place of the first.
    """
    found: list[Chunk] = []
    place, texts, length = "", list[str](), 0

    def end() -> None:
        nonlocal texts, length
        if texts:
            found.append(Chunk(place, "\n\n".join(texts)))
        texts, length = [], 0

    for block in blocks:
        if not across and block.place != place:
            end()
        for text in _parts(block.text.strip(), size):
            if texts and length + 2 + len(text) > size:
                end()
            if not texts:
                place = block.place
            texts.append(text)
            length += len(text) + (2 if length else 0)
    end()
    return found


def _parts(text: str, size: int) -> Iterator[str]:
    offset = 0
    while offset < len(text):
        said, offset = part(text, offset, size)
        if said:
            yield said


def whole(chunks: Sequence[Chunk]) -> str:
    """The document's text again, with each place named where it begins."""
    lines: list[str] = []
    place = ""
    for chunk in chunks:
        if chunk.place and chunk.place != place:
            lines.append(f"[{chunk.place}]")
        place = chunk.place
        lines.append(chunk.text)
    return "\n\n".join(lines)
