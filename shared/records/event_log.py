"""The messages of a query on the bus, found in its streams by their correlation id.

The streams are the only source: entries that retention has removed are absent.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from shared.bus import Bus, Command, ReplyError, order
from shared.bus.keys import journal_key, stream_key
from shared.contracts import (
    AGENT_TRANSITION,
    ANSWER_DIALOG,
    CRITIQUE_RESULT,
    PAIRWISE_RESULT,
    QUERY_CANCEL,
    QUERY_RECEIVED,
    RESPONSE_GENERATION,
    REWARD_EVENT,
    TOOL_REQUEST,
    TOOL_RESULT,
    USER_FEEDBACK,
    PersonaToolTrace,
    ToolCallRecord,
    canonical_tool,
)
from shared.records.events import Completed, ToolAsked
from shared.records.journal import EntryType, JournalEntry, read_result
from shared.records.lua import script
from shared.telemetry.logging import get_logger

log = get_logger()

_RESPONDENTS = ("A", "B")
_BEFORE_TOOLS = (QUERY_CANCEL, AGENT_TRANSITION)
_AFTER_TOOLS = (RESPONSE_GENERATION, ANSWER_DIALOG, CRITIQUE_RESULT, PAIRWISE_RESULT, USER_FEEDBACK, REWARD_EVENT)
# Entries that one script call examines: Redis serves no other client meanwhile.
_PAGE = 250
# Entries that are examined in long streams, all together, about 3 µs each.
MAX_EXAMINED = 4_000

_FIND = script("find_by_correlation")


class MessageRef(NamedTuple):
    """The place of a message: the id is that of its entry in the subject's stream."""

    subject: str
    entry_id: str


async def messages_of(bus: Bus, query_id: str) -> list[MessageRef]:
    """Return the messages of a query that are on the bus, of all participants, in the order of their ids.

    Streams are examined from the query's id on, page by page in turns, until they end or MAX_EXAMINED entries have been
    examined. Of tools, only the streams of those that the query's journals name are read.
    """
    tools = {tool: None for respondent in _RESPONDENTS async for tool in _tools_called(bus, query_id, respondent)}
    of_tools = [subject.for_tool(tool) for tool in tools for subject in (TOOL_REQUEST, TOOL_RESULT)]
    subjects = [subject.name for subject in (*_BEFORE_TOOLS, *of_tools, *_AFTER_TOOLS)]
    first = f"{order(query_id)[0]}-0"
    # The query itself has no correlation id.
    searches = {QUERY_RECEIVED.name: (query_id, query_id, "")}
    searches |= dict.fromkeys(subjects, (first, "+", query_id))
    rank = {subject: number for number, subject in enumerate(searches)}
    found: list[MessageRef] = []
    examined = 0
    while searches and examined < MAX_EXAMINED:
        replies = await bus.link.submit([_find(subject, *search) for subject, search in searches.items()], True)
        after: dict[str, tuple[str, str, str]] = {}
        for (subject, (_, last, value)), reply in zip(searches.items(), replies, strict=True):
            if isinstance(reply, ReplyError):
                log.warning("event_log.stream_not_read", subject=subject, reason=str(reply))
                continue
            continues, *ids = (part.decode() for part in reply)
            found += [MessageRef(subject, entry_id) for entry_id in ids]
            if continues:
                after[subject] = (continues, last, value)
        searches = after
        examined += _PAGE * len(after)
    if searches:
        log.info("event_log.shortened", query_id=query_id, subjects=list(searches))
    return sorted(found, key=lambda message: (order(message.entry_id), rank[message.subject]))


def _find(subject: str, first: str, last: str, value: str) -> Command:
    return _FIND((stream_key(subject),), first, last, value, _PAGE)


async def _tools_called(bus: Bus, query_id: str, respondent: str) -> AsyncIterator[str]:
    """Yield the tools that a respondent has called so far, by its journal."""
    async for entries in read_result(bus, journal_key(query_id, respondent)):
        for entry in entries:
            for call in _calls(entry):
                yield canonical_tool(call.tool, call.args)


def _calls(entry: JournalEntry) -> Sequence[ToolAsked | ToolCallRecord | PersonaToolTrace]:
    match entry.typed().event if entry.type in (EntryType.TOOL_REQUEST, EntryType.COMPLETED) else None:
        case ToolAsked() as asked:
            return [asked]
        case Completed() as end:
            return [*end.tool_calls, *(call for one in end.deliberations for call in one.tool_trace)]
        case _:
            return ()
