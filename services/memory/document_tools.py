"""What models and the other participants do with files: search the documents, and operate on them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from services.memory.documents import Documents, Found
from services.memory.library import LibraryDamaged
from services.memory.transfer import FileEndpoint, TooManyUploads
from shared.contracts import ToolRequest
from shared.errors import ToolError
from shared.participant.files import BUSY
from shared.participant.tool import Tool, ToolResult

NAME = "documents_manage"
NOTHING = "No documents found."
_MOST_IDS = 100


class SearchDocuments(BaseModel):
    """Search the documents that the user has added: manuals, reports, contracts, notes. Call it when the question is
    about what stands in them ("what does the manual say about ...", "find the clause on ...", "according to my notes"),
    or about an attached file that is not shown as a whole."""

    model_config = ConfigDict(str_strip_whitespace=True)

    query: str = Field(
        min_length=1,
        max_length=4_000,
        validation_alias=AliasChoices("query", "q", "text"),
        description="What to look for, in a few words or as a question",
    )
    n_results: int | None = Field(default=None, ge=1, le=50, description="How many passages; left out: a few")


class DocumentsManage(BaseModel):
    """Operates on a user's files."""

    model_config = ConfigDict(extra="forbid")

    op: Literal["endpoint", "list", "get", "delete", "delete_user", "search", "users"]
    id: str = ""
    ids: list[str] | None = Field(default=None, max_length=_MOST_IDS)
    upload: bool = False
    query: str = Field(default="", max_length=4_000)
    limit: int = Field(default=100, ge=1, le=500)
    cursor: int | None = None


class DocumentTools:
    def __init__(self, documents: Documents, endpoint: FileEndpoint) -> None:
        self._documents = documents
        self._endpoint = endpoint
        self._ops: dict[str, Callable[[DocumentsManage, str], Awaitable[dict[str, Any]]]] = {
            "endpoint": self._where,
            "list": self._list,
            "get": self._get,
            "delete": self._delete,
            "delete_user": self._delete_user,
            "search": self._search,
            "users": self._users,
        }

    def tools(self) -> list[Tool[Any]]:
        return [
            Tool("search_documents", SearchDocuments, self.search),
            Tool(NAME, DocumentsManage, self.manage, internal=True),
        ]

    async def search(self, args: SearchDocuments, request: ToolRequest) -> ToolResult:
        with _as_tool_error():
            found = await self._documents.search(request.user_id, args.query, args.n_results)
        return ToolResult(told(found), {"hits": [shown(one) for one in found]})

    async def manage(self, args: DocumentsManage, request: ToolRequest) -> ToolResult:
        """`data` is {"found": false} for what is not there or not the user's."""
        with _as_tool_error():
            return ToolResult("", await self._ops[args.op](args, request.user_id))

    async def _where(self, args: DocumentsManage, user_id: str) -> dict[str, Any]:
        if args.upload:
            try:
                self._endpoint.announce(user_id)
            except TooManyUploads as exc:
                raise ToolError(f"{BUSY}{exc}") from exc
        return {"url": self._endpoint.url, "token": self._endpoint.token}

    async def _list(self, args: DocumentsManage, user_id: str) -> dict[str, Any]:
        library = self._documents.library
        name = args.query.strip()
        files = await asyncio.to_thread(library.files, user_id, args.limit, args.cursor, name)
        total = await asyncio.to_thread(library.count, user_id, name)
        more = len(files) == args.limit
        return {"files": [file.shown() for file in files], "total": total, "cursor": files[-1].n if more else None}

    async def _get(self, args: DocumentsManage, user_id: str) -> dict[str, Any]:
        """Of some files, those that are the user's, in the order asked for."""
        asked = args.ids or []
        files = [await asyncio.to_thread(self._documents.library.file, user_id, id) for id in asked]
        missing = [id for id, file in zip(asked, files, strict=True) if file is None]
        return {"files": [file.shown() for file in files if file], "missing": missing}

    async def _delete(self, args: DocumentsManage, user_id: str) -> dict[str, Any]:
        return {"found": await self._documents.remove(user_id, args.id)}

    async def _delete_user(self, _args: DocumentsManage, user_id: str) -> dict[str, Any]:
        return {"deleted": await asyncio.to_thread(self._documents.library.remove_user, user_id)}

    async def _search(self, args: DocumentsManage, user_id: str) -> dict[str, Any]:
        found = await self._documents.search(user_id, args.query, min(args.limit, 50), args.ids)
        return {"hits": [shown(one) for one in found], "text": told(found)}

    async def _users(self, _args: DocumentsManage, _user_id: str) -> dict[str, Any]:
        return {"users": await asyncio.to_thread(self._documents.library.users)}


@contextmanager
def _as_tool_error() -> Iterator[None]:
    try:
        yield
    except LibraryDamaged as exc:
        raise ToolError(f"unavailable: {exc}") from exc
    except OSError as exc:
        raise ToolError(f"unavailable: the folder of documents cannot be used: {exc.strerror or exc}") from exc


def told(found: Sequence[Found]) -> str:
    """The result text of search_documents."""
    if not found:
        return NOTHING
    lines: list[str] = []
    for number, one in enumerate(found, start=1):
        passage = one.passage
        named = passage.file.title or passage.file.name
        lines.append(f"{number}. {named}" + ("" if named == passage.file.name else f" ({passage.file.name})"))
        if passage.place:
            lines.append(f"   Place: {passage.place}")
        lines.append(f"   {' '.join(passage.text.split())}")
        lines.append(f"   Link: {link(one)}")
    return "\n".join(lines)


def shown(one: Found) -> dict[str, Any]:
    """A hit as clients see it."""
    passage = one.passage
    return {
        "file_id": passage.file.id,
        "name": passage.file.name,
        "title": passage.file.title or passage.file.name,
        "place": passage.place or None,
        "text": passage.text,
        "link": link(one),
        "relevance": round(one.relevance, 4),
        "why": {
            "similarity": None if passage.similarity is None else round(passage.similarity, 4),
            "words": round(passage.words, 4),
        },
    }


def link(one: Found) -> str:
    """Where the file is, below the address of the API; of a PDF, the page."""
    passage = one.passage
    page = f"#page={passage.place.removeprefix('page ')}" if passage.file.type == "application/pdf" else ""
    return f"/files/{passage.file.id}{page}"
