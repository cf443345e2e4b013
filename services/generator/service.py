"""generator: answers queries. respondent-b is the same program with `LOCAL2_RESPONDENT_ID=B`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import orjson

from services.generator.answering import Answering
from services.generator.compaction import Compactor
from services.generator.identities import load_identities
from services.generator.manage import Manage
from services.generator.response_run import RunDeps
from services.generator.rewards import Rewards, follow_rewards
from services.generator.session_queues import SessionQueues
from services.generator.settings import GeneratorSettings
from shared.contracts import QUERY_CANCEL, QUERY_RECEIVED, SESSION_SUMMARISE, QueryCancel
from shared.envelope import Message
from shared.errors import SettingsError
from shared.llm.address import is_loopback, origin
from shared.llm.factory import LOOK_SECONDS
from shared.llm.gpu import gpu_note, gpu_of
from shared.llm.port import ChatModel
from shared.llm.preemption import PreemptibleChatModel, answering, interactive_queries
from shared.participant.background import supervised_tasks
from shared.participant.files import open_files
from shared.participant.service import Context, Service, Subscription, Work
from shared.participant.tool import Tool, open_tools
from shared.participant.tool_client import ToolClient
from shared.records.sessions import Sessions
from shared.telemetry.logging import get_logger

log = get_logger()

PARTICIPANTS = {"A": "generator", "B": "respondent-b"}


@contextlib.asynccontextmanager
async def build(context: Context[GeneratorSettings]) -> AsyncIterator[Sequence[Work]]:
    settings = context.settings
    queries = answering(context.bus)
    wired = settings.chat_model()
    # Interactive queries first: the shadow's model calls wait for them, and are cancelled in their favour.
    shadow = settings.respondent_id == "B"
    model: ChatModel = PreemptibleChatModel(wired, queries, lambda: context.settings) if shadow else wired
    sessions = Sessions(context.bus)
    session_queues = SessionQueues(context, sessions, settings.respondent_id)
    # A user may wait for the program that calls: the call begins as soon as no interactive query needs the model.
    background = partial(
        PreemptibleChatModel,
        wired,
        interactive_queries(context.bus),
        lambda: context.settings.model_copy(update={"yield_rest": 0.0}),
    )
    tools = ToolClient(context)
    stack = contextlib.AsyncExitStack()
    files = await stack.enter_async_context(open_files(tools))
    deps = RunDeps(context, model, tools, sessions, session_queues, lambda waiting: background(waiting=waiting), files)
    answers = Answering(deps, queries)
    compactor = Compactor(
        context, sessions, lambda waiting: PreemptibleChatModel(wired, queries, lambda: context.settings, waiting)
    )

    async def cancel(message: Message[QueryCancel]) -> None:
        answers.cancel(message.payload.query_id)

    context.observe(QUERY_CANCEL, cancel)
    # The first query of a new stack must find all tools.
    await context.registry.replicas()
    await _tell_members(context)
    await describe_model(context, model)
    rewards = Rewards(context.bus, context.participant, settings.respondent_id, settings.retention)
    manage = Manage(deps)

    @contextlib.asynccontextmanager
    async def operations(_settings: GeneratorSettings) -> AsyncIterator[Sequence[Tool[Any]]]:
        yield [manage.tool()]

    try:
        async with supervised_tasks(
            watch_backend=partial(_watch_backend, context, model),
            follow_rewards=partial(follow_rewards, context, rewards),
        ):
            works: list[Work] = [Subscription(QUERY_RECEIVED, answers.answer, answers.abandon)]
            if not shadow:
                works.append(Subscription(SESSION_SUMMARISE, compactor.summarise, limit=1))
                works += await stack.enter_async_context(open_tools(context, operations))
            yield works
    finally:
        await model.aclose()
        await stack.aclose()


async def _tell_members(context: Context[GeneratorSettings]) -> None:
    """Put the names of the personas into the settings' schema, so that the gateway refuses other names."""
    described = orjson.loads(context.presence.described)
    names = list(load_identities(context.settings.identities).personas)
    for setting in ("active_personas", "order"):
        described["schema"]["properties"][setting]["items"]["enum"] = names
    await context.presence.describe(orjson.dumps(described))


async def _watch_backend(context: Context[GeneratorSettings], model: ChatModel) -> None:
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        await describe_model(context, model)


async def describe_model(context: Context[GeneratorSettings], model: ChatModel) -> None:
    """Write the model, and whether it is reachable, to the registry."""
    settings = context.settings
    reason = await model.reachable(settings.model)
    if reason is not None and context.facts.get("backend_reason") != reason:
        log.warning("model.unreachable", reason=reason)
    known = await model.facts(settings.model)
    here = settings.backend == "ollama" and is_loopback(settings.address)
    note = None if settings.demo else gpu_note(known.on_gpu, gpu_of(settings.gpu, server_here=here))
    if note is not None and context.facts.get("gpu_note") != note:
        log.warning("model.not_on_gpu", note=note)
    facts: dict[str, Any] = {
        "respondent_id": settings.respondent_id,
        "backend": settings.backend,
        "server": "{}://{}:{}".format(*origin(settings.address)),
        "model": settings.model,
        "backend_ok": reason is None,
        "backend_reason": reason,
        "model_facts": known.shown(),
        "gpu_note": note,
        "demo": settings.demo,
        "personas": list(load_identities(settings.identities).personas),
    }
    context.facts.update(facts)


def service() -> Service[GeneratorSettings]:
    """Return the participant of `LOCAL2_RESPONDENT_ID`. Raises SettingsError for an unknown respondent."""
    respondent = os.environ.get("LOCAL2_RESPONDENT_ID", "A")
    if respondent not in PARTICIPANTS:
        raise SettingsError(f"LOCAL2_RESPONDENT_ID is {respondent!r}; it must be A or B")
    return Service(PARTICIPANTS[respondent], GeneratorSettings, build)
