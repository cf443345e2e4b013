"""A user's files, and what a search finds in them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.gateway.http.shape import Shape
from shared.records.events import Attached


class StoredFile(Shape):
    id: str
    name: str
    type: str = Field(description="As it was found out from its content")
    size: int = Field(description="Bytes")
    sha256: str
    added: int = Field(description="Milliseconds since the epoch")
    expires: int | None = Field(description="When it is removed by itself, in the same; null: never")
    state: Literal["reading", "ready", "failed"]
    reason: str | None = Field(description="Why it could not be read, or not all of it")
    title: str | None
    chars: int = Field(description="Characters of its text")
    pages: int | None = Field(default=None, description="Of a PDF that has been read")


class AttachedNow(Attached):
    """A file of a turn in its present state."""

    deleted: bool = Field(default=False, description="It was removed; GET /files/{id} answers 404")


class FileList(Shape):
    files: list[StoredFile]
    total: int
    cursor: int | None


class FileRemoved(Shape):
    id: str
    deleted: bool


class PassageReasons(Shape):
    similarity: float | None
    words: float


class Passage(Shape):
    file_id: str
    name: str
    title: str
    place: str | None = Field(description="A page, the headings above, or a line")
    text: str
    link: str = Field(description="The file's path below the address of the API")
    relevance: float
    why: PassageReasons


class Passages(Shape):
    query: str
    hits: list[Passage]
    text: str = Field(description="What the model reads of them")
