"""critic: grades every answer, and compares those of A with those of B; a judge for whoever asks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

import orjson

from services.critic.critic import Critic
from services.critic.judge import Judge
from services.critic.rubrics import Rubric, load_rubrics
from services.critic.settings import CriticSettings
from services.critic.tools import JudgeTools
from services.critic.turns import Turns
from shared.bus import ReplyError
from shared.contracts import RESPONSE_GENERATION
from shared.errors import TransientError
from shared.llm.factory import LOOK_SECONDS
from shared.llm.preemption import PreemptibleChatModel, answering
from shared.participant.background import supervised_tasks
from shared.participant.service import Context, Service, Subscription, Work
from shared.participant.tool import Tool, open_tools
from shared.telemetry import metrics

_TEND_SECONDS = 1.0


@contextlib.asynccontextmanager
async def build(context: Context[CriticSettings]) -> AsyncIterator[Sequence[Work]]:
    rubrics = load_rubrics(context.settings.rubrics_dir)
    await _tell_choice(context, rubrics)
    model = PreemptibleChatModel(context.settings.chat_model(), answering(context.bus), lambda: context.settings)
    judge = Judge(model, lambda: context.settings)
    turns = Turns(lambda: context.settings, lambda: model.turn(context.settings.jury[0]), context.bus.now_ms)
    critic = Critic(context, judge, rubrics, turns)
    tools = JudgeTools(Judge(model, lambda: context.settings, at_once=True), rubrics)

    @contextlib.asynccontextmanager
    async def offered(settings: CriticSettings) -> AsyncIterator[Sequence[Tool[Any]]]:
        yield tools.tools(settings.grade_timeout)

    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(model.aclose)
        works = await stack.enter_async_context(open_tools(context, offered))
        await _look(context, model, critic, judge)
        async with supervised_tasks(
            watch_judge=partial(_watch, context, model, critic, judge),
            tend=partial(_tend, context, turns),
            turns=turns.run,
        ):
            yield [*works, Subscription(RESPONSE_GENERATION, critic.grade, critic.abandon, limit=turns.limit)]


async def _tell_choice(context: Context[CriticSettings], rubrics: Mapping[str, Rubric]) -> None:
    """The settings' schema names the rubrics that there are, so that a wrong one is refused where it is asked for, and
    has their wording for whoever chooses."""
    described = orjson.loads(context.presence.described)
    choice = described["schema"]["properties"]["rubrics"]["additionalProperties"]
    choice["enum"] = sorted(rubrics)
    choice["enumDescriptions"] = [rubrics[name].text for name in choice["enum"]]
    await context.presence.describe(orjson.dumps(described))


async def _watch(context: Context[CriticSettings], model: PreemptibleChatModel, critic: Critic, judge: Judge) -> None:
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        await _look(context, model, critic, judge)


async def _tend(context: Context[CriticSettings], turns: Turns) -> None:
    """Shares what waits among the replicas, and leaves out what has waited for too long."""
    while True:
        critics = [info for info in await context.registry.replicas() if info.participant == context.participant]
        turns.shared(len(critics), await context.bus.backlog(RESPONSE_GENERATION.stream, context.participant))
        turns.expire()
        context.facts["waiting"] = turns.waiting
        if (meter := metrics.meter()) is not None:
            meter.judge_waiting(turns.waiting)
        await asyncio.sleep(_TEND_SECONDS)


async def _look(context: Context[CriticSettings], model: PreemptibleChatModel, critic: Critic, judge: Judge) -> None:
    """Says in the registry who judges, whether it can, and what waits for it."""
    first, *others = context.settings.jury
    told = {name: await model.reachable(name) for name in context.settings.jury}
    # the others judge without one that is away
    reason = None if None in told.values() else told[first]
    context.facts.update(
        model=first,
        # each of several
        judges=[{"model": name, "ok": why is None, "reason": why} for name, why in told.items()] if others else [],
        backend=context.settings.backend,
        backend_ok=reason is None,
        backend_reason=reason,
        model_facts=(await model.facts(first)).shown(),
        unreadable=judge.unread,
        yielded=model.yielded,
        left_out=sum(critic.left_out.values()),
        left_out_for=dict(critic.left_out),
    )
    with contextlib.suppress(TransientError, ReplyError):
        waiting = context.facts["pairs_waiting"] = await critic.pairs.waiting()
        if (meter := metrics.meter()) is not None:
            meter.pairs_waiting(waiting)


app = Service("critic", CriticSettings, build)
