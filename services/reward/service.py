"""reward: turns users' feedback into reward, ranks configurations, and keeps preference data."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import orjson

from services.reward.experiments import Experiments
from services.reward.keeping import kinds
from services.reward.manage import NAME, Access, Desk, Manage
from services.reward.settings import RewardSettings
from services.reward.store import Store, config_name
from services.reward.votes import changes
from shared.bus import order
from shared.contracts import (
    CRITIQUE_RESULT,
    MEMORY_FORGET,
    PAIRWISE_RESULT,
    QUERY_FORGET,
    RESPONSE_GENERATION,
    REWARD_EVENT,
    USER_FEEDBACK,
    CritiqueResult,
    MemoryForget,
    Outgoing,
    PairwiseResult,
    QueryForget,
    ResponseGeneration,
    RewardEvent,
    ToolCallRecord,
    UserFeedback,
)
from shared.envelope import Message, now_ms
from shared.errors import TransientError
from shared.llm.intents import intent_of
from shared.llm.preemption import answering
from shared.participant.background import retry_while_transient, supervised_tasks
from shared.participant.retention import Retention
from shared.participant.service import Context, Service, Subscription, Work
from shared.participant.tool import Tool, open_tools
from shared.records.events import RewardShown
from shared.records.journal import response_id
from shared.records.sessions import Sessions
from shared.records.steps import tell_after
from shared.telemetry import metrics
from shared.telemetry.logging import get_logger

log = get_logger()

R = TypeVar("R")

_LOOK_SECONDS = 0.1
# Characters of an answer's tool calls, or of what its judge read; no trainer takes a longer prompt.
_MOST_KEPT = 200_000
_VOTES = 4
# Of the others, held at the same time while the database is in the way.
_HELD = 8
_TEND_SECONDS = 5


def instructed(system: str, messages: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """A conversation with one message of instructions, in front, as the model read it: the assistant's own, then those
    of the client's history."""
    told = [system, *(said["content"] for said in messages if said["role"] == "system")]
    text = "\n\n".join(one for one in told if one)
    others = [said for said in messages if said["role"] != "system"]
    return [{"role": "system", "content": text}, *others] if text else others


def exchange(calls: Iterable[ToolCallRecord]) -> list[dict[str, Any]]:
    """Calls of tools and what they gave, as messages that trainers load.

    Source: TRL documentation, "Dataset formats and types", tool calling.
    """
    found: list[dict[str, Any]] = []
    for call in calls:
        asked = {"type": "function", "function": {"name": call.tool, "arguments": call.args}}
        found.append({"role": "assistant", "content": "", "tool_calls": [asked]})
        found.append({"role": "tool", "name": call.tool, "content": call.result})
    return found


def bounded(messages: Sequence[Mapping[str, Any]]) -> str:
    """Messages as JSON; empty where there are none, or more than is kept of one answer."""
    text = orjson.dumps(messages).decode() if messages else ""
    return text if len(text) <= _MOST_KEPT else ""


def _asked_at(message: Message[ResponseGeneration]) -> int:
    """When the question was accepted, in ms; of an id that does not tell it, when its answer came."""
    try:
        return order(message.payload.query_id)[0]
    except ValueError:
        return message.envelope.time


class Rewarding:
    def __init__(self, context: Context[RewardSettings], access: Access) -> None:
        self._context = context
        self._access = access
        self._sessions = Sessions(context.bus)
        # votes on one answer are published in the order in which they were cast
        self._voting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def _kept(self, message: Message[Any], work: Callable[[Store], R]) -> R:
        """However long the database is in the way, whose disk may be full: nothing is given up for that."""
        return await retry_while_transient(lambda: self._access.with_store(work), message.suspended)

    async def response(self, message: Message[ResponseGeneration]) -> Iterable[Outgoing]:
        """Keeps an answer with the conversation that led to it: what a trainer calls the prompt."""
        r = message.payload
        if r.history is not None:
            # a trainer knows these roles; what tools said is not part of a conversation's clean history
            kept = [said for said in r.history if said.role != "tool" and said.content.strip()]
            before, ids = [{"role": said.role, "content": said.content} for said in kept], list[str]()
        else:
            turns = await self._sessions.turns(r.session_id, r.respondent_id, r.query_id)
            before, ids = [said for turn in turns for said in turn.messages()], [turn.query_id for turn in turns]
        messages = instructed(r.system, [*before, {"role": "user", "content": r.query}])
        row = {
            "response_id": r.response_id,
            "query_id": r.query_id,
            "session_id": r.session_id,
            "user_id": r.user_id,
            "respondent": r.respondent_id,
            "query": r.query,
            "answer": r.answer,
            "messages": orjson.dumps(messages).decode(),
            "config": config_name(r.config),
            "intent": intent_of(r.query, [call.tool for call in r.tool_calls if call.counts]).value,
            "tools": len(r.tool_calls),
            "calls": bounded(exchange(r.tool_calls)),
            "material": int(bool(r.material)),
            "time": _asked_at(message),
        }
        await self._kept(message, lambda store: store.put_response(row, ids))
        return ()

    async def critique(self, message: Message[CritiqueResult]) -> Iterable[Outgoing]:
        c = message.payload
        row = {
            "response_id": c.response_id,
            "query_id": c.query_id,
            "session_id": c.session_id,
            "score": c.score,
            "feedback": c.feedback,
            "rubric": c.rubric,
            "prompt": bounded([{"role": said.role, "content": said.content} for said in c.prompt or ()]),
            "judges": bounded([said.model_dump() for said in c.judges]),
            "time": now_ms(),
        }
        await self._kept(message, lambda store: store.put_critique(row))
        return ()

    async def pairwise(self, message: Message[PairwiseResult]) -> Iterable[Outgoing]:
        p = message.payload
        row = {
            "query_id": p.original_query_id,
            "response_a": p.query_id_a,
            "response_b": p.query_id_b,
            "winner": p.winner,
            "forward": p.forward,
            "swapped": p.swapped,
            "score_a": p.score_a,
            "score_b": p.score_b,
            "reason": p.reason,
            "judges": bounded([said.model_dump() for said in p.judges]),
            "config_a": config_name(p.config_a),
            "config_b": config_name(p.config_b),
            "session_id": p.session_id,
            "time": now_ms(),
        }
        await self._kept(message, lambda store: store.put("pairs", row))
        return ()

    async def feedback(self, message: Message[UserFeedback]) -> Iterable[Outgoing]:
        """A vote, or its withdrawal: of thumb and stars each, the last one counts in the order in which they were
        cast."""
        f = message.payload
        rated = response_id(f.query_id, f.respondent_id)
        changed = changes(f, order(message.entry_id))
        row = {
            "response_id": rated,
            "query_id": f.query_id,
            "session_id": f.session_id,
            "user_id": f.user_id,
        }
        answer = await self._awaited(rated, message)
        async with self._voting.setdefault(rated, asyncio.Lock()):
            found = await self._kept(message, lambda store: store.vote(row, changed))
            if found is None:
                return ()
            vote, cast = found
            event = RewardEvent(
                query_id=f.query_id,
                response_id=rated,
                respondent_id=f.respondent_id,
                reward=vote.reward,
                source="stars" if vote.stars is not None else "thumbs",
                config=orjson.loads(answer["config"]) if answer else {},
                intent=answer["intent"] if answer else "",
                vote_id=f"{cast[0]}-{cast[1]}",
                withdrawn=vote.withdrawn,
            )
            once = f"{rated}:{message.entry_id}"
            headers = message.headers() | {
                "correlation_id": f.query_id,
                "session_id": f.session_id,
                "user_id": f.user_id,
                "respondent_id": f.respondent_id,
            }
            (entry_id,) = await self._context.bus.publish(REWARD_EVENT.of(event, once=once, **headers))
            shown = RewardShown(
                reward=None if vote.withdrawn else vote.reward,
                sentiment=vote.sentiment,
                thumb=vote.thumb,
                stars=vote.stars,
                comment=vote.comment,
            )
            bus, once = self._context.bus, f"reward:{message.entry_id}"
            await tell_after(bus, f.session_id, rated, shown, message_id=entry_id, once=once)
        if (meter := metrics.meter()) is not None:
            meter.vote("withdrawn" if f.withdrawn else f.sentiment or "positive")
        log.info("reward.voted", reward=vote.reward, withdrawn=vote.withdrawn)
        return ()

    async def _awaited(self, rated: str, message: Message[UserFeedback]) -> dict[str, Any] | None:
        """The answer that is rated; a vote may be quicker than the answer's way here, and slower than its deletion."""
        vote = message.payload
        until = asyncio.get_running_loop().time() + self._context.settings.patience
        while True:
            answer = await self._kept(message, lambda store: store.response(rated))
            if answer is not None or asyncio.get_running_loop().time() >= until:
                return answer
            if await self._kept(message, lambda store: store.gone(vote.session_id, vote.query_id)):
                return None
            await asyncio.sleep(_LOOK_SECONDS)

    async def forget(self, message: Message[MemoryForget]) -> Iterable[Outgoing]:
        gone = message.payload
        await self._kept(message, lambda store: store.forget(gone.session_id, gone.at))
        return ()

    async def take_back(self, message: Message[QueryForget]) -> Iterable[Outgoing]:
        gone = message.payload
        await self._kept(message, lambda store: store.take_back(gone.session_id, gone.queries, gone.at))
        return ()


@contextlib.asynccontextmanager
async def build(context: Context[RewardSettings]) -> AsyncIterator[Sequence[Work]]:
    store = await asyncio.to_thread(Store, context.settings.path)
    access = Access(store)
    experiments = Experiments(context.bus, access.with_store, partial(context.registry.replicas, fresh=True))
    retention = Retention(context, kinds(access), answering(context.bus))
    desk = Desk(access, experiments, lambda: context.settings, partial(_judges, context), retention)
    rewarding = Rewarding(context, access)
    context.background.create_task(access.whole(), name="database")

    @contextlib.asynccontextmanager
    async def tools(_settings: RewardSettings) -> AsyncIterator[Sequence[Tool[Any]]]:
        yield [Tool(NAME, Manage, desk.manage, internal=True)]

    try:
        async with (
            supervised_tasks(tend=partial(_tend, context, access, experiments), retention=retention.run),
            open_tools(context, tools) as works,
        ):
            yield [
                *works,
                Subscription(RESPONSE_GENERATION, rewarding.response, limit=_HELD),
                Subscription(CRITIQUE_RESULT, rewarding.critique, limit=_HELD),
                Subscription(PAIRWISE_RESULT, rewarding.pairwise, limit=_HELD),
                # fewer than there are slots: what a vote waits for must get through
                Subscription(USER_FEEDBACK, rewarding.feedback, limit=_VOTES),
                Subscription(MEMORY_FORGET, rewarding.forget, limit=_HELD),
                Subscription(QUERY_FORGET, rewarding.take_back, limit=_HELD),
            ]
    finally:
        store.close()


async def _judges(context: Context[RewardSettings]) -> list[str]:
    """The models that judge now; none when no critic is there."""
    critics = [info.facts for info in await context.registry.replicas() if info.participant == "critic"]
    facts = next((facts for facts in critics if "model" in facts), None)
    if facts is None:
        return []
    return [str(one["model"]) for one in facts.get("judges", ())] or [str(facts["model"])]


async def _tend(context: Context[RewardSettings], access: Access, experiments: Experiments) -> None:
    """Says in the registry what is kept, and finishes what an experiment began."""
    while True:
        try:
            context.facts.update(await access.with_store(lambda store: {**store.counts(), **store.tallies()}))
            await experiments.catch_up()
        except TransientError as exc:
            log.warning("reward.database_in_the_way", reason=str(exc))
        await asyncio.sleep(_TEND_SECONDS)


app = Service("reward", RewardSettings, build)
