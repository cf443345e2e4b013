"""Conversations and notes as they come out of other products' exports. Values in, values out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

# As the API takes them.
MAX_TEXT = 400_000
MAX_TITLE = 80
_LAST_TIME = 10**14
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._:@+=-]")


@dataclass(frozen=True, slots=True)
class Said:
    """One message of the path that its product shows last. `time` is in ms since the epoch, None where it is not known.
    role: user or assistant."""

    role: str
    text: str
    time: int | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """`time` is in ms since the epoch, and larger than that of the turn before."""

    query: str
    answer: str
    time: int

    @property
    def size(self) -> int:
        """Bytes of its texts."""
        return len(self.query.encode()) + len(self.answer.encode())


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation. `name` is its id here: made from the product's own, so that the same one is the same again."""

    name: str
    title: str
    turns: tuple[Turn, ...]

    @property
    def size(self) -> int:
        """Bytes of its texts."""
        return sum(turn.size for turn in self.turns)

    def pieces(self, most_bytes: int, most_turns: int) -> Iterator[Talk]:
        """The conversation, in as many parts as it needs; each has a turn at least."""
        begin, size, number = 0, 0, 1
        for at, turn in enumerate(self.turns):
            if at > begin and (size + turn.size > most_bytes or at - begin == most_turns):
                yield self._piece(number, begin, at)
                begin, size, number = at, 0, number + 1
            size += turn.size
        yield self._piece(number, begin, len(self.turns))

    def _piece(self, number: int, begin: int, end: int) -> Talk:
        if number == 1:
            return replace(self, turns=self.turns[:end])
        return Talk(f"{self.name[:120]}.{number}", f"{self.title[:70]} ({number})", self.turns[begin:end])


@dataclass(frozen=True, slots=True)
class Note:
    """What a product has remembered of its user."""

    content: str
    time: int | None = None


@dataclass(slots=True)
class Found:
    """What an export holds. left_out: what is not taken in, in words, and how often."""

    talks: list[Talk] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def turns(self) -> int:
        return sum(len(talk.turns) for talk in self.talks)

    def add(self, name: str, title: str, messages: Iterable[Said], began: int | None) -> None:
        """A conversation by its messages; one without a whole turn is counted only."""
        turns = turns_of(messages, began or 0, self.left_out)
        if turns:
            flat = " ".join((title or turns[0].query).split())
            self.talks.append(Talk(_NOT_IN_NAMES.sub("-", name)[:128], flat[:MAX_TITLE], turns))
        else:
            self.left_out["conversations without a question and its answer"] += 1


def turns_of(messages: Iterable[Said], began: int, left_out: Counter[str]) -> tuple[Turn, ...]:
    """Questions with their answers. Several messages of one side in a row are one; times only grow.

    began: when the conversation did, for messages that do not tell their time.
    """
    turns: list[Turn] = []
    asked: list[Said] = []
    answered: list[Said] = []

    def close() -> None:
        query, answer = _joined(asked), _joined(answered)
        if not asked:
            left_out["answers without a question"] += bool(answered)
        elif not answer:
            left_out["questions without an answer"] += 1
        elif max(len(query), len(answer)) > MAX_TEXT:
            left_out[f"turns longer than {MAX_TEXT:,} characters"] += 1
        else:
            last = turns[-1].time if turns else began - 1
            told = next((one.time for one in (*asked, *answered) if one.time is not None), None)
            turns.append(Turn(query, answer, max(last + 1, told or 0)))
        asked.clear()
        answered.clear()

    for one in messages:
        if not one.text.strip():
            continue
        if one.role == "user" and answered:
            close()
        (asked if one.role == "user" else answered).append(one)
    if asked or answered:
        close()
    return tuple(turns)


def _joined(parts: Sequence[Said]) -> str:
    return "\n\n".join(one.text.strip() for one in parts)


def milliseconds(value: object) -> int | None:
    """A time since the epoch in seconds, milliseconds, micro- or nanoseconds; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 10**20:
        return None
    size = float(value)
    for limit, factor in ((10**11, 1_000.0), (_LAST_TIME, 1.0), (10**17, 1e-3)):
        if size < limit:
            return int(size * factor)
    return int(size * 1e-6)
