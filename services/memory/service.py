"""memory: remembers every answer, and finds what fits a question."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from services.memory.blobs import Blobs
from services.memory.classify import Classifier
from services.memory.clock import clock
from services.memory.document_reader import PROCESSES, DocumentReader
from services.memory.document_tools import DocumentTools
from services.memory.documents import Documents
from services.memory.embedding import Embedder, open_embedder
from services.memory.index import Index
from services.memory.ingest import Ingest
from services.memory.keywords import KeywordIndex
from services.memory.library import Library
from services.memory.manage import Manage
from services.memory.notes import States
from services.memory.rebuild import Rebuilding
from services.memory.recall import Recall
from services.memory.reembed import Reembedding, refuse_other_models
from services.memory.rerank import CrossEncoder, ModelReranker
from services.memory.retention import kinds
from services.memory.secure_delete import Erasing
from services.memory.settings import MemorySettings
from services.memory.store import IndexDamaged, Store, StoreDamaged, open_store
from services.memory.throttle import Pace, answering
from services.memory.tools import MemoryTools
from services.memory.transfer import open_endpoint
from services.memory.write_batcher import open_gathering
from services.memory.writer import Hook, Keeper, no_fault
from shared.contracts import (
    CRITIQUE_RESULT,
    MEMORY_CLASSIFY,
    MEMORY_FORGET,
    MEMORY_READ,
    MEMORY_SAVE,
    PAIRWISE_RESULT,
    QUERY_FORGET,
    RESPONSE_GENERATION,
    REWARD_EVENT,
)
from shared.errors import SettingsError, TransientError
from shared.extras import required_by
from shared.llm.builtin import BuiltInEmbeddings, installed
from shared.llm.preemption import PreemptibleChatModel
from shared.llm.preemption import answering as queries
from shared.participant.background import supervised_tasks
from shared.participant.retention import Retention
from shared.participant.service import Context, Service, Subscription, Work
from shared.participant.tool import Tool, open_tools
from shared.telemetry.logging import get_logger

log = get_logger()

_LOOK_SECONDS = 2.0
_REBUILDING = "vectors cannot be read; memory makes them again from its copies"
# Annotations are quick; when the store is away they wait, and must not take the tools' slots. Labels have as many
# though one is made at a time: a read takes no more entries of a stream than the smallest of these limits.
_ANNOTATIONS = 8


def builder(fault: Hook = no_fault) -> Any:
    """How the participant is built. `fault` is called at each step of a write: where tests let a process die."""

    @contextlib.asynccontextmanager
    async def build(context: Context[MemorySettings]) -> AsyncIterator[Sequence[Work]]:
        settings = context.settings
        async with contextlib.AsyncExitStack() as stack:
            store = await stack.enter_async_context(open_store(settings))
            words = stack.enter_context(_index_folder(settings))
            keywords = KeywordIndex(words)
            stack.callback(keywords.close)
            pace = Pace(answering(context))
            model_name = settings.embedder
            embedder = await stack.enter_async_context(
                open_embedder(settings.embeddings(), model_name, settings.embed_batch, pace, _stand_in(settings))
            )
            index = Index(context, store, keywords)
            states = States(context.bus, settings.pending_days, settings.forget_days)
            keeper = Keeper(store, states, index, fault)
            erasing = Erasing(keywords, answering(context), settings.erase_after)
            if settings.on_model_change == "refuse":
                with contextlib.suppress(StoreDamaged, IndexDamaged):
                    await refuse_other_models(keeper, model_name)
            model = PreemptibleChatModel(settings.chat_model(), queries(context.bus), lambda: context.settings)
            stack.push_async_callback(model.aclose)
            # somebody waits for what is reranked
            prompt_model = settings.chat_model()
            stack.push_async_callback(prompt_model.aclose)
            http = await stack.enter_async_context(httpx.AsyncClient())
            rerankers = (ModelReranker(prompt_model), CrossEncoder(http))
            recall = Recall(store, index, embedder, {one.name: one for one in rerankers})
            gathering = await stack.enter_async_context(open_gathering(keeper.put, pace))
            ingest = Ingest(context, keeper, gathering, embedder, Classifier(context, model))
            tools = MemoryTools(context, keeper, recall, embedder)
            library = await asyncio.to_thread(_library, settings)
            documents = Documents(context, library, DocumentReader(), embedder, fault)
            place = (settings.files_host, settings.files_port, settings.redis_url, settings.files_address)
            endpoint = await stack.enter_async_context(open_endpoint(documents, *place))
            retention = Retention(context, kinds(keeper, library), queries(context.bus))
            manage = Manage(context, keeper, recall, embedder, tools, retention)
            offered = [*tools.tools(), *DocumentTools(documents, endpoint).tools(), clock(context), manage.tool()]

            @contextlib.asynccontextmanager
            async def same(_settings: MemorySettings) -> AsyncIterator[Sequence[Tool[Any]]]:
                # they look at the context's settings at each call
                yield offered

            works = await stack.enter_async_context(open_tools(context, same))
            await _facts(context, store, embedder, index, library, 0)
            reembedding = Reembedding(context, keeper, embedder, replace=settings.on_model_change == "reembed")
            async with (
                supervised_tasks(retention=retention.run),
                _background(
                    index.run(),
                    reembedding.run(),
                    Rebuilding(context, keeper, keywords, embedder).run(),
                    documents.run(),
                    erasing.run(),
                    _watch(context, store, embedder, index, library, reembedding),
                ),
            ):
                yield [
                    *works,
                    Subscription(RESPONSE_GENERATION, ingest.response, limit=settings.ingest_limit),
                    Subscription(MEMORY_SAVE, ingest.save, limit=settings.ingest_limit),
                    Subscription(CRITIQUE_RESULT, ingest.critique, limit=_ANNOTATIONS),
                    Subscription(PAIRWISE_RESULT, ingest.pairwise, limit=_ANNOTATIONS),
                    Subscription(REWARD_EVENT, ingest.reward, limit=_ANNOTATIONS),
                    Subscription(MEMORY_FORGET, ingest.forget, limit=_ANNOTATIONS),
                    Subscription(QUERY_FORGET, ingest.take_back, limit=_ANNOTATIONS),
                    Subscription(MEMORY_CLASSIFY, ingest.classify, limit=_ANNOTATIONS),
                    Subscription(MEMORY_READ, documents.read, documents.give_up, limit=PROCESSES),
                ]

    return build


def _library(settings: MemorySettings) -> Library:
    """Raises SettingsError."""
    try:
        return Library(settings.library, file_store(settings))
    except OSError as exc:
        raise SettingsError(
            f"memory cannot use the folder {settings.library} for files ({exc.strerror or exc}); set LOCAL2_DATA_DIR"
        ) from exc


def file_store(settings: MemorySettings) -> Blobs | None:
    """Return the bucket of the files, or None if they lie in the data folder. Raises SettingsError."""
    if settings.files_bucket is None:
        return None
    # Import late: a memory without a bucket does not have the package.
    with required_by("LOCAL2_MEMORY_FILES_BUCKET", "bucket"):
        from services.memory.bucket import BucketBlobs

    key_id, secret = (
        one.get_secret_value() if one is not None else None for one in (settings.files_key_id, settings.files_secret)
    )
    return BucketBlobs(settings.files_bucket, settings.files_endpoint, settings.files_region, key_id, secret)


def _stand_in(settings: MemorySettings) -> BuiltInEmbeddings | None:
    """What makes vectors where the server makes none; not where vectors of another model are refused."""
    wanted = settings.embedding_stand_in and settings.on_model_change == "reembed"
    path = installed() if wanted else None
    return BuiltInEmbeddings(path) if path else None


@contextlib.contextmanager
def _index_folder(settings: MemorySettings) -> Any:
    """Beside the embedded store, whose one replica keeps it; else one of this process, which goes with it."""
    if settings.chroma_url is None:
        yield settings.words
        return
    with tempfile.TemporaryDirectory(prefix="local2-words-") as folder:
        yield Path(folder)


@contextlib.asynccontextmanager
async def _background(*work: Any) -> AsyncIterator[None]:
    """Runs coroutines beside the block. One that fails is a bug: it ends the process, and whoever supervises starts it
    again."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in work]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


async def _watch(
    context: Context[Any],
    store: Store,
    embedder: Embedder,
    index: Index,
    library: Library,
    reembedding: Reembedding,
) -> None:
    while True:
        await _facts(context, store, embedder, index, library, reembedding.left)
        await asyncio.sleep(_LOOK_SECONDS)


async def _facts(
    context: Context[Any], store: Store, embedder: Embedder, index: Index, library: Library, left: int
) -> None:
    """Write into the registry what works: /ready and the console show it."""
    trouble = store.damage
    try:
        async with asyncio.timeout(_LOOK_SECONDS):
            await store.ping()
    except (TransientError, TimeoutError) as exc:
        trouble = str(exc) or "the store does not answer"
    reasons = [
        trouble,
        None if store.damage or not store.suspects.users else _REBUILDING,
        embedder.trouble,
        None if index.ready.is_set() or store.damage else "the store is being read",
        library.damage,
    ]
    context.facts.update(
        {
            "embedding_model": embedder.model,
            "embedding_in_use": embedder.using or None,
            "embedding_ok": embedder.trouble is None,
            "store": "server" if context.settings.chroma_url else "embedded",
            "store_ok": trouble is None,
            "indexed": index.ready.is_set(),
            "engrams": len(index.catalog),
            "waiting": embedder.waiting,
            "reembedding": left,
            "degraded": "; ".join(reason for reason in reasons if reason) or None,
        }
    )


app: Service[MemorySettings] = Service("memory", MemorySettings, builder())
