"""The turn before each turn of a session, where turns come from outside: in any order, in parts, and more than once.

Values in, values out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby

from services.memory.engram import IMPORTED, Engram, as_before


def overdue(there: Iterable[Engram], coming: Sequence[Engram] = ()) -> dict[str, str]:
    """By id: what imported turns of one session should have as `before`, and do not have.

    The turn before is the last one of an earlier time. Of those of one time, nobody knows the order, but of those that
    are `coming` together, it is theirs. What a line has said itself stands, unless it is the text of a turn that is no
    longer the last one before it.
    """
    due: dict[str, str] = {}
    order = {turn.id: place for place, turn in enumerate(coming)}
    talks: dict[str, list[Engram]] = defaultdict(list)
    for turn in (*there, *coming):
        if turn.kind == "turn":
            talks[turn.respondent_id].append(turn)
    for talk in talks.values():
        # nothing came before the first
        last, earlier = [""], {""}
        talk.sort(key=lambda turn: (turn.time, order.get(turn.id, -1), turn.id))
        for _, group in groupby(talk, key=lambda turn: turn.time):
            texts: list[str] = []
            sibling: str | None = None
            for turn in group:
                wanted = last if sibling is None else [sibling]
                if _guessed(turn) and turn.before in earlier and turn.before not in wanted:
                    due[turn.id] = wanted[-1]
                texts.append(as_before(turn))
                sibling = texts[-1] if turn.id in order else None
            last = texts
            earlier.update(texts)
    return due


def _guessed(turn: Engram) -> bool:
    """Whether it came as a line that told its time, and nothing more of its place."""
    return turn.id.startswith(IMPORTED) and turn.time != turn.recorded
