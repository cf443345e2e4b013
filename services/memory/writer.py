"""Writing engrams so that nothing is lost, written twice or comes back, whoever else writes them at the same time.

The store can only replace a record. Therefore what replicas must agree on is in Redis (see `notes`), and every writer
reads it before and after its write: when it has changed meanwhile, the writer writes again. A writer that dies in
between leaves its message unacknowledged, and the one who takes the message over does the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from services.memory.engram import Engram, Note, NoteKind, as_before
from services.memory.index import Index
from services.memory.notes import State, States
from services.memory.store import Store
from services.memory.vectors import Vector
from shared.records.journal import response_id
from shared.records.lanes import RESPONDENTS
from shared.telemetry.logging import get_logger

log = get_logger()

# Called at each step with its name: where tests let a process die.
Hook = Callable[[str], None]


def no_fault(_step: str) -> None:
    """No fault."""


class Keeper:
    """fault: called at each step of a write."""

    def __init__(self, store: Store, states: States, index: Index, fault: Hook = no_fault) -> None:
        self.store = store
        self.states = states
        self.index = index
        self._fault = fault

    async def put(self, user_id: str, items: Sequence[tuple[Engram, Vector]]) -> list[Engram]:
        """Upserts engrams of one user with what is known of them; what was deleted stays deleted.

        Returns those that are in the store now.
        """
        open_items = {engram.id: (engram, vector) for engram, vector in items}
        kept: dict[str, Engram] = {}
        places: dict[str, Vector] = {}
        await self.states.own([engram for engram, _ in open_items.values()])
        self._fault("owned")
        while open_items:
            engrams = [engram for engram, _ in open_items.values()]
            before = await self.states.read(engrams)
            gone = [e.id for e, state in zip(engrams, before, strict=True) if state.gone(e)]
            if gone:
                # neither what was said of an answer waits for it, nor what comes later; a topic may come again
                await self.states.delete([engram_id for engram_id in gone if open_items[engram_id][0].kind == "turn"])
                await self.store.delete(user_id, gone)
                for engram_id in gone:
                    open_items.pop(engram_id)
                    if kept.pop(engram_id, None) is not None:
                        await self.index.remove(user_id, [engram_id])
            states = {e.id: state for e, state in zip(engrams, before, strict=True) if e.id in open_items}
            there = await self.store.get(user_id, list(open_items))
            writing = []
            for engram_id, (engram, vector) in open_items.items():
                known = there.get(engram_id)
                if known is not None and known.recorded > engram.recorded:
                    # a topic that was saved again since: the later content counts
                    kept[engram_id] = known
                    continue
                whole = states[engram_id].known(engram.annotated(known.notes if known else {}))
                writing.append((whole, vector))
                places[engram_id] = vector
                kept[engram_id] = whole
            if writing:
                await self.store.put(user_id, writing)
            self._fault("stored")
            if open_items:
                # before the second look: whoever deletes from now on takes it out of the index again, or is seen there
                await self.index.put(user_id, [kept[engram_id] for engram_id in open_items], places)
            self._fault("indexed")
            open_items = await self._changed(open_items, states)
        return list(kept.values())

    async def _changed(
        self, items: dict[str, tuple[Engram, Vector]], before: dict[str, State]
    ) -> dict[str, tuple[Engram, Vector]]:
        """Those whose state is another one now."""
        engrams = [engram for engram, _ in items.values()]
        after = await self.states.read(engrams) if engrams else []
        return {e.id: items[e.id] for e, state in zip(engrams, after, strict=True) if state != before[e.id]}

    async def rebuild(self, user_id: str, copies: AsyncIterator[Sequence[Engram]]) -> int | None:
        """Rebuild what is damaged of the user's vectors (see Store.rebuild); what was deleted stays deleted."""

        async def current() -> AsyncIterator[Sequence[Engram]]:
            async for page in copies:
                states = await self.states.read(page)
                yield [engram for engram, state in zip(page, states, strict=True) if not state.gone(engram)]

        return await self.store.rebuild(user_id, current(), lambda: self._fault("copied"))

    async def annotate(self, engram_id: str, kind: NoteKind, note: Note) -> bool:
        """Adds an annotation; one for an engram that is not there yet waits for it. False: it was deleted."""
        owner = await self.states.annotate(engram_id, kind, note)
        self._fault("noted")
        if owner is None:
            return False
        owner = owner or self.index.catalog.owner(engram_id) or ""
        if owner:
            await self._change(owner, engram_id, lambda found: found.annotated({kind: note}))
        self._fault("annotated")
        return True

    async def place(self, user_id: str, before: Mapping[str, str]) -> None:
        """Says of engrams that are there which turn came before them: text by id."""
        for engram_id, text in before.items():
            await self._change(user_id, engram_id, partial(replace, before=text))

    async def _change(self, user_id: str, engram_id: str, change: Callable[[Engram], Engram]) -> None:
        while True:
            found = (await self.store.get(user_id, [engram_id])).get(engram_id)
            if found is None:
                # it is being written: its writer looks again afterwards
                return
            (before,) = await self.states.read([found])
            if before.gone(found):
                await self.store.delete(user_id, [engram_id])
                await self.index.remove(user_id, [engram_id])
                return
            whole = change(before.known(found))
            if whole is not found:
                await self.store.update(user_id, [whole])
            self._fault("updated")
            (after,) = await self.states.read([found])
            if after == before:
                # also when the store had it already: whoever wrote it there may have died before this
                await self.index.put(user_id, [whole], look_again=True)
                return

    async def delete(self, user_id: str, ids: Sequence[str]) -> None:
        """For good: text, vector, words, annotations that wait; what comes late is refused for some weeks."""
        if not ids:
            return
        await self.states.delete(ids)
        self._fault("marked")
        await self._bereave(user_id, ids)
        self._fault("bereaved")
        await self.store.delete(user_id, ids)
        self._fault("removed")
        await self.index.remove(user_id, ids)

    async def delete_turn(self, user_id: str, engram: Engram) -> None:
        """One engram, for good; of an answered query what every respondent has said to it."""
        ids = {engram.id}
        if engram.kind == "turn" and engram.query_id and engram.id in _responses(engram.query_id):
            ids |= _responses(engram.query_id)
        await self.delete(user_id, sorted(ids))

    async def _bereave(self, user_id: str, ids: Sequence[str]) -> None:
        """Takes the words of turns out of those that came after them. While the turns are there: whoever dies before
        they are removed does it again."""
        gone = await self.store.get(user_id, ids)
        texts = {as_before(turn) for turn in gone.values() if turn.kind == "turn"}
        for session_id in {turn.session_id for turn in gone.values() if turn.kind == "turn" and turn.session_id}:
            others = await self.store.get(user_id, await self.store.ids_of_session(user_id, session_id))
            for other in others.values():
                # one from outside has the text alone
                if other.id not in gone and other.before and (other.follows in gone or other.before in texts):
                    await self._change(user_id, other.id, partial(replace, before="", follows=""))

    async def ended(self, engram: Engram) -> bool:
        """Whether it was saved in a conversation that was deleted meanwhile."""
        return await self.states.ended(engram)

    async def delete_session(self, user_id: str, session_id: str, until: int) -> int:
        """Everything of a session that entered the memory until then; the number of engrams."""
        await self.states.forget(user_id, session_id, until)
        ids = await self.store.ids_of_session(user_id, session_id)
        found = await self.store.get(user_id, ids)
        gone = [engram.id for engram in found.values() if engram.recorded <= until]
        await self.delete(user_id, gone)
        return len(gone)

    async def delete_queries(self, user_id: str, session_id: str, query_ids: Sequence[str], until: int) -> int:
        """Everything of some queries of a session that entered the memory until then; the number of engrams. An answer
        that is still on its way is refused as well."""
        await self.states.take_back(user_id, query_ids, until)
        ids = await self.store.ids_of_session(user_id, session_id)
        found = await self.store.get(user_id, ids)
        asked = set(query_ids)
        gone = [engram.id for engram in found.values() if engram.query_id in asked and engram.recorded <= until]
        await self.delete(user_id, gone)
        return len(gone)

    async def delete_user(self, user_id: str) -> int:
        """Everything of a user; the number of engrams."""
        await self.index.ready.wait()
        await self.states.forget(user_id, "", await self.states.now())
        ids = self.index.catalog.ids(user_id)
        await self.states.delete(ids)
        await self.store.drop_user(user_id)
        await self.index.remove_user(user_id)
        return len(ids)


def _responses(query_id: str) -> set[str]:
    """The ids of the engrams of a query's answers."""
    return {response_id(query_id, respondent) for respondent in RESPONDENTS}
