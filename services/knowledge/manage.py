"""knowledge_manage: the gateway's operations on a user's facts. Not for models.

The user is that of the request. `all_users` is for the backup: the gateway sets it for an administrator only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from services.knowledge.claims import Claim, Holds, Turn, claim
from services.knowledge.dates import date_of
from services.knowledge.graph import GraphUnavailable
from services.knowledge.merging import Fact
from services.knowledge.names import Kind
from services.knowledge.search import Search, entity_json, fact_json
from services.knowledge.statements import BY_HAND
from services.knowledge.store import Store
from shared.bus import Bus
from shared.contracts import ToolRequest
from shared.errors import ToolError
from shared.participant.retention import Retention
from shared.participant.tool import Tool, ToolResult
from shared.participant.writes import store_away

NAME = "knowledge_manage"
# The nodes and edges of a picture, at most.
_DRAWN = 2_000
_SOURCES = 50
# Claims that are removed in one transaction.
_PART = 500
# In ms: there are no later dates.
_YEAR_9999 = 253_370_764_800_000

Op = Literal[
    "list", "get", "add", "correct", "delete", "entities", "graph", "export", "import", "clear", "stats", "retention",
]  # fmt: skip


class KnowledgeManage(BaseModel):
    """Operates on a user's knowledge."""

    model_config = ConfigDict(extra="forbid")

    op: Op
    id: str = ""
    about: str = ""
    state: Literal["", "is", "was", "doubted"] = ""
    subject: str = ""
    subject_kind: Kind | None = None
    relation: str = ""
    object: str = ""
    object_kind: Kind | None = None
    holds: Holds | None = None
    # null leaves a date unchanged, "" removes it.
    since: str | None = None
    until: str | None = None
    cursor: str | None = None
    limit: int = Field(default=50, ge=1, le=500)
    lines: list[dict[str, Any]] = Field(default=[], max_length=500)
    all_users: bool = False
    days: int | None = Field(default=None, ge=0)


class Line(BaseModel):
    """A claim of an export. Its id is computed from the other fields."""

    model_config = ConfigDict(extra="ignore", strict=True)

    user_id: str = ""
    source: str = Field(min_length=1, max_length=300)
    session_id: str = Field(default="", max_length=300)
    said: int = Field(ge=0, lt=_YEAR_9999)
    subject: str = Field(min_length=1, max_length=200)
    subject_kind: Kind = "thing"
    relation: str = Field(min_length=1, max_length=60)
    object: str = Field(min_length=1, max_length=200)
    object_kind: Kind = "thing"
    holds: Holds = "is"
    since: str = Field(default="", max_length=40)
    until: str = Field(default="", max_length=40)
    speaker: Literal["user", "assistant"] = "user"
    by: Literal["model", "rules", "person"] = "person"
    quote: str = Field(default="", max_length=1_000)


_LINE = TypeAdapter(Line)


class Manage:
    def __init__(self, bus: Bus, store: Store, search: Search, retention: Retention) -> None:
        self._bus = bus
        self._store = store
        self._search = search
        self._retention = retention
        self._ops: dict[Op, Callable[[KnowledgeManage, ToolRequest], Awaitable[dict[str, Any]]]] = {
            "list": self._list,
            "get": self._get,
            "add": self._add,
            "correct": self._correct,
            "delete": self._delete,
            "entities": self._entities,
            "graph": self._graph,
            "export": self._export,
            "import": self._import,
            "clear": self._clear,
            "stats": self._stats,
            "retention": self._kept,
        }

    def tool(self) -> Tool[KnowledgeManage]:
        return Tool(NAME, KnowledgeManage, self.run, internal=True)

    async def run(self, args: KnowledgeManage, request: ToolRequest) -> ToolResult:
        """Run an operation. `data` is {"found": false} if the user has no such fact."""
        try:
            return ToolResult("", await self._ops[args.op](args, request))
        except GraphUnavailable as exc:
            raise store_away("knowledge", {"op": args.op}, exc) from exc

    async def _list(self, args: KnowledgeManage, request: ToolRequest) -> dict[str, Any]:
        facts = await self._search.all(request.user_id)
        if args.about:
            names = await self._search.names(request.user_id)
            meant = set(names.matching(args.about))
            facts = [fact for fact in facts if meant & {fact.subject.id, fact.object.id}]
        facts = [fact for fact in facts if args.state in ("", fact.state)]
        start = _page_start(args.cursor, facts)
        page = facts[start : start + args.limit]
        more = start + args.limit < len(facts)
        return {
            "facts": [_with_newest_sources(fact) for fact in page],
            "cursor": f"{page[-1].said}|{page[-1].id}" if more else None,
            "total": len(facts),
        }

    async def _get(self, args: KnowledgeManage, request: ToolRequest) -> dict[str, Any]:
        fact = await self._search.of_claim(request.user_id, args.id)
        return {"found": False} if fact is None else {"found": True, "fact": _with_newest_sources(fact)}

    async def _add(self, args: KnowledgeManage, request: ToolRequest) -> dict[str, Any]:
        turn = await self._by_hand(request)
        new = _entered_claim(turn, args, None)
        await self._store.correct(request.user_id, turn, [], new)
        return await self._now(request, new)

    async def _correct(self, args: KnowledgeManage, request: ToolRequest) -> dict[str, Any]:
        fact = await self._search.of_claim(request.user_id, args.id)
        if fact is None:
            return {"found": False}
        turn = await self._by_hand(request)
        new = _entered_claim(turn, args, fact)
        await self._store.correct(request.user_id, turn, fact.claims, new)
        return {"found": True, **await self._now(request, new)}

    async def _delete(self, args: KnowledgeManage, request: ToolRequest) -> dict[str, Any]:
        fact = await self._search.of_claim(request.user_id, args.id)
        if fact is None:
            return {"found": False}
        await self._store.remove_claims(request.user_id, fact.claims)
        return {"found": True}

    async def _entities(self, args: KnowledgeManage, request: ToolRequest) -> dict[str, Any]:
        names = await self._search.names(request.user_id)
        found: dict[str, dict[str, Any]] = {}
        for fact in await self._search.all(request.user_id):
            for thing in {one.id: one for one in (fact.object, fact.subject)}.values():
                entity = found.setdefault(thing.id, {**entity_json(thing), "facts": 0})
                entity["facts"] += 1
        for name, entity in found.items():
            entity["names"] = names.with_aliases([name])
        meant = names.matching(args.about) if args.about else list(found)
        ranked = sorted((found[one] for one in meant if one in found), key=lambda one: (-one["facts"], one["id"]))
        return {"entities": ranked[: args.limit], "total": len(ranked)}

    async def _graph(self, args: KnowledgeManage, request: ToolRequest) -> dict[str, Any]:
        """Return nodes and edges for a picture: of the facts around a name, or of the newest."""
        if args.about:
            hits = await self._search.find(request.user_id, [args.about], [], min(args.limit * 4, _DRAWN), 2)
            facts = [hit.fact for hit in hits]
        else:
            everything = await self._search.all(request.user_id)
            facts = [fact for fact in everything if fact.state != "doubted"][: min(args.limit * 4, _DRAWN)]
        nodes = {thing.id: entity_json(thing) for fact in facts for thing in (fact.subject, fact.object)}
        edges = [
            {"id": fact.id, "from": fact.subject.id, "to": fact.object.id, "relation": fact.relation,
             "state": fact.state, "since": fact.since or None, "until": fact.until or None,
             "confidence": fact.confidence}
            for fact in facts
            # Two names of one node are no edge.
            if fact.subject.id != fact.object.id
        ]  # fmt: skip
        return {"nodes": list(nodes.values()), "edges": edges}

    # ── moving in and out ────────────────────────────────────────────────────────────────────────────────────

    async def _export(self, args: KnowledgeManage, request: ToolRequest) -> dict[str, Any]:
        """Return claims of a user, or of all users, in the order of users and ids."""
        users = await self._store.users() if args.all_users else [request.user_id]
        user_id, _, after = (args.cursor or "").rpartition("|")
        for one in users:
            if args.cursor and one < user_id:
                continue
            start = after if one == user_id else ""
            if page := await self._store.claims_page(one, start, args.limit):
                return {
                    "lines": [{"user_id": one, **claim.row()} for claim in page],
                    "cursor": f"{one}|{page[-1].id}",
                }
        return {"lines": [], "cursor": None}

    async def _import(self, args: KnowledgeManage, request: ToolRequest) -> dict[str, Any]:
        """Add the valid lines of a page; report the others by their numbers."""
        errors: list[dict[str, Any]] = []
        by_user: dict[str, list[Claim]] = {}
        for number, raw in enumerate(args.lines):
            try:
                line = _LINE.validate_python(raw)
                user_id = (line.user_id or request.user_id) if args.all_users else request.user_id
                by_user.setdefault(user_id, []).append(_imported_claim(line, user_id))
            except (ValidationError, ToolError) as exc:
                errors.append({"line": number, "message": _message(exc)})
        imported = 0
        for user_id, claims in by_user.items():
            imported += await self._store.import_claims(user_id, claims)
        there = sum(map(len, by_user.values())) - imported
        return {"imported": imported, "there": there, "errors": errors}

    async def _clear(self, args: KnowledgeManage, request: ToolRequest) -> dict[str, Any]:
        """Remove the claims of the user, or of the next one of all users; `left`: whether another one has claims."""
        users = [request.user_id]
        if args.all_users:
            users = [one for one in await self._store.users() if await self._store.count(one)]
        if not users:
            return {"left": False}
        while page := await self._store.claims_page(users[0], "", _PART):
            await self._store.remove_claims(users[0], page)
        return {"left": len(users) > 1}

    async def _stats(self, args: KnowledgeManage, request: ToolRequest) -> dict[str, Any]:
        if args.all_users:
            return await self._store.counts()
        return {"claims": await self._store.count(request.user_id)}

    async def _kept(self, args: KnowledgeManage, _request: ToolRequest) -> dict[str, Any]:
        return {"kinds": await self._retention.shown(args.days)}

    # ── how ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _by_hand(self, request: ToolRequest) -> Turn:
        """Return the source of an entered fact: the same for a repeated call."""
        return Turn(f"{BY_HAND}{request.call_id}", request.user_id, "", await self._bus.server_time(), "")

    async def _now(self, request: ToolRequest, new: Claim) -> dict[str, Any]:
        fact = await self._search.of_claim(request.user_id, new.id)
        return {"fact": None if fact is None else _with_newest_sources(fact)}


def _with_newest_sources(fact: Fact) -> dict[str, Any]:
    """Return a fact as clients receive it, with its newest sources only."""
    told = fact_json(fact)
    return {**told, "sources": told["sources"][-_SOURCES:], "why": told["why"][-_SOURCES:]}


def _entered_claim(turn: Turn, args: KnowledgeManage, old: Fact | None) -> Claim:
    """Return the claim that a person enters; missing parts come from the corrected fact. Raises ToolError."""
    for name in ("since", "until"):
        given = getattr(args, name)
        if given and date_of(given, turn.said) is None:
            raise ToolError(f"{name}: {given[:40]!r} is no date such as 2026, 2026-05 or 2026-05-03")
    over = args.holds or ("was" if args.until else None) or ("was" if old and old.state == "was" else "is")
    since, until = args.since, args.until
    if old is not None:
        since = old.since if since is None else since
        # A fact that is so again has no end.
        until = (old.until if until is None and over == "was" else until) or ""
    new = claim(
        turn,
        args.subject or (old.subject.name if old else ""),
        args.relation or (old.relation if old else ""),
        args.object or (old.object.name if old else ""),
        subject_kind=args.subject_kind or (old.subject.kind if old and not args.subject else "thing"),
        object_kind=args.object_kind or (old.object.kind if old and not args.object else "thing"),
        holds=over,
        since=since or None,
        until=until or None,
        by="person",
    )
    if new is None:
        raise ToolError(
            "subject, relation and object are needed: two different names, and a few words such as lives in"
        )
    return new


def _imported_claim(line: Line, user_id: str) -> Claim:
    """Raises ToolError."""
    turn = Turn(line.source, user_id, line.session_id, line.said, "")
    found = claim(
        turn, line.subject, line.relation, line.object,
        subject_kind=line.subject_kind, object_kind=line.object_kind, holds=line.holds,
        since=line.since, until=line.until, by=line.by, quote=line.quote,
    )  # fmt: skip
    if found is None:
        raise ToolError("subject, relation and object do not make a fact")
    return replace(found, speaker=line.speaker)


def _message(exc: ValidationError | ToolError) -> str:
    if isinstance(exc, ToolError):
        return str(exc)
    first = exc.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def _page_start(cursor: str | None, facts: Iterable[Fact]) -> int:
    """Return the index at which a page begins. Raises ToolError."""
    if cursor is None:
        return 0
    said, separator, fact_id = cursor.partition("|")
    if not separator or not said.isdigit():
        raise ToolError("cursor: one that a page has given is expected")
    behind = (-int(said), fact_id)
    return sum((-fact.said, fact.id) <= behind for fact in facts)
