"""The knowledge of each user: claims, the names that they are about, and the sources that have been read.

Facts are computed from the claims at each request (see `merging`). One transaction replaces the claims of a source, so
a repetition changes nothing. A deletion leaves a mark, so that late messages about the deleted source are refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from services.knowledge import statements as on
from services.knowledge.claims import Claim, Turn, claim_of
from services.knowledge.graph import Graph, Row, Run
from services.knowledge.relations import symmetric
from services.knowledge.statements import of_name, of_source

# Sources that are removed in one transaction.
_PAGE = 500


@dataclass(frozen=True, slots=True)
class Source:
    """A turn in the store. settled: no model is to read it any more; until then its words are stored for the model."""

    turn: Turn
    settled: bool


class Store:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────

    async def replace_claims(self, turn: Turn, claims: Sequence[Claim], *, settled: bool) -> int | None:
        """Replace the claims of a source; return the user's new version.

        Returns None if nothing was written: the source is settled, or was deleted.
        """
        user = turn.user_id
        async with self._graph.transaction() as run:
            # First: on a server, another writer for this user waits here.
            version = await self._touch(run, user)
            if await self._is_forgotten(run, turn):
                return None
            there = await run(on.SOURCE, of_source(user, turn.source))
            if there and there[0]["settled"]:
                return None
            before = await self._remove_of_sources(run, user, [turn.source])
            subjects = await self._add(run, user, claims)
            await self._save(run, turn, subjects, new=not there, settled=settled)
            await self._remove_unused(run, user, before)
            return version

    async def settle(self, user_id: str, source: str) -> None:
        """Note that no model is to read this source any more."""
        async with self._graph.transaction() as run:
            await self._touch(run, user_id)
            await run(on.SETTLE, of_source(user_id, source))

    async def import_claims(self, user_id: str, claims: Sequence[Claim]) -> int:
        """Add claims of an export with their sources; return the number of new ones. Existing claims stay."""
        by_source: dict[str, list[Claim]] = {}
        for one in {each.id: each for each in claims}.values():
            by_source.setdefault(one.source, []).append(one)
        added = 0
        async with self._graph.transaction() as run:
            await self._touch(run, user_id)
            await run(on.UNMARK, *({"mark": _mark(user_id, source=source)} for source in by_source))
            found = await run(on.SOURCE, *(of_source(user_id, source) for source in by_source))
            there = {row["source"] for row in found}
            for source, those in by_source.items():
                known = await self._subjects(run, user_id, source) if source in there else set()
                ids = await self._existing(run, user_id, those) if source in there else set()
                fresh = [one for one in those if one.id not in ids]
                subjects = await self._add(run, user_id, fresh)
                turn = Turn(source, user_id, those[0].session_id, those[0].said, "")
                await self._save(run, turn, known | subjects, new=source not in there, settled=True)
                added += len(fresh)
        return added

    async def remove_claims(self, user_id: str, claims: Sequence[Claim]) -> None:
        """Remove claims for good. No model reads their sources any more."""
        async with self._graph.transaction() as run:
            await self._touch(run, user_id)
            await self._remove(run, user_id, claims)

    async def correct(self, user_id: str, turn: Turn, old: Sequence[Claim], new: Claim) -> None:
        """Replace claims by one that a person entered."""
        async with self._graph.transaction() as run:
            await self._touch(run, user_id)
            there = await run(on.SOURCE, of_source(user_id, turn.source))
            await self._remove(run, user_id, [*old, new])
            subjects = await self._add(run, user_id, [new])
            await self._save(run, turn, subjects, new=not there, settled=True)

    async def forget(self, user_id: str, sources: Collection[str], at: int) -> int:
        """Remove sources with their claims, and refuse them until a time (ms); return the number that existed."""
        async with self._graph.transaction() as run:
            await self._touch(run, user_id)
            await run(on.MARK, *({"mark": _mark(user_id, source=source), "at": at} for source in sources))
            found = await run(on.SOURCE, *(of_source(user_id, source) for source in sources))
            return await self._remove_sources(run, user_id, found)

    async def forget_session(self, user_id: str, session_id: str, at: int) -> int:
        """Do the same for the sources of a session until then (ms)."""
        async with self._graph.transaction() as run:
            await self._touch(run, user_id)
            await run(on.MARK, {"mark": _mark(user_id, session=session_id), "at": at})
            found = await run(on.SOURCES_OF_SESSION, {"user": user_id, "session": session_id, "at": at})
            return await self._remove_sources(run, user_id, found)

    async def forget_user(self, user_id: str, at: int) -> int:
        """Do the same for all sources of a user until then (ms), a bounded number in each transaction."""
        count = 0
        async with self._graph.transaction() as run:
            await self._touch(run, user_id)
            await run(on.MARK, {"mark": _mark(user_id), "at": at})
        while True:
            async with self._graph.transaction() as run:
                await self._touch(run, user_id)
                found = await run(on.SOURCES_UNTIL, {"user": user_id, "at": at, "n": _PAGE})
                if not found:
                    return count
                count += await self._remove_sources(run, user_id, found)

    async def forget_old(self, user_id: str, before: int, limit: int) -> int:
        """Remove the oldest sources from before a time (ms), at most `limit`; return their number. Sources that a
        person entered stay."""
        async with self._graph.transaction() as run:
            await self._touch(run, user_id)
            found = await run(on.READ_BEFORE, {"user": user_id, "before": before, "n": limit})
            return await self._remove_sources(run, user_id, found)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────

    async def source(self, user_id: str, source: str) -> Source | None:
        found = await self._graph.read(on.SOURCE, of_source(user_id, source))
        if not found:
            return None
        row = found[0]
        turn = Turn(source, user_id, row["session_id"], row["said"], row["query"] or "", row["answer"] or "")
        return Source(turn, bool(row["settled"]))

    async def version(self, user_id: str) -> int:
        """Return a number that changes with every write for the user."""
        found = await self._graph.read(on.VERSION, {"user": user_id})
        return int(found[0]["version"]) if found else 0

    async def keys(self, user_id: str) -> list[str]:
        """Return the keys of all names of a user."""
        return [row["key"] for row in await self._graph.read(on.KEYS, {"user": user_id})]

    async def aliases(self, user_id: str) -> list[Claim]:
        return _claims(await self._graph.read(on.ALIASES, {"user": user_id}))

    async def newest_claims(self, user_id: str, keys: Iterable[str], each: int) -> list[Claim]:
        """Return the newest claims about these names, at most `each` of a name."""
        found = await self._graph.read(on.NEWEST, *({**of_name(user_id, key), "n": each} for key in keys))
        return _distinct(found)

    async def newest_rivals(
        self, user_id: str, keys: Iterable[str], relations: Collection[str], each: int
    ) -> list[Claim]:
        """Return the newest claims with these names as subjects and one of these relations, at most `each` of a name.

        The ends of a symmetric relation are both subjects.
        """
        if not relations:
            return []
        names = {"relations": sorted(relations), "symmetric": [one for one in relations if symmetric(one)], "n": each}
        asked = ({**of_name(user_id, key), **names} for key in keys)
        return _distinct(await self._graph.read(on.NEWEST_RIVALS, *asked))

    async def claims_between(self, user_id: str, keys: Iterable[str], others: Collection[str]) -> list[Claim]:
        """Return every claim about one of these names and one of the others."""
        asked = ({**of_name(user_id, key), "others": list(others)} for key in keys)
        return _distinct(await self._graph.read(on.BETWEEN, *asked))

    async def claim(self, user_id: str, claim_id: str) -> Claim | None:
        return next(iter(_claims(await self._graph.read(on.CLAIM, {"user": user_id, "claim": claim_id}))), None)

    async def claims(self, user_id: str) -> list[Claim]:
        """Return every claim of a user, in the order of ids."""
        # In a thread: many claims take a while.
        return await asyncio.to_thread(_claims, await self._graph.read(on.CLAIMS, {"user": user_id}))

    async def claims_page(self, user_id: str, after: str, limit: int) -> list[Claim]:
        """Return the claims of a user that follow an id, in the order of ids; '' is before all."""
        return _claims(await self._graph.read(on.PAGE, {"user": user_id, "after": after, "n": limit}))

    async def users(self) -> list[str]:
        return [row["id"] for row in await self._graph.read(on.USERS, {})]

    async def count(self, user_id: str) -> int:
        return int((await self._graph.read(on.COUNT, {"user": user_id}))[0]["n"])

    async def counts(self) -> dict[str, int]:
        """Return the numbers of claims and names of all users."""
        claims, names = await self._graph.read(on.COUNT_ALL, {}), await self._graph.read(on.COUNT_NAMES, {})
        return {"claims": int(claims[0]["n"]), "names": int(names[0]["n"])}

    async def ping(self) -> None:
        await self._graph.ping()

    # ── steps of a transaction ───────────────────────────────────────────────────────────────────────────────

    async def _touch(self, run: Run, user_id: str) -> int:
        return int((await run(on.TOUCH, {"user": user_id}))[0]["version"])

    async def _is_forgotten(self, run: Run, turn: Turn) -> bool:
        user = turn.user_id
        marks = [_mark(user), _mark(user, session=turn.session_id), _mark(user, source=turn.source)]
        return bool(await run(on.IS_MARKED, *({"mark": mark, "said": turn.said} for mark in marks)))

    async def _subjects(self, run: Run, user_id: str, *sources: str) -> set[str]:
        """Return the keys of the subjects of sources' claims."""
        found = await run(on.SUBJECTS, *(of_source(user_id, source) for source in sources))
        return {str(row["key"]).rpartition(":")[2] for row in found}

    async def _existing(self, run: Run, user_id: str, claims: Sequence[Claim]) -> set[str]:
        """Return the ids of those claims that are in the store."""
        return {row["id"] for row in await run(on.HAS_CLAIM, *_ids_by_subject(user_id, claims))}

    async def _add(self, run: Run, user_id: str, claims: Sequence[Claim]) -> set[str]:
        """Write new claims; return the keys of their subjects."""
        keys = sorted({key for one in claims for key in (one.subject_key, one.object_key)})
        there = {row["key"] for row in await run(on.HAS_NAME, *(of_name(user_id, key) for key in keys))}
        await run(on.ADD_NAME, *(of_name(user_id, key) for key in keys if key not in there))
        nodes = [
            {
                "subject_node": of_name(user_id, one.subject_key)["id"],
                "object_node": of_name(user_id, one.object_key)["id"],
            }
            for one in claims
        ]
        await run(
            on.ADD_CLAIM, *({"user": user_id, **one.row(), **node} for one, node in zip(claims, nodes, strict=True))
        )
        return {one.subject_key for one in claims}

    async def _save(self, run: Run, turn: Turn, subjects: Collection[str], *, new: bool, settled: bool) -> None:
        """Write a source with the subjects of its claims; its words only if a model is still to read them."""
        query, answer = ("", "") if settled else (turn.query, turn.answer)
        row = {"session": turn.session_id, "said": turn.said, "settled": settled, "query": query, "answer": answer}
        names = [of_name(turn.user_id, key)["id"] for key in sorted(subjects)]
        statement = on.ADD_SOURCE if new else on.SET_SOURCE
        await run(statement, {**of_source(turn.user_id, turn.source), **row, "names": names})

    async def _remove(self, run: Run, user_id: str, claims: Sequence[Claim]) -> None:
        self._graph.removed()
        await run(on.REMOVE_CLAIMS, *_ids_by_subject(user_id, claims))
        await run(on.SETTLE, *(of_source(user_id, source) for source in {one.source for one in claims}))
        await self._remove_unused(run, user_id, {key for one in claims for key in (one.subject_key, one.object_key)})

    async def _remove_of_sources(self, run: Run, user_id: str, sources: Sequence[str]) -> set[str]:
        """Remove the claims of sources; return the keys of the names that they were about."""
        subjects = await self._subjects(run, user_id, *sources)
        asked = [{**of_name(user_id, key), "sources": list(sources)} for key in sorted(subjects)]
        objects = {row["key"] for row in await run(on.OBJECTS_OF_SOURCES, *asked)}
        await run(on.REMOVE_OF_SOURCES, *asked)
        return subjects | objects

    async def _remove_unused(self, run: Run, user_id: str, keys: Collection[str]) -> None:
        """Remove those names that no claim is about any more."""
        names = [of_name(user_id, key) for key in sorted(keys)]
        used = {row["key"] for row in await run(on.HAS_CLAIMS, *names)}
        await run(on.REMOVE_NAME, *(name for name in names if name["key"] not in used))

    async def _remove_sources(self, run: Run, user_id: str, found: Sequence[Row]) -> int:
        """Remove sources with their claims."""
        sources = [str(row["source"]) for row in found]
        if sources:
            self._graph.removed()
        names = await self._remove_of_sources(run, user_id, sources)
        await run(on.REMOVE_SOURCE, *(of_source(user_id, source) for source in sources))
        await self._remove_unused(run, user_id, names)
        return len(sources)


def _ids_by_subject(user_id: str, claims: Iterable[Claim]) -> list[Row]:
    found: dict[str, list[str]] = {}
    for one in claims:
        found.setdefault(one.subject_key, []).append(one.id)
    return [{**of_name(user_id, key), "ids": ids} for key, ids in found.items()]


def _mark(user_id: str, *, session: str = "", source: str = "") -> str:
    kind, name = ("source", source) if source else ("session", session) if session else ("user", "")
    return f"{kind}:{len(user_id)}:{user_id}:{name}"


def _distinct(rows: Iterable[Row]) -> list[Claim]:
    """Return the claims without repetitions: a claim between two names is found at both."""
    return list({one.id: one for one in _claims(rows)}.values())


def _claims(rows: Iterable[Row]) -> list[Claim]:
    return [claim_of(row) for row in rows]


__all__ = ["Source", "Store"]
