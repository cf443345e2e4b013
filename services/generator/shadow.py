"""The choice of queries that the second respondent leaves out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from services.generator.settings import GeneratorSettings
from shared.contracts import QueryReceived
from shared.envelope import Message
from shared.participant.sampling import one_in


async def is_left_out(
    settings: GeneratorSettings, message: Message[QueryReceived], unfinished: Callable[[], Awaitable[int]]
) -> bool:
    """Return whether a respondent leaves a query out. A leaves out none; B takes a sample while few are unfinished.

    B also leaves out plain calls, which are not the agent's, and queries with client tools, whose results a client
    returns to one respondent only. unfinished: returns the number of unfinished interactive queries.
    """
    query = message.payload
    if settings.respondent_id == "A":
        return False
    if query.plain or query.client_tools is not None:
        return True
    if message.deliveries > 1:
        # An earlier owner may have begun it.
        return False
    if not one_in(settings.answer_one_in, message.entry_id):
        return True
    limit = settings.leave_out_above
    return limit is not None and await unfinished() > limit
