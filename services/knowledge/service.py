"""knowledge: facts about people, places and things, with what IS and what WAS."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from services.knowledge.extract import Extractor
from services.knowledge.graph import Graph
from services.knowledge.ingest import Hook, Ingest
from services.knowledge.manage import Manage
from services.knowledge.migrate import migrate
from services.knowledge.retention import kinds
from services.knowledge.search import Search
from services.knowledge.settings import EMBEDDED, KnowledgeSettings
from services.knowledge.sqlite import open_sqlite
from services.knowledge.statements import LABELS
from services.knowledge.store import Store
from services.knowledge.tools import KnowledgeTools
from shared.contracts import KNOWLEDGE_FORGET, KNOWLEDGE_READ, MEMORY_FORGET, QUERY_FORGET, RESPONSE_GENERATION
from shared.errors import TransientError
from shared.llm.preemption import PreemptibleChatModel, answering
from shared.participant.background import supervised_tasks
from shared.participant.retention import Retention
from shared.participant.service import Context, Service, Subscription, Work
from shared.participant.tool import Tool, open_tools

_LOOK_SECONDS = 5.0
# Messages of a subject at a time: those that wait for the model or a server leave slots for the tools.
_LIMIT = 6


def builder(*fault: Hook) -> Any:
    """Return the function that builds the participant. fault: called at each step of a write; tests kill it there."""

    @contextlib.asynccontextmanager
    async def build(context: Context[KnowledgeSettings]) -> AsyncIterator[Sequence[Work]]:
        async with contextlib.AsyncExitStack() as stack:
            graph = await stack.enter_async_context(_opened(context.settings))
            store = Store(graph)
            search = Search(store)
            model = PreemptibleChatModel(
                context.settings.chat_model(), answering(context.bus), lambda: context.settings
            )
            stack.push_async_callback(model.aclose)
            ingest = Ingest(context, store, Extractor(model, lambda: context.settings), *fault)
            retention = Retention(context, kinds(store, search), answering(context.bus))
            offered: list[Tool[Any]] = [
                KnowledgeTools(context, search).tool(),
                Manage(context.bus, store, search, retention).tool(),
            ]

            @contextlib.asynccontextmanager
            async def same(_settings: KnowledgeSettings) -> AsyncIterator[Sequence[Tool[Any]]]:
                # The tools read the context's settings at each call.
                yield offered

            works = await stack.enter_async_context(open_tools(context, same))
            await _look(context, store)
            async with supervised_tasks(watch_graph=partial(_watch, context, store), retention=retention.run):
                yield [
                    *works,
                    Subscription(RESPONSE_GENERATION, ingest.response, limit=_LIMIT),
                    Subscription(KNOWLEDGE_READ, ingest.read, limit=_LIMIT),
                    Subscription(MEMORY_FORGET, ingest.forget_session, limit=_LIMIT),
                    Subscription(QUERY_FORGET, ingest.take_back, limit=_LIMIT),
                    Subscription(KNOWLEDGE_FORGET, ingest.forget, limit=_LIMIT),
                ]

    return build


@contextlib.asynccontextmanager
async def _opened(settings: KnowledgeSettings) -> AsyncIterator[Graph]:
    if settings.store == EMBEDDED:
        async with open_sqlite(settings.path) as database:
            await migrate(settings.old_path, database)
            yield database
        return
    # Loaded only if needed: the driver takes memory.
    from services.knowledge.bolt import open_bolt

    password = settings.store_password.get_secret_value() if settings.store_password else ""
    async with open_bolt(
        settings.store, settings.store_user, password, settings.store_database, LABELS, settings.store_timeout
    ) as server:
        yield server


async def _watch(context: Context[KnowledgeSettings], store: Store) -> None:
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        await _look(context, store)


async def _look(context: Context[KnowledgeSettings], store: Store) -> None:
    """Write to the registry what the store has, what reads facts, and whether the store can be used."""
    settings, trouble = context.settings, None
    try:
        async with asyncio.timeout(settings.store_timeout):
            context.facts.update(await store.counts())
            await store.ping()
            context.facts["waiting"] = int(await context.bus.link.call("XLEN", KNOWLEDGE_READ.stream))
    except (TransientError, TimeoutError) as exc:
        trouble = str(exc) or "the graph does not answer"
    context.facts.update(
        store="embedded" if settings.store == EMBEDDED else "server",
        store_ok=trouble is None,
        read_by="nobody" if not settings.extract else "model" if settings.by_model else "rules",
        degraded=trouble,
    )


app: Service[KnowledgeSettings] = Service("knowledge", KnowledgeSettings, builder())
