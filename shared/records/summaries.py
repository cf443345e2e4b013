"""The running summary of a session's older turns, stored beside them, never in their place.

The script that removes a turn from the session also removes the summary. The script that stores a summary refuses it
if one of its turns is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from shared.bus import Bus, Command, order
from shared.bus.keys import session_key, summary_key, turns_key
from shared.bus.replies import Reply
from shared.records.lanes import number, padded, pairs
from shared.records.lua import script
from shared.records.sessions import Turn, files_of
from shared.telemetry.unread import not_understood

# The most files of summarised turns that a summary records; the newest are recorded.
_MAX_FILES = 50

_KEEP = script("store_summary")


@dataclass(frozen=True, slots=True)
class Summary:
    """text: the summary of `turns` turns. until: the query of the newest of them. attachments: the files of these
    turns, oldest first, as turns record them."""

    until: str
    turns: int
    text: str
    attachments: Sequence[Mapping[str, Any]] = ()

    def covers(self, query_id: str) -> bool:
        return order(query_id) <= order(self.until)

    def tells_of(self, turns: Sequence[Turn], after: str | None = None) -> bool:
        """Return whether it covers only this conversation: these turns, oldest first, up to the query `after`.

        It covers another one too if a turn after its last covered turn continues from an earlier turn than that.
        """
        reach = order(self.until)
        bounds = [(turn.after, order(turn.query_id)) for turn in turns] + [(after, None)]
        return not any(bound and order(bound) < reach and (place is None or reach < place) for bound, place in bounds)

    def message(self, files: Sequence[str] = ()) -> dict[str, str]:
        """Return the message that the model reads before the later turns. files: a line for each attached file."""
        heading = "=== EARLIER IN THIS CONVERSATION ==="
        lines = "\n".join([self.text, *files])
        about = f"A summary of its first {self.turns} turns; search_memory finds what was said word for word."
        return {"role": "system", "content": f"{heading}\n{about}\n{lines}"}


def reading(session_id: str) -> Command:
    """Return the command that reads a session's summary (see `summary_of`)."""
    return ("HGETALL", summary_key(session_id))


def list_or_nothing(text: str) -> Any:
    try:
        return orjson.loads(text or "[]")
    except ValueError:
        return []


def summary_of(session_id: str, raw: Reply) -> Summary | None:
    """Return the summary in the reply to `reading`."""
    if not raw:
        return None
    values = pairs(raw)
    files = files_of(list_or_nothing(values.get("attachments", "")))
    summary = Summary(values.get("until", ""), number(values, "turns"), values.get("text", ""), files)
    try:
        order(summary.until)
    except ValueError:
        not_understood("the summary of a session", summary_key(session_id), "its last query has no valid id")
        return None
    return summary


class Summaries:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def read(self, session_id: str) -> Summary | None:
        return summary_of(session_id, await self._bus.link.call(*reading(session_id)))

    async def keep(
        self,
        session_id: str,
        user_id: str,
        before: Summary | None,
        turns: Sequence[Turn],
        text: str,
        instead: Summary | None = None,
    ) -> bool:
        """Store a summary of `before` and the turns after it, oldest first, at least one.

        Returns False when a turn or the session is missing, or another replica has stored a summary meanwhile.
        instead: the summary of another conversation of the session, which this one replaces.
        """
        told = len(turns) + (before.turns if before else 0)
        attached = [*(before.attachments if before else ()), *(file for turn in turns for file in turn.attachments)]
        # Each file once, at its last place.
        files = list({str(file["id"]): file for file in reversed(attached)}.values())[:_MAX_FILES][::-1]
        values = ("until", turns[-1].query_id, "turns", told, "text", text, "attachments", orjson.dumps(files))
        keys = (session_key(session_id), turns_key(session_id, "A"), summary_key(session_id))
        made_from = [f"{padded(turn.query_id)} " for turn in turns]
        last = before or instead
        args = (user_id, last.until if last else "", len(values), *values, *made_from)
        return bool(await self._bus.link.call(*_KEEP(keys, *args)))
