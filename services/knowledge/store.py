"""What is kept: each user's names, who was told what about them, and which sources have been read.

    (KnowledgeUser)-[:KNOWS]->(KnowledgeName)-[:SAID {a claim}]->(KnowledgeName)
    (KnowledgeUser)-[:HEARD]->(KnowledgeSource)

Claims are kept, facts are made of them when they are asked for (see `merging`). A source's claims are written in one
transaction, in place of those that it had: doing it again changes nothing. What is deleted leaves a mark, so that what
comes late of it is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from services.knowledge.claims import FIELDS, Claim, Turn, claim_of
from services.knowledge.graph import Graph, Row, Run
from services.knowledge.relations import ALIAS

# What the sources begin with that a person has entered.
BY_HAND = "person:"

# Tables of the embedded graph, and what of them has unique ids at a server.
_CLAIM = ", ".join(f"{name} {'INT64' if name == 'said' else 'STRING'}" for name in FIELDS)
TABLES = (
    "CREATE NODE TABLE IF NOT EXISTS KnowledgeUser(id STRING PRIMARY KEY, version INT64)",
    "CREATE NODE TABLE IF NOT EXISTS KnowledgeName(id STRING PRIMARY KEY, key STRING, aliased BOOLEAN)",
    "CREATE NODE TABLE IF NOT EXISTS KnowledgeSource(id STRING PRIMARY KEY, source STRING, session_id STRING, "
    "said INT64, settled BOOLEAN, names STRING[], query STRING, answer STRING)",
    "CREATE NODE TABLE IF NOT EXISTS KnowledgeGone(id STRING PRIMARY KEY, at INT64)",
    "CREATE REL TABLE IF NOT EXISTS KNOWS(FROM KnowledgeUser TO KnowledgeName)",
    "CREATE REL TABLE IF NOT EXISTS HEARD(FROM KnowledgeUser TO KnowledgeSource)",
    f"CREATE REL TABLE IF NOT EXISTS SAID(FROM KnowledgeName TO KnowledgeName, {_CLAIM})",
)
LABELS = ("KnowledgeUser", "KnowledgeName", "KnowledgeSource", "KnowledgeGone")

_SET = ", ".join(f"{name}: ${name}" for name in FIELDS)
_CLAIMS = ", ".join(f"r.{name} AS {name}" for name in FIELDS)
_TOUCH = (
    "MERGE (u:KnowledgeUser {id: $user}) ON CREATE SET u.version = 1 ON MATCH SET u.version = u.version + 1 "
    "RETURN u.version AS version"
)
_VERSION = "MATCH (u:KnowledgeUser {id: $user}) RETURN u.version AS version"
_THERE = "MATCH (n:KnowledgeName) WHERE n.id = $id RETURN n.id AS id"
_NAME = "CREATE (:KnowledgeName {id: $id, key: $key, aliased: false})"
_ALIASED = "MATCH (n:KnowledgeName) WHERE n.id = $id SET n.aliased = true"
_KNOW = "MATCH (u:KnowledgeUser), (n:KnowledgeName) WHERE u.id = $user AND n.id = $id CREATE (u)-[:KNOWS]->(n)"
_SAY = f"MATCH (a:KnowledgeName), (b:KnowledgeName) WHERE a.id = $a AND b.id = $b CREATE (a)-[:SAID {{{_SET}}}]->(b)"
_HEAR = (
    "MERGE (s:KnowledgeSource {id: $id}) SET s.source = $source, s.session_id = $session, s.said = $said, "
    "s.settled = $settled, s.names = $names, s.query = $query, s.answer = $answer"
)
_HEARD = "MATCH (u:KnowledgeUser), (s:KnowledgeSource) WHERE u.id = $user AND s.id = $id CREATE (u)-[:HEARD]->(s)"
_SOURCE = (
    "MATCH (s:KnowledgeSource) WHERE s.id = $id RETURN s.id AS id, s.source AS source, s.session_id AS session_id, "
    "s.said AS said, s.settled AS settled, s.names AS names, "
    "s.query AS query, s.answer AS answer"
)
_SETTLE = "MATCH (s:KnowledgeSource) WHERE s.id = $id SET s.settled = true, s.query = '', s.answer = ''"
_OF_SESSION = (
    "MATCH (u:KnowledgeUser {id: $user})-[:HEARD]->(s:KnowledgeSource) WHERE s.session_id = $session AND s.said <= $at "
    "RETURN s.id AS id"
)
_OF_USER = (
    "MATCH (u:KnowledgeUser {id: $user})-[:HEARD]->(s:KnowledgeSource) WHERE s.said <= $at RETURN s.id AS id LIMIT $n"
)
_UNSAY = "MATCH (a:KnowledgeName)-[r:SAID]->(:KnowledgeName) WHERE a.id = $name AND r.source IN $sources DELETE r"
_UNSAY_IDS = "MATCH (a:KnowledgeName)-[r:SAID]->(:KnowledgeName) WHERE a.id = $name AND r.id IN $ids DELETE r"
_SAID_ALREADY = (
    "MATCH (a:KnowledgeName)-[r:SAID]->(:KnowledgeName) WHERE a.id = $name AND r.id IN $ids RETURN r.id AS id"
)
_NEIGHBOURS = (
    "MATCH (a:KnowledgeName)-[r:SAID]->(b:KnowledgeName) WHERE a.id = $name AND r.source IN $sources "
    "RETURN DISTINCT b.id AS id"
)
_UNHEAR = "MATCH (s:KnowledgeSource) WHERE s.id = $id DETACH DELETE s"
# one after the other: asked for in one query, all names are looked at
_SPOKEN_OF = "MATCH (n:KnowledgeName)-[:SAID]-(:KnowledgeName) WHERE n.id = $name RETURN n.id AS id LIMIT 1"
_UNNAME = "MATCH (n:KnowledgeName) WHERE n.id = $name DETACH DELETE n"
_GO = "MERGE (g:KnowledgeGone {id: $id}) SET g.at = $at"
_GONE = "MATCH (g:KnowledgeGone) WHERE g.id = $id AND g.at >= $said RETURN g.id AS id"
_BACK = "MATCH (g:KnowledgeGone) WHERE g.id = $id DELETE g"
_KEYS = "MATCH (:KnowledgeUser {id: $user})-[:KNOWS]->(n:KnowledgeName) RETURN n.key AS key"
_ALIASES = (
    "MATCH (:KnowledgeUser {id: $user})-[:KNOWS]->(a:KnowledgeName) WHERE a.aliased "
    f"MATCH (a)-[r:SAID]->(b:KnowledgeName) WHERE r.relation = '{ALIAS}' RETURN {_CLAIMS}"
)
_TOUCHING = (
    "MATCH (a:KnowledgeName)-[r:SAID]-(:KnowledgeName) WHERE a.id = $name "
    f"RETURN {_CLAIMS} ORDER BY said DESC, id LIMIT $n"
)
_OF_PLACES = (
    "MATCH (a:KnowledgeName)-[r:SAID]-(:KnowledgeName) WHERE a.id = $name AND r.relation IN $relations "
    f"RETURN {_CLAIMS} ORDER BY said DESC, id LIMIT $n"
)
_ALL = (
    "MATCH (:KnowledgeUser {id: $user})-[:KNOWS]->(a:KnowledgeName)-[r:SAID]->(:KnowledgeName) "
    f"RETURN {_CLAIMS} ORDER BY id"
)
_PAGE_OF = (
    "MATCH (:KnowledgeUser {id: $user})-[:KNOWS]->(a:KnowledgeName)-[r:SAID]->(:KnowledgeName) WHERE r.id > $after "
    f"RETURN {_CLAIMS} ORDER BY id LIMIT $n"
)
_ONE = (
    "MATCH (:KnowledgeUser {id: $user})-[:KNOWS]->(a:KnowledgeName)-[r:SAID]->(:KnowledgeName) WHERE r.id = $id "
    f"RETURN {_CLAIMS}"
)
_BETWEEN = f"MATCH (a:KnowledgeName)-[r:SAID]-(b:KnowledgeName) WHERE a.id = $name AND b.id IN $others RETURN {_CLAIMS}"
# what a person has entered has such a source
_OLD = (
    "MATCH (u:KnowledgeUser {id: $user})-[:HEARD]->(s:KnowledgeSource) "
    f"WHERE s.said < $before AND NOT s.source STARTS WITH '{BY_HAND}' RETURN s.id AS id ORDER BY s.said LIMIT $n"
)
_USERS = "MATCH (u:KnowledgeUser) RETURN u.id AS id ORDER BY id"
_COUNT = (
    "MATCH (:KnowledgeUser {id: $user})-[:KNOWS]->(a:KnowledgeName)-[r:SAID]->(:KnowledgeName) RETURN count(r) AS n"
)
_COUNT_ALL = "MATCH (:KnowledgeName)-[r:SAID]->(:KnowledgeName) RETURN count(r) AS n"
_COUNT_NAMES = "MATCH (n:KnowledgeName) RETURN count(n) AS n"
_PAGE = 500


@dataclass(frozen=True, slots=True)
class Source:
    """A turn that was heard. settled: read for good; until then its words are kept for whoever is to read them."""

    turn: Turn
    settled: bool


class Store:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────

    async def hear(self, turn: Turn, claims: Sequence[Claim], *, settled: bool) -> int | None:
        """Keeps a source's claims in place of those that it had; the user's version then.

        None when nothing was written: the source is settled, or it was deleted meanwhile.
        """
        async with self._graph.transaction() as run:
            # first of all: of two who write for one user, the other one waits here
            version = await self._touch(run, turn.user_id)
            if await self._gone(run, turn):
                return None
            there = await run(_SOURCE, {"id": _source(turn.user_id, turn.source)})
            if there and there[0]["settled"]:
                return None
            before = await self._unsaid(run, [str(name) for row in there for name in row["names"]], [turn.source])
            names = await self._said(run, turn.user_id, claims)
            await self._heard(run, [(turn, names)], new=[] if there else [turn.source], settled=settled)
            await self._bare(run, before)
            return version

    async def settle(self, user_id: str, source: str) -> None:
        """Nothing more is read of it."""
        async with self._graph.transaction() as run:
            await self._touch(run, user_id)
            await run(_SETTLE, {"id": _source(user_id, source)})

    async def take(self, user_id: str, claims: Sequence[Claim]) -> int:
        """Takes in claims that were kept elsewhere before, with their sources; those that are there stay as they are.

        The number of new ones.
        """
        by_source: dict[str, list[Claim]] = {}
        for one in {each.id: each for each in claims}.values():
            by_source.setdefault(one.source, []).append(one)
        async with self._graph.transaction() as run:
            await self._touch(run, user_id)
            await run(_BACK, *({"id": _mark_of(user_id, source=source)} for source in by_source))
            sources = [{"id": _source(user_id, source)} for source in by_source]
            there = {row["source"]: row for row in await run(_SOURCE, *sources)}
            # of a source that was never heard nothing is there
            asked = [one for source in there for one in by_source[source]]
            wanted = _by_name((_name(user_id, one.subject_key), one.id) for one in asked)
            ids = {row["id"] for row in await run(_SAID_ALREADY, *({"name": n, "ids": i} for n, i in wanted.items()))}
            fresh = [one for those in by_source.values() for one in those if one.id not in ids]
            await self._said(run, user_id, fresh)
            heard: list[tuple[Turn, list[str]]] = []
            for source, those in by_source.items():
                known = [str(name) for name in there[source]["names"]] if source in there else []
                said = [_name(user_id, one.subject_key) for one in those]
                turn = Turn(source, user_id, those[0].session_id, those[0].said, "")
                heard.append((turn, sorted({*known, *said})))
            await self._heard(run, heard, new=[one for one in by_source if one not in there], settled=True)
        return len(fresh)

    async def unsay(self, user_id: str, claims: Sequence[Claim]) -> None:
        """Removes claims for good; what is still to be read of their sources is not read any more."""
        async with self._graph.transaction() as run:
            await self._touch(run, user_id)
            await self._remove(run, user_id, claims)

    async def correct(self, user_id: str, turn: Turn, old: Sequence[Claim], new: Claim) -> None:
        """A person's word in place of claims."""
        async with self._graph.transaction() as run:
            await self._touch(run, user_id)
            there = await run(_SOURCE, {"id": _source(user_id, turn.source)})
            await self._remove(run, user_id, [*old, new])
            names = await self._said(run, user_id, [new])
            await self._heard(run, [(turn, names)], new=[] if there else [turn.source], settled=True)

    async def forget(self, user_id: str, sources: Collection[str], at: int) -> int:
        """Removes what rests on sources alone, and keeps it from coming back; how many were there."""
        async with self._graph.transaction() as run:
            await self._touch(run, user_id)
            await run(_GO, *({"id": _mark_of(user_id, source=source), "at": at} for source in sources))
            return await self._forgotten(run, [_source(user_id, source) for source in sources])

    async def forget_session(self, user_id: str, session_id: str, at: int) -> int:
        """The same for all of a session that was said until then (ms)."""
        async with self._graph.transaction() as run:
            await self._touch(run, user_id)
            await run(_GO, {"id": _mark_of(user_id, session=session_id), "at": at})
            found = await run(_OF_SESSION, {"user": user_id, "session": session_id, "at": at})
            return await self._forgotten(run, [row["id"] for row in found])

    async def forget_user(self, user_id: str, at: int) -> int:
        """The same for all that was said to a user, a bounded part at a time."""
        count = 0
        async with self._graph.transaction() as run:
            await self._touch(run, user_id)
            await run(_GO, {"id": _mark_of(user_id), "at": at})
        while True:
            async with self._graph.transaction() as run:
                await self._touch(run, user_id)
                found = await run(_OF_USER, {"user": user_id, "at": at, "n": _PAGE})
                if not found:
                    return count
                count += await self._forgotten(run, [row["id"] for row in found])

    async def forget_old(self, user_id: str, before: int, limit: int) -> int:
        """Removes what rests on sources alone that were said before a moment (ms): of at most so many, the oldest; how
        many those were. What a person has entered stays."""
        async with self._graph.transaction() as run:
            await self._touch(run, user_id)
            found = await run(_OLD, {"user": user_id, "before": before, "n": limit})
            return await self._forgotten(run, [row["id"] for row in found])

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────

    async def source(self, user_id: str, source: str) -> Source | None:
        found = await self._graph.read(_SOURCE, {"id": _source(user_id, source)})
        if not found:
            return None
        row = found[0]
        turn = Turn(source, user_id, row["session_id"], row["said"], row["query"] or "", row["answer"] or "")
        return Source(turn, row["settled"])

    async def version(self, user_id: str) -> int:
        """It changes with every write of the user's."""
        found = await self._graph.read(_VERSION, {"user": user_id})
        return int(found[0]["version"]) if found else 0

    async def keys(self, user_id: str) -> list[str]:
        """The keys of all names of a user."""
        return [row["key"] for row in await self._graph.read(_KEYS, {"user": user_id})]

    async def aliases(self, user_id: str) -> list[Claim]:
        return _claims(await self._graph.read(_ALIASES, {"user": user_id}))

    async def touching(self, user_id: str, keys: Iterable[str], each: int) -> list[Claim]:
        """The newest claims about these names, so many of each."""
        found = await self._graph.read(_TOUCHING, *({"name": _name(user_id, key), "n": each} for key in keys))
        # what two of them have with each other came twice
        return list({one.id: one for one in _claims(found)}.values())

    async def places(self, user_id: str, keys: Iterable[str], relations: Collection[str], each: int) -> list[Claim]:
        """The newest claims about these names with one of these relations, so many of each name."""
        if not relations:
            return []
        asked = ({"name": _name(user_id, key), "relations": list(relations), "n": each} for key in keys)
        return list({one.id: one for one in _claims(await self._graph.read(_OF_PLACES, *asked))}.values())

    async def between(self, user_id: str, keys: Iterable[str], others: Collection[str]) -> list[Claim]:
        """Every claim about one of these names and one of the others."""
        ids = [_name(user_id, key) for key in others]
        asked = ({"name": _name(user_id, key), "others": ids} for key in keys)
        return list({one.id: one for one in _claims(await self._graph.read(_BETWEEN, *asked))}.values())

    async def one(self, user_id: str, claim_id: str) -> Claim | None:
        return next(iter(_claims(await self._graph.read(_ONE, {"user": user_id, "id": claim_id}))), None)

    async def all(self, user_id: str) -> list[Claim]:
        """Every claim of a user's, aliases too."""
        # of many this takes a while, in which others are served
        return await asyncio.to_thread(_claims, await self._graph.read(_ALL, {"user": user_id}))

    async def page(self, user_id: str, after: str, limit: int) -> list[Claim]:
        """The claims of a user's that follow an id, in the order of ids; '' is before all."""
        return _claims(await self._graph.read(_PAGE_OF, {"user": user_id, "after": after, "n": limit}))

    async def users(self) -> list[str]:
        return [row["id"] for row in await self._graph.read(_USERS, {})]

    async def count(self, user_id: str) -> int:
        return int((await self._graph.read(_COUNT, {"user": user_id}))[0]["n"])

    async def counts(self) -> dict[str, int]:
        """Claims and names of all users."""
        claims, names = await self._graph.read(_COUNT_ALL, {}), await self._graph.read(_COUNT_NAMES, {})
        return {"claims": int(claims[0]["n"]), "names": int(names[0]["n"])}

    async def ping(self) -> None:
        await self._graph.ping()

    # ── how ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _touch(self, run: Run, user_id: str) -> int:
        return int((await run(_TOUCH, {"user": user_id}))[0]["version"])

    async def _gone(self, run: Run, turn: Turn) -> bool:
        user = turn.user_id
        marks = [_mark_of(user), _mark_of(user, session=turn.session_id), _mark_of(user, source=turn.source)]
        return bool(await run(_GONE, *({"id": mark, "said": turn.said} for mark in marks)))

    async def _said(self, run: Run, user_id: str, claims: Sequence[Claim]) -> list[str]:
        """Writes claims that are not there; the ids of their subjects."""
        if not claims:
            return []
        keys = sorted({key for one in claims for key in (one.subject_key, one.object_key)})
        # looked up and made, not merged: a merge of an edge looks at all edges that the user's node has
        there = {row["id"] for row in await run(_THERE, *({"id": _name(user_id, key)} for key in keys))}
        new = [{"id": _name(user_id, key), "key": key} for key in keys if _name(user_id, key) not in there]
        await run(_NAME, *new)
        await run(_KNOW, *({"user": user_id, "id": row["id"]} for row in new))
        rows = [
            {**one.row(), "a": _name(user_id, one.subject_key), "b": _name(user_id, one.object_key)} for one in claims
        ]
        await run(_SAY, *rows)
        await run(_ALIASED, *({"id": row["a"]} for row in rows if row["relation"] == ALIAS))
        return sorted({row["a"] for row in rows})

    async def _unsaid(self, run: Run, names: Sequence[str], sources: Sequence[str]) -> list[str]:
        """Removes the claims of sources; the names that they were about."""
        values = [{"name": name, "sources": list(sources)} for name in names]
        others = [row["id"] for row in await run(_NEIGHBOURS, *values)]
        await run(_UNSAY, *values)
        return sorted({*names, *others})

    async def _bare(self, run: Run, names: Sequence[str]) -> None:
        """Removes names of which nothing is said any more."""
        spoken_of = {row["id"] for row in await run(_SPOKEN_OF, *({"name": name} for name in names))}
        await run(_UNNAME, *({"name": name} for name in names if name not in spoken_of))

    async def _remove(self, run: Run, user_id: str, claims: Sequence[Claim]) -> None:
        said = _by_name((_name(user_id, one.subject_key), one.id) for one in claims)
        self._graph.removed()
        await run(_UNSAY_IDS, *({"name": name, "ids": ids} for name, ids in said.items()))
        await run(_SETTLE, *({"id": source} for source in {_source(user_id, one.source) for one in claims}))
        await self._bare(run, sorted({*said, *(_name(user_id, one.object_key) for one in claims)}))

    async def _heard(
        self, run: Run, heard: Sequence[tuple[Turn, list[str]]], *, new: Collection[str], settled: bool
    ) -> None:
        """Notes sources of one user with the subjects of their claims; their words only while they are still to be
        read. new: those that are not there yet."""
        rows = [
            {"id": _source(turn.user_id, turn.source), "source": turn.source, "session": turn.session_id,
             "said": turn.said, "names": names, "settled": settled,
             "query": "" if settled else turn.query, "answer": "" if settled else turn.answer}
            for turn, names in heard
        ]  # fmt: skip
        await run(_HEAR, *rows)
        there = [turn for turn, _ in heard if turn.source in new]
        await run(_HEARD, *({"user": one.user_id, "id": _source(one.user_id, one.source)} for one in there))

    async def _forgotten(self, run: Run, ids: Sequence[str]) -> int:
        """Removes sources with all that rests on them alone."""
        if ids:
            self._graph.removed()
        found = await run(_SOURCE, *({"id": one} for one in ids))
        names = sorted({str(name) for row in found for name in row["names"]})
        before = await self._unsaid(run, names, [row["source"] for row in found])
        await run(_UNHEAR, *({"id": row["id"]} for row in found))
        await self._bare(run, before)
        return len(found)


def _by_name(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, claim_id in pairs:
        found.setdefault(name, []).append(claim_id)
    return found


def _name(user_id: str, key: str) -> str:
    """A name's id: no key has a colon."""
    return f"{user_id}:{key}"


def _source(user_id: str, source: str) -> str:
    return f"{len(user_id)}:{user_id}:{source}"


def _mark_of(user_id: str, *, session: str = "", source: str = "") -> str:
    kind, what = ("source", source) if source else ("session", session) if session else ("user", "")
    return f"{kind}:{len(user_id)}:{user_id}:{what}"


def _claims(rows: Iterable[Row]) -> list[Claim]:
    return [claim_of(row) for row in rows]


__all__ = ["LABELS", "TABLES", "Source", "Store"]
