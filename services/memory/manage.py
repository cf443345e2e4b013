"""memory_manage: what the gateway does with a user's memory. An operation between participants, not for models.

The user is the request's. `all_users` is for the backup: the gateway sets it for an administrator only.
"""

from __future__ import annotations

import struct
from base64 import b64encode
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

from services.memory.embedding import Embedder, profile
from services.memory.engram import IMPORTED, Engram, topic_id
from services.memory.ingest import embedded_text
from services.memory.portable import engram_of, exported, read_line
from services.memory.recall import MOST, Recall, Wanted
from services.memory.rendering import brief, data_of, told, whole
from services.memory.settings import MemorySettings
from services.memory.store import StoreUnavailable
from services.memory.tools import MAX_CONTENT, MAX_QUERIES, MemoryTools, checked_topic
from services.memory.turn_linking import overdue
from services.memory.writer import Keeper
from shared.contracts import ToolRequest
from shared.envelope import now_ms
from shared.errors import ModelError, ToolError
from shared.llm.port import ContextOverflow, ModelRejected
from shared.participant.retention import Retention
from shared.participant.service import Context
from shared.participant.tool import Tool, ToolResult
from shared.participant.writes import store_away
from shared.zones import first_zone, local_time

NAME = "memory_manage"
# A page's JSON goes through Redis: it ends before it is larger than this, unless one engram alone is.
PAGE_BYTES = 400_000
_LOOK = 100
# Texts of one request for their vectors.
MOST_TEXTS = 64
# Seconds for embedding a page of an import.
_IMPORT_SECONDS = 25.0

Op = Literal[
    "search", "list", "get", "delete", "delete_session", "delete_user", "import", "export", "topics", "topic_get",
    "topic_put", "topic_delete", "stats", "embed", "retention",
]  # fmt: skip


class MemoryManage(BaseModel):
    """Operates on a user's memory."""

    model_config = ConfigDict(extra="forbid")

    op: Op
    query: str = ""
    queries: list[str] = Field(default=[], max_length=MAX_QUERIES)
    hybrid: bool | None = None
    do_rerank: bool | None = None
    log: bool = False
    id: str = ""
    session_id: str = ""
    topic: str = ""
    content: str = ""
    cursor: str | None = None
    limit: int = Field(default=50, ge=1, le=500)
    lines: list[dict[str, Any]] = Field(default=[], max_length=200)
    texts: list[str] = Field(default=[], max_length=MOST_TEXTS)
    days: int | None = Field(default=None, ge=0)
    all_users: bool = False


class Manage:
    def __init__(
        self,
        context: Context[MemorySettings],
        keeper: Keeper,
        recall: Recall,
        embedder: Embedder,
        tools: MemoryTools,
        retention: Retention,
    ) -> None:
        self._context = context
        self._keeper = keeper
        self._recall = recall
        self._embedder = embedder
        self._tools = tools
        self._retention = retention
        self._ops: dict[Op, Callable[[MemoryManage, ToolRequest], Awaitable[dict[str, Any]]]] = {
            "search": self._search,
            "list": self._list,
            "get": self._get,
            "delete": self._delete,
            "delete_session": self._delete_session,
            "delete_user": self._delete_user,
            "import": self._import,
            "export": self._export,
            "topics": self._topics,
            "topic_get": self._topic_get,
            "topic_put": self._topic_put,
            "topic_delete": self._topic_delete,
            "stats": self._stats,
            "embed": self._embed,
            "retention": self._kept,
        }

    def tool(self) -> Tool[MemoryManage]:
        return Tool(NAME, MemoryManage, self.run, internal=True)

    async def run(self, args: MemoryManage, request: ToolRequest) -> ToolResult:
        """`data` is {"found": false} for what is not there or not the user's."""
        try:
            return ToolResult("", await self._ops[args.op](args, request))
        except StoreUnavailable as exc:
            raise store_away("memory", {"op": args.op}, exc) from exc

    async def _search(self, args: MemoryManage, request: ToolRequest) -> dict[str, Any]:
        settings = self._context.settings
        queries = tuple(dict.fromkeys((args.query, *args.queries)))
        zone = first_zone(request.time_zone, settings.zone)
        wanted = Wanted(queries, min(args.limit, MOST), args.hybrid, args.do_rerank, args.log, zone)
        found = await self._recall.search(request.user_id, wanted, settings)
        return {**data_of(found), "text": told(found, settings, local_time(now_ms(), zone))}

    async def _list(self, args: MemoryManage, request: ToolRequest) -> dict[str, Any]:
        await self._indexed()
        engrams, cursor = await self._page(request.user_id, args.cursor, args.limit, brief)
        return {"engrams": engrams, "cursor": cursor, "total": self._keeper.index.catalog.count(request.user_id)}

    async def _page(
        self, user_id: str, cursor: str | None, limit: int, show: Callable[[Engram], dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], str | None]:
        """Newest first, and where the next page begins."""
        place, shown, size = _place(cursor), list[dict[str, Any]](), 0
        while True:
            ids = self._keeper.index.catalog.newest(user_id, min(_LOOK, limit - len(shown)), place)
            if not ids:
                return shown, None
            there = await self._keeper.store.get(user_id, [engram_id for _, engram_id in ids])
            for time_ms, engram_id in ids:
                if engram_id in there:
                    line = show(there[engram_id])
                    size += len(orjson.dumps(line))
                    if shown and size > PAGE_BYTES:
                        return shown, _cursor(place)
                    shown.append(line)
                place = (time_ms, engram_id)
                if len(shown) == limit:
                    more = self._keeper.index.catalog.newest(user_id, 1, place)
                    return shown, _cursor(place) if more else None

    async def _get(self, args: MemoryManage, request: ToolRequest) -> dict[str, Any]:
        found = (await self._keeper.store.get(request.user_id, [args.id])).get(args.id)
        return {"found": False} if found is None else {"found": True, "engram": whole(found)}

    async def _delete(self, args: MemoryManage, request: ToolRequest) -> dict[str, Any]:
        user_id = request.user_id
        found = (await self._keeper.store.get(user_id, [args.id])).get(args.id)
        # the second: a delete that was interrupted between the store and the index
        if found is None and self._keeper.index.catalog.owner(args.id) != user_id:
            return {"found": False}
        if found is None:
            await self._keeper.delete(user_id, [args.id])
        else:
            await self._keeper.delete_turn(user_id, found)
        return {"found": True}

    async def _delete_session(self, args: MemoryManage, request: ToolRequest) -> dict[str, Any]:
        if not args.session_id:
            raise ToolError("missing session_id argument")
        until = await self._keeper.states.now()
        return {"deleted": await self._keeper.delete_session(request.user_id, args.session_id, until)}

    async def _delete_user(self, _args: MemoryManage, request: ToolRequest) -> dict[str, Any]:
        await self._indexed()
        return {"deleted": await self._keeper.delete_user(request.user_id)}

    # ── moving in and out ────────────────────────────────────────────────────────────────────────────────────

    async def _import(self, args: MemoryManage, request: ToolRequest) -> dict[str, Any]:
        """Lines that are wrong are named by their number in the page; the others are taken. `there`: of `imported`,
        those that had been taken before."""
        await self._indexed()
        errors: list[dict[str, Any]] = []
        by_user: dict[str, dict[str, Engram]] = {}
        now = await self._keeper.states.now()
        for number, raw in enumerate(args.lines):
            try:
                line = read_line(raw)
            except ToolError as exc:
                errors.append({"line": number, "message": str(exc)})
                continue
            user_id = (line.user_id or request.user_id) if args.all_users else request.user_id
            old_id = self._old_id(line.metadata.get("id"), user_id, args.all_users)
            engram = engram_of(line, user_id, now, old_id, request.time_zone)
            by_user.setdefault(user_id, {})[engram.id] = engram
        imported = there = 0
        owner = self._keeper.index.catalog.owner
        for user_id, engrams in by_user.items():
            there += sum(owner(engram_id) == user_id for engram_id in engrams)
            sessions = {e.session_id for e in engrams.values() if e.session_id and e.id.startswith(IMPORTED)}
            for session_id in sessions:
                due = overdue(await self._others(user_id, session_id, engrams), _of(engrams, session_id))
                engrams |= {name: replace(engrams[name], before=text) for name, text in due.items() if name in engrams}
            imported += await self._take(user_id, list(engrams.values()))
            # after the write, so that of two parts of a session that are written at once the later one sees both
            for session_id in sessions:
                await self._keeper.place(user_id, overdue(await self._others(user_id, session_id)))
        return {"imported": imported, "there": there, "errors": errors}

    async def _others(self, user_id: str, session_id: str, without: Collection[str] = ()) -> list[Engram]:
        """The engrams of a session that are in the store."""
        ids = await self._keeper.store.ids_of_session(user_id, session_id)
        found = await self._keeper.store.get(user_id, [one for one in ids if one not in without])
        return list(found.values())

    def _old_id(self, given: Any, user_id: str, trusted: bool) -> str | None:
        """An engram may have its id again where nobody can claim another's with it: grades and deletions go by it."""
        if not isinstance(given, str) or not 0 < len(given) <= 200:
            return None
        owner = self._keeper.index.catalog.owner(given)
        return given if owner == user_id or (trusted and owner is None) else None

    async def _take(self, user_id: str, engrams: Sequence[Engram]) -> int:
        vectors = await self._embedder.soon([embedded_text(engram) for engram in engrams], _IMPORT_SECONDS)
        if vectors is None:
            raise ToolError(f"unavailable: {self._embedder.trouble or 'the embedding model does not answer'}")
        await self._keeper.states.restore([engram.id for engram in engrams])
        return len(await self._keeper.put(user_id, list(zip(engrams, vectors, strict=True))))

    async def _export(self, args: MemoryManage, request: ToolRequest) -> dict[str, Any]:
        """Lines of a user, or of all."""
        await self._indexed()
        users = self._keeper.index.catalog.users() if args.all_users else [request.user_id]
        user_id, place = orjson.loads(args.cursor) if args.cursor else ("", None)
        # somebody may have been forgotten since the page before
        at = bisect_left(users, user_id)
        if at == len(users):
            return {"lines": [], "cursor": None}
        if users[at] != user_id:
            user_id, place = users[at], None
        lines, place = await self._page(user_id, place, args.limit, exported)
        if place is None:
            if at + 1 == len(users):
                return {"lines": lines, "cursor": None}
            user_id = users[at + 1]
        return {"lines": lines, "cursor": orjson.dumps([user_id, place]).decode()}

    # ── topics ───────────────────────────────────────────────────────────────────────────────────────────────

    async def _topics(self, _args: MemoryManage, request: ToolRequest) -> dict[str, Any]:
        return {"topics": [_shown(topic) for topic in await self._keeper.store.topics(request.user_id)]}

    async def _topic_get(self, args: MemoryManage, request: ToolRequest) -> dict[str, Any]:
        found = await self._keeper.store.topic(request.user_id, args.topic)
        return {"found": False} if found is None else {"found": True, **_shown(found)}

    async def _topic_put(self, args: MemoryManage, request: ToolRequest) -> dict[str, Any]:
        content = args.content.strip()
        if not content:
            raise ToolError("missing content argument")
        if len(content) > MAX_CONTENT:
            raise ToolError(f"content has more than {MAX_CONTENT} characters")
        return _shown(await self._tools.put_topic(request, checked_topic(args.topic.strip()), content))

    async def _topic_delete(self, args: MemoryManage, request: ToolRequest) -> dict[str, Any]:
        found = await self._keeper.store.topic(request.user_id, args.topic)
        engram_id = topic_id(request.user_id, args.topic)
        if found is None and self._keeper.index.catalog.owner(engram_id) != request.user_id:
            return {"found": False}
        await self._keeper.delete(request.user_id, [engram_id])
        return {"found": True}

    async def _stats(self, args: MemoryManage, request: ToolRequest) -> dict[str, Any]:
        await self._indexed()
        catalog = self._keeper.index.catalog
        users = catalog.users() if args.all_users else [request.user_id]
        return {
            "engrams": sum(map(catalog.count, users)),
            "users": len(users),
            "embedding_model": self._embedder.using or None,
        }

    async def _kept(self, args: MemoryManage, _request: ToolRequest) -> dict[str, Any]:
        await self._indexed()
        return {"kinds": await self._retention.shown(args.days)}

    async def _embed(self, args: MemoryManage, _request: ToolRequest) -> dict[str, Any]:
        """Each text's vector of unit length, as 32-bit floats (little-endian) in base64."""
        model, most = self._embedder.using, profile(self._embedder.using).max_chars
        for place, text in enumerate(args.texts):
            if len(text) > most:
                raise ToolError(f"a text of {len(text)} characters ({place}) is too long: {model} reads {most}")
        try:
            found = await self._embedder.plain(args.texts, _IMPORT_SECONDS)
        except (ModelRejected, ContextOverflow) as exc:
            raise ToolError(f"{model} refuses one of the texts: {exc}") from exc
        except ModelError as exc:
            raise ToolError(f"unavailable: {exc}") from exc
        vectors = [b64encode(struct.pack(f"<{len(one.values)}f", *one.values)).decode() for one in found]
        return {"model": found[0].model if found else model, "vectors": vectors}

    async def _indexed(self) -> None:
        """Raises ToolError while the store is still being read after a start, or cannot be."""
        if self._keeper.store.damage:
            raise ToolError(f"unavailable: {self._keeper.store.damage}")
        if not self._keeper.index.ready.is_set():
            raise ToolError("unavailable: the memory is still reading its store")


def _of(engrams: Mapping[str, Engram], session_id: str) -> list[Engram]:
    return [engram for engram in engrams.values() if engram.session_id == session_id]


def _shown(topic: Engram) -> dict[str, Any]:
    return {"topic": topic.topic, "content": topic.content, "time": topic.time}


def _cursor(place: tuple[int, str] | None) -> str | None:
    return None if place is None else f"{place[0]}|{place[1]}"


def _place(cursor: str | None) -> tuple[int, str] | None:
    """Raises ToolError."""
    if cursor is None:
        return None
    time_ms, separator, engram_id = cursor.partition("|")
    if not separator or not time_ms.isdigit():
        raise ToolError("cursor: one that a page has given is expected")
    return int(time_ms), engram_id
