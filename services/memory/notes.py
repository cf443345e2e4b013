"""What must be agreed on between replicas of one engram: its newest annotations, and whether it was deleted.

A hash per engram holds both, so that one read sees them together. Whoever writes an engram reads this state before and
after: when it has changed in between, it writes again (see `writer`). The hash goes after some days; by then the
annotations are in the store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from services.memory.engram import Engram, Note, NoteKind
from shared.bus import Bus, Command, Script, order
from shared.bus.keys import engram_key, gone_key, taken_back_key

OWNER, DELETED = "owner", "deleted"
_PAGE = 500

_SCRIPTS = Path(__file__).parent / "scripts"
_ANNOTATE = Script.read(_SCRIPTS / "annotate_engram.lua")
_OWN = Script.read(_SCRIPTS / "own_engram.lua")
_DELETE = Script.read(_SCRIPTS / "delete_engram.lua")


@dataclass(frozen=True, slots=True)
class State:
    """`gone_before`: what entered the memory until then (ms) is deleted, by its query, its session or its user.

    bereft: the turn before it was deleted, whose words it must not keep.
    """

    notes: Mapping[str, Note] = field(default_factory=dict)
    deleted: bool = False
    gone_before: int = 0
    bereft: bool = False

    def gone(self, engram: Engram) -> bool:
        return self.deleted or engram.recorded <= self.gone_before

    def known(self, engram: Engram) -> Engram:
        """The engram with what is known of it here."""
        whole = engram.annotated(self.notes)
        return replace(whole, before="", follows="") if self.bereft and whole.before else whole


class States:
    def __init__(self, bus: Bus, pending_days: float, forget_days: float) -> None:
        self._bus = bus
        self._pending = int(pending_days * 86_400)
        self._forget = int(forget_days * 86_400)

    async def now(self) -> int:
        """Redis' clock in ms: the one that query ids are made of."""
        return await self._bus.server_time()

    async def annotate(self, engram_id: str, kind: NoteKind, note: Note) -> str | None:
        """The engram's owner, '' when it is not there yet, None when it was deleted."""
        command = _ANNOTATE((engram_key(engram_id),), kind, note.stamp, note.dump(), self._pending)
        owner = await self._bus.link.call(*command)
        return None if owner is None else str(owner.decode())

    async def own(self, engrams: Sequence[Engram]) -> None:
        """To be called before an engram is written: from here on an annotation finds its owner."""
        await self._bus.link.pipe([_OWN((engram_key(e.id),), e.user_id, self._pending) for e in engrams])

    async def read(self, engrams: Sequence[Engram]) -> list[State]:
        asked = [(_about(engram), _about_what_it_follows(engram)) for engram in engrams]
        replies = iter(await self._bus.link.pipe([one for own, before in asked for one in (*own, *before)]))
        return [
            replace(_state(*islice(replies, len(own))), bereft=any([*islice(replies, len(before))]))
            for own, before in asked
        ]

    async def ended(self, engram: Engram) -> bool:
        """Whether the session of a note or topic was deleted, or the query in which it was saved taken back, after that
        query was asked: a tool may be called while its session is being deleted."""
        if not engram.session_id:
            return False
        session: Command = ("GET", gone_key(engram.user_id, engram.session_id))
        marks = await self._bus.link.pipe([session, *_taken_back(engram.user_id, engram.query_id)])
        return _until(*marks) >= accepted(engram.query_id, engram.recorded)

    async def delete(self, ids: Sequence[str]) -> None:
        for at in range(0, len(ids), _PAGE):
            page = ids[at : at + _PAGE]
            await self._bus.link.pipe([_DELETE((engram_key(engram_id),), self._forget) for engram_id in page])

    async def restore(self, ids: Sequence[str]) -> None:
        """What is imported on purpose may come back."""
        for at in range(0, len(ids), _PAGE):
            page = ids[at : at + _PAGE]
            found = await self._bus.link.pipe([("HEXISTS", engram_key(one), DELETED) for one in page])
            if gone := [engram_key(one) for one, deleted in zip(page, found, strict=True) if deleted]:
                await self._bus.link.pipe([("DEL", key) for key in gone])

    async def forget(self, user_id: str, session_id: str, until: int) -> None:
        """What entered until then is deleted: of one session, or with '' of the user."""
        await self._bus.link.call("SET", gone_key(user_id, session_id), until, "EX", self._forget)

    async def take_back(self, user_id: str, query_ids: Sequence[str], until: int) -> None:
        """What entered until then of some queries is deleted."""
        keys = [taken_back_key(user_id, query_id) for query_id in query_ids]
        await self._bus.link.pipe([("SET", key, until, "EX", self._forget) for key in keys])


def _about(engram: Engram) -> list[Command]:
    """What reads an engram's own state, as `_state` takes it."""
    return [
        ("HGETALL", engram_key(engram.id)),
        ("GET", gone_key(engram.user_id)),
        ("GET", gone_key(engram.user_id, engram.session_id)),
        *_taken_back(engram.user_id, engram.query_id),
    ]


def _about_what_it_follows(engram: Engram) -> list[Command]:
    """What reads whether the turn before an engram was deleted: nothing, where none is known."""
    if not engram.follows:
        return []
    query_id = engram.follows.rpartition(":")[0]
    return [("HEXISTS", engram_key(engram.follows), DELETED), *_taken_back(engram.user_id, query_id)]


def _taken_back(user_id: str, query_id: str) -> list[Command]:
    """What reads whether a query was taken back: nothing, for what was said in none."""
    return [("GET", taken_back_key(user_id, query_id))] if query_id else []


def _state(raw: Sequence[bytes], *until: bytes | None) -> State:
    notes: dict[str, Note] = {}
    for name, value in zip(raw[::2], raw[1::2], strict=True):
        # what is not readable is nobody's note
        with suppress(ValueError):
            if (kind := name.decode()) not in (OWNER, DELETED):
                notes[kind] = Note.load(value.decode())
    return State(notes, DELETED.encode() in raw[::2], _until(*until))


def _until(*marks: bytes | None) -> int:
    return max((int(at) for at in marks if at and at.isdigit()), default=0)


def accepted(query_id: str, otherwise: int) -> int:
    """When a query was accepted, in ms: its id says it, unless another program made it."""
    try:
        return order(query_id)[0] or otherwise
    except ValueError:
        return otherwise
