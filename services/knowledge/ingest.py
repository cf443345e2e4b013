"""Handlers of messages from the bus: responses, requests to have the model read a response, deletions.

Rules read a response at once. Then the model reads it in a background call, and its claims replace those of the rules.
Each step is one transaction of the store, and its message is acknowledged afterwards: after a takeover, another replica
finds the finished steps in the store, and does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from services.knowledge import rules
from services.knowledge.claims import Turn
from services.knowledge.extract import Extractor
from services.knowledge.settings import KnowledgeSettings
from services.knowledge.store import Store
from shared.bus import order
from shared.contracts import (
    KNOWLEDGE_READ,
    KnowledgeForget,
    KnowledgeRead,
    MemoryForget,
    Outgoing,
    QueryForget,
    ResponseGeneration,
)
from shared.envelope import Message
from shared.participant.background import retry_while_transient
from shared.participant.service import Context
from shared.records.journal import response_id
from shared.telemetry.logging import get_logger

log = get_logger()

R = TypeVar("R")
# Called with the name of each step: tests kill a process there.
Hook = Callable[[str], None]
# While so many responses wait for the model, further ones are read by rule only.
_LINE = 200
# Characters: longer texts are documents, not statements about the user.
_READ = 8_000


def _nothing(_step: str) -> None:
    """No fault."""


def turn_of(response: ResponseGeneration, otherwise: int) -> Turn:
    """Return the parts of a response that may be read. An answer that used a tool repeats the words of others.

    otherwise: the time in ms if the query's id does not have it.
    """
    return Turn(
        source=response.response_id,
        user_id=response.user_id,
        session_id=response.session_id,
        said=_asked_at(response.query_id, otherwise),
        query=response.query[:_READ],
        answer="" if response.tool_calls else response.answer[:_READ],
    )


class Ingest:
    def __init__(
        self, context: Context[KnowledgeSettings], store: Store, extractor: Extractor, fault: Hook = _nothing
    ) -> None:
        self._context = context
        self._store = store
        self._extractor = extractor
        self._fault = fault

    async def response(self, message: Message[ResponseGeneration]) -> Iterable[Outgoing]:
        """Read a response that the user has seen, which is one of respondent A."""
        response, settings = message.payload, self._context.settings
        if not settings.extract or response.respondent_id != "A":
            return ()
        turn = turn_of(response, message.envelope.time)
        self._fault("received")
        by_model = settings.by_model and await self._room()
        written = await retry_while_transient(
            lambda: self._store.replace_claims(turn, rules.read(turn), settled=not by_model)
        )
        self._fault("read by rule")
        if written is None or not by_model:
            return ()
        wish = KnowledgeRead(response_id=turn.source, user_id=turn.user_id)
        return [KNOWLEDGE_READ.of(wish, once=turn.source, user_id=turn.user_id, session_id=turn.session_id)]

    async def read(self, message: Message[KnowledgeRead]) -> Iterable[Outgoing]:
        """Have the model read a response that the rules have read."""
        wish = message.payload
        source = await retry_while_transient(lambda: self._store.source(wish.user_id, wish.response_id))
        if source is None or source.settled:
            # Deleted since, or another replica read it and died before its acknowledgement.
            return ()
        claims = await self._extractor.read(source.turn) if self._context.settings.by_model else None
        self._fault("read by the model")
        if claims is None:
            await retry_while_transient(lambda: self._store.settle(wish.user_id, wish.response_id))
        else:
            await retry_while_transient(lambda: self._store.replace_claims(source.turn, claims, settled=True))
        self._fault("merged")
        return ()

    async def forget_session(self, message: Message[MemoryForget]) -> Iterable[Outgoing]:
        gone = message.payload
        count = await retry_while_transient(lambda: self._store.forget_session(gone.user_id, gone.session_id, gone.at))
        self._fault("forgotten")
        log.info("knowledge.session_forgotten", sources=count)
        return ()

    async def take_back(self, message: Message[QueryForget]) -> Iterable[Outgoing]:
        gone = message.payload
        sources = [response_id(query_id, "A") for query_id in gone.queries]
        await retry_while_transient(lambda: self._store.forget(gone.user_id, sources, gone.at))
        self._fault("forgotten")
        return ()

    async def forget(self, message: Message[KnowledgeForget]) -> Iterable[Outgoing]:
        gone = message.payload
        if gone.response_ids:
            await retry_while_transient(lambda: self._store.forget(gone.user_id, gone.response_ids, gone.at))
        else:
            await retry_while_transient(lambda: self._store.forget_user(gone.user_id, gone.at))
        self._fault("forgotten")
        return ()

    async def _room(self) -> bool:
        return int(await self._context.bus.link.call("XLEN", KNOWLEDGE_READ.stream)) < _LINE


def _asked_at(query_id: str, otherwise: int) -> int:
    """Return when a query was accepted, in ms, from its id; `otherwise` if another program made the id."""
    try:
        return order(query_id)[0] or otherwise
    except ValueError:
        return otherwise
