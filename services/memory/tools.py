"""The tools that models call: search, save, and topics by their exact name."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, NamedTuple

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from services.memory.embedding import Embedder
from services.memory.engram import Engram
from services.memory.ingest import embedded_text, saved
from services.memory.recall import Recall, Wanted
from services.memory.rendering import NOTHING, data_of, told
from services.memory.settings import MemorySettings
from services.memory.store import StoreUnavailable
from services.memory.vectors import NO_VECTOR
from services.memory.writer import Keeper
from shared.contracts import MEMORY_SAVE, MemorySave, ToolRequest
from shared.envelope import now_ms
from shared.errors import ToolError
from shared.participant.service import Context
from shared.participant.tool import Tool, ToolResult
from shared.telemetry.logging import get_logger
from shared.zones import first_zone, local_time

log = get_logger()

TOPIC_PREFIXES = ("user.", "project.", "constraint.")
MAX_TOPIC, MAX_CONTENT = 200, 20_000
# Of one search.
MAX_QUERIES = 8
_AWAY = "the memory is away; try again later"
_ENDED = "the conversation was deleted: nothing of it is kept"
LATER = "The memory's store is away: this will be saved when it is back."


class _Args(BaseModel):
    model_config = ConfigDict(str_strip_whitespace=True)


class SearchMemory(_Args):
    """Search what was said in earlier conversations with this user. Call it when the user refers to the past ("what do
    you remember about ...", "did I tell you ...", "how do I like my coffee?", "what did we decide"), or when something
    personal would help to answer."""

    query: str = Field(
        min_length=1,
        max_length=4_000,
        validation_alias=AliasChoices("query", "q", "text"),
        description="What to look for, in a few words or as a question",
    )
    queries: list[Annotated[str, Field(min_length=1, max_length=4_000)]] = Field(
        default=[],
        max_length=MAX_QUERIES,
        description="Further things to look for at the same time, where the answer rests on several",
    )
    n_results: int | None = Field(default=None, ge=1, le=50, description="How many memories; left out: a few")
    hybrid: bool | None = Field(default=None, description="false: by meaning alone, not by words")
    do_rerank: bool | None = Field(default=None, description="true: only what helps, chosen by a slower second look")
    log: bool = Field(default=False, description="true: also what was said before and after, word for word")

    @model_validator(mode="before")
    @classmethod
    def _one_of_several(cls, values: Any) -> Any:
        """`queries` alone are enough, one of them needs no list, and empty ones are none."""
        if not isinstance(values, dict) or not isinstance(queries := values.get("queries"), list | str):
            return values
        several = [queries] if isinstance(queries, str) else queries
        several = [one for one in several if not isinstance(one, str) or one.strip()]
        if several and not any(values.get(name) for name in ("query", "q", "text")):
            return {**values, "query": several[0], "queries": several[1:]}
        return {**values, "queries": several}

    def wanted(self, zone: str) -> Wanted:
        queries = tuple(dict.fromkeys((self.query, *self.queries)))
        return Wanted(queries, self.n_results, self.hybrid, self.do_rerank, self.log, zone)


class SaveMemory(_Args):
    """Keep one sentence for later conversations. Call it when the user asks to remember something that has no topic of
    its own ("please remember that the meeting went well", "make a note: ...")."""

    content: str = Field(
        min_length=1,
        max_length=MAX_CONTENT,
        validation_alias=AliasChoices("content", "text", "memory"),
        description="One sentence worth keeping, complete in itself",
    )


class SaveTopic(_Args):
    """Keep a lasting fact under an exact name, replacing what was there. Call it when the user states a preference, a
    fact about himself or a project, or a rule to obey ("please remember my preferred language is Elixir", "our project
    uses Postgres", "never answer in German")."""

    topic: str = Field(
        min_length=1,
        validation_alias=AliasChoices("topic", "key", "name"),
        description="Name that begins with user., project. or constraint., such as user.preferred_language",
    )
    content: str = Field(
        min_length=1,
        max_length=MAX_CONTENT,
        validation_alias=AliasChoices("content", "value", "text"),
        description="The fact as one sentence",
    )


class RecallTopic(_Args):
    """Read what is kept under an exact topic name. Call it when the name is known, such as user.preferred_language
    ("what language do I prefer?"); search_memory finds things without their name."""

    topic: str = Field(
        min_length=1, validation_alias=AliasChoices("topic", "key", "name"), description="The exact name"
    )


def checked_topic(topic: str) -> str:
    """Raises ToolError."""
    if not topic.startswith(TOPIC_PREFIXES) or topic in TOPIC_PREFIXES:
        raise ToolError("topic must start with user., project. or constraint.")
    if len(topic) > MAX_TOPIC or not topic.isprintable():
        raise ToolError(f"topic must be at most {MAX_TOPIC} printable characters")
    return topic


class _Kept(NamedTuple):
    """kept: False while it only waits on the bus."""

    engram: Engram
    kept: bool


class MemoryTools:
    def __init__(self, context: Context[MemorySettings], keeper: Keeper, recall: Recall, embedder: Embedder) -> None:
        self._context = context
        self._keeper = keeper
        self._recall = recall
        self._embedder = embedder

    def tools(self) -> list[Tool[Any]]:
        return [
            Tool("search_memory", SearchMemory, self.search),
            Tool("save_memory", SaveMemory, self.save, read_only=False),
            Tool("save_topic", SaveTopic, self.save_topic, read_only=False),
            Tool("recall_topic", RecallTopic, self.recall_topic),
        ]

    async def search(self, args: SearchMemory, request: ToolRequest) -> ToolResult:
        settings = self._context.settings
        try:
            zone = first_zone(request.time_zone, settings.zone)
            found = await self._recall.search(request.user_id, args.wanted(zone), settings)
        except StoreUnavailable as exc:
            raise ToolError(_AWAY) from exc
        return ToolResult(told(found, settings, local_time(now_ms(), zone)), data_of(found))

    async def save(self, args: SaveMemory, request: ToolRequest) -> ToolResult:
        digest = hashlib.sha256(f"{request.user_id}\0{request.call_id}".encode()).hexdigest()[:32]
        kept = await self._keep(request, "note", f"note:{digest}", args.content)
        return ToolResult("Memory saved." if kept.kept else LATER, {"id": kept.engram.id})

    async def save_topic(self, args: SaveTopic, request: ToolRequest) -> ToolResult:
        topic = checked_topic(args.topic)
        try:
            await self.put_topic(request, topic, args.content)
        except StoreUnavailable as exc:
            raise ToolError(_AWAY) from exc
        return ToolResult(f"Memory saved: {topic}", {"topic": topic})

    async def recall_topic(self, args: RecallTopic, request: ToolRequest) -> ToolResult:
        try:
            found = await self._keeper.store.topic(request.user_id, args.topic)
        except StoreUnavailable as exc:
            raise ToolError(_AWAY) from exc
        if found is None:
            return ToolResult(NOTHING, {"topic": args.topic, "content": None})
        data = {"topic": found.topic, "content": found.content, "time": found.time}
        return ToolResult(f"[Memory: {found.topic}]\n{found.content}", data)

    async def put_topic(self, request: ToolRequest, topic: str, content: str) -> Engram:
        """Keeps it as an engram that is found by its name, and by a search. Raises StoreUnavailable."""
        return (await self._keep(request, "topic", "", content, topic)).engram

    async def _keep(self, request: ToolRequest, kind: Any, engram_id: str, content: str, topic: str = "") -> _Kept:
        """At once; by its words alone while the model is away. Without the store a note stays on the bus."""
        wish = MemorySave(
            id=engram_id,
            user_id=request.user_id,
            kind=kind,
            content=content,
            topic=topic,
            session_id=request.session_id,
            query_id=request.query_id,
            recorded=await self._keeper.states.now(),
            time_zone=first_zone(request.time_zone, self._context.settings.zone),
        )
        engram = saved(wish)
        if await self._keeper.ended(engram):
            raise ToolError(_ENDED)
        if topic:
            # deleted once, it may be saved again
            await self._keeper.states.restore([engram.id])
        (vector,) = await self._embedder.soon([embedded_text(engram)]) or [NO_VECTOR]
        try:
            await self._keeper.put(request.user_id, [(engram, vector)])
        except StoreUnavailable as exc:
            if topic:
                # an exact name is asked for at once: it is kept, or it is not
                raise
            log.warning("memory.saved_later", reason=str(exc))
            once = f"{request.call_id}:{wish.recorded}"
            await self._context.bus.publish(MEMORY_SAVE.of(wish, once=once, user_id=request.user_id))
            return _Kept(engram, False)
        if vector is NO_VECTOR:
            # it gets one as soon as there is a model
            self._embedder.moved.set()
        if await self._keeper.ended(engram):
            await self._keeper.delete(request.user_id, [engram.id])
            raise ToolError(_ENDED)
        return _Kept(engram, True)
