"""What comes from the bus into the memory: responses, saves that waited for the model, grades, verdicts, rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from services.memory.classify import Classifier, by_rules
from services.memory.embedding import Embedder
from services.memory.engram import Engram, Note, NoteKind, of_response, stamp, topic_id
from services.memory.machine import ANNOTATING, ANNOTATING_PAIRWISE, IDLE, INGESTING, TABLE
from services.memory.notes import accepted
from services.memory.text import dense_text
from services.memory.write_batcher import Gathering
from services.memory.writer import Keeper
from shared.bus import order
from shared.contracts import (
    AGENT_TRANSITION,
    AgentTransition,
    CritiqueResult,
    MemoryClassify,
    MemoryForget,
    MemorySave,
    Outgoing,
    PairwiseResult,
    QueryForget,
    ResponseGeneration,
    RewardEvent,
)
from shared.envelope import Message
from shared.errors import DecodeError
from shared.participant.background import retry_while_transient
from shared.participant.machine import Machine
from shared.participant.service import Context
from shared.records.journal import response_id
from shared.records.sessions import Sessions
from shared.telemetry.logging import get_logger

log = get_logger()

R = TypeVar("R")


def embedded_text(engram: Engram) -> str:
    query, answer = engram.said()
    return dense_text(query, answer, engram.said_at)


class Ingest:
    def __init__(
        self,
        context: Context[Any],
        keeper: Keeper,
        gathering: Gathering,
        embedder: Embedder,
        classifier: Classifier,
    ) -> None:
        self._context = context
        self._keeper = keeper
        self._gathering = gathering
        self._embedder = embedder
        self._classifier = classifier
        self._sessions = Sessions(context.bus)
        # the model answers users first: it is asked for one label at a time
        self._labelling = asyncio.Lock()

    # ── handlers ─────────────────────────────────────────────────────────────────────────────────────────────

    async def response(self, message: Message[ResponseGeneration]) -> Iterable[Outgoing]:
        response = message.payload
        steps = self._steps(message, response.query_id)
        steps("INGEST", INGESTING)
        follows, before = await retry_while_transient(lambda: self._before(response))
        at = accepted(response.query_id, message.envelope.time)
        engram = of_response(response, at, before=before, follows=follows)
        if self._context.settings.classify != "off":
            engram = engram.annotated({"class": by_rules(engram).note(engram)})
        kept = await self._remember(engram)
        return [*steps("DONE", IDLE), *await self._classifier.wishes(kept)]

    async def classify(self, message: Message[MemoryClassify]) -> Iterable[Outgoing]:
        wish = message.payload
        async with self._labelling:
            found = await retry_while_transient(lambda: self._keeper.store.get(wish.user_id, [wish.id]))
            # deleted since, it needs no label
            engram = found.get(wish.id)
            if engram is not None and (note := await self._classifier.label(engram)) is not None:
                await retry_while_transient(lambda: self._keeper.annotate(wish.id, "class", note))
        return ()

    async def save(self, message: Message[MemorySave]) -> Iterable[Outgoing]:
        engram = saved(message.payload)
        kept = await self._remember(engram)
        if kept and await self._keeper.ended(engram):
            await retry_while_transient(lambda: self._keeper.delete(engram.user_id, [engram.id]))
        return ()

    async def forget(self, message: Message[MemoryForget]) -> Iterable[Outgoing]:
        wish = message.payload
        count = await retry_while_transient(lambda: self._keeper.delete_session(wish.user_id, wish.session_id, wish.at))
        log.info("memory.session_forgotten", engrams=count)
        return ()

    async def take_back(self, message: Message[QueryForget]) -> Iterable[Outgoing]:
        wish = message.payload
        count = await retry_while_transient(
            lambda: self._keeper.delete_queries(wish.user_id, wish.session_id, wish.queries, wish.at)
        )
        log.info("memory.queries_forgotten", engrams=count)
        return ()

    async def critique(self, message: Message[CritiqueResult]) -> Iterable[Outgoing]:
        result = message.payload
        if result.score is None:
            # a grade that could not be read is no grade
            return ()
        values = {"score": result.score, "critique": result.feedback, "rubric": result.rubric}
        return await self._annotated(message, result.query_id, [(result.response_id, "critique", values)])

    async def pairwise(self, message: Message[PairwiseResult]) -> Iterable[Outgoing]:
        result = message.payload
        values = {"winner": result.winner, "reason": result.reason}
        both: list[tuple[str, NoteKind, dict[str, Any]]] = [
            (result.query_id_a, "pairwise", {**values, "score": result.score_a, "against": result.query_id_b}),
            (result.query_id_b, "pairwise", {**values, "score": result.score_b, "against": result.query_id_a}),
        ]
        return await self._annotated(message, result.original_query_id, both, ANNOTATING_PAIRWISE)

    async def reward(self, message: Message[RewardEvent]) -> Iterable[Outgoing]:
        event = message.payload
        # a withdrawn vote stays as a note without a reward: the one before it may come later
        values = {"reward": None if event.withdrawn else event.reward, "source": event.source}
        mark = vote_stamp(event.vote_id) if event.vote_id else None
        return await self._annotated(message, event.query_id, [(event.response_id, "reward", values)], mark=mark)

    # ── how ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _remember(self, engram: Engram) -> list[Engram]:
        """What is stored then: nothing, when it was deleted meanwhile. Without a model it is found by its words."""
        (vector,) = await self._embedder.documents([embedded_text(engram)])
        return await retry_while_transient(lambda: self._gathering.put(engram, vector))

    async def _before(self, response: ResponseGeneration) -> tuple[str, str]:
        """The turn before it in the session: the id of its engram, and its text."""
        earlier = await self._sessions.turns(response.session_id, response.respondent_id, response.query_id)
        if not earlier:
            return "", ""
        last = earlier[-1]
        return response_id(last.query_id, response.respondent_id), f"{last.query}\n{last.answer}"

    async def _annotated(
        self,
        message: Message[Any],
        query_id: str,
        notes: list[tuple[str, NoteKind, dict[str, Any]]],
        state: str = ANNOTATING,
        mark: str | None = None,
    ) -> Iterable[Outgoing]:
        steps = self._steps(message, query_id)
        steps("ANNOTATE" if state == ANNOTATING else "ANNOTATE_PAIRWISE", state)
        mark = mark or stamp(message.envelope.time, message.envelope.id)
        for engram_id, kind, values in notes:
            note = Note(mark, values)

            async def annotate(engram_id: str = engram_id, kind: NoteKind = kind, note: Note = note) -> bool:
                return await self._keeper.annotate(engram_id, kind, note)

            await retry_while_transient(annotate)
        return steps("DONE", IDLE)

    def _steps(self, message: Message[Any], query_id: str) -> Callable[[str, str], list[Outgoing]]:
        """Takes the machine's steps, and gives all of them so far as events."""
        machine = Machine(TABLE, IDLE)
        events: list[Outgoing] = []

        def step(action: str, expected: str) -> list[Outgoing]:
            taken = machine.step(action)
            assert machine.state == expected
            event = AgentTransition(
                agent="memory",
                replica=self._context.replica,
                query_id=query_id,
                from_state=taken.before,
                action=action,
                to=taken.after,
            )
            events.append(AGENT_TRANSITION.of(event, **{**message.headers(), "correlation_id": query_id}))
            return events

        return step


def vote_stamp(vote_id: str) -> str:
    """Orders rewards by their votes. Raises DecodeError."""
    try:
        time_ms, number = order(vote_id)
    except ValueError as exc:
        raise DecodeError(f"{vote_id!r} is no entry's id") from exc
    return f"{time_ms:015d}{number:020d}"


def saved(wish: MemorySave) -> Engram:
    engram = Engram(
        id=wish.id,
        user_id=wish.user_id,
        kind=wish.kind,
        time=wish.recorded,
        recorded=wish.recorded,
        session_id=wish.session_id,
        query_id=wish.query_id,
        content=wish.content,
        time_zone=wish.time_zone,
    )
    return replace(engram, id=topic_id(wish.user_id, wish.topic), topic=wish.topic) if wish.kind == "topic" else engram
