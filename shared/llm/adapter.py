"""What all adapters share: a backend's wire turned into a chat model.

A wire sends one request and yields raw events. Here, once for all backends: fall-backs for models without tools or
thinking, the markers of templates, the cleaner, ids for calls that have none, time-outs of a silent stream, and empty
answers.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from shared.llm.clean import Cleaner, PrintedCall
from shared.llm.discovery import Discovered
from shared.llm.failures import ThinkingUnsupported, ToolsUnsupported
from shared.llm.markers import without_markers
from shared.llm.observed import observed
from shared.llm.port import (
    ChatRequest,
    ContextOverflow,
    Delta,
    EmptyAnswer,
    Finish,
    ModelError,
    ModelFacts,
    ModelUnavailable,
    Notice,
    StreamInterrupted,
    TextDelta,
    ThinkingDelta,
    ToolCall,
)
from shared.llm.toolcalls import arguments_of, trouble_with

# How long a model is remembered to lack something: it may be pulled again with another template.
_REMEMBERED = 600.0

Ability = Literal["tools", "thinking"]


@dataclass(frozen=True, slots=True)
class RawCall:
    """A tool call as the backend gave it: the id may be missing, the arguments may be JSON text."""

    id: str | None
    name: str
    arguments: Any


WireEvent = TextDelta | ThinkingDelta | RawCall | Finish


def merged(events: Iterable[WireEvent]) -> Iterator[WireEvent]:
    """The same events, neighbouring texts as one: what has arrived together is handled together. At least one, so that
    whatever has arrived tells that the backend is alive; what `events` raises comes after the text before it."""
    kind: type[TextDelta] | type[ThinkingDelta] = TextDelta
    texts: list[str] = []
    spoken, broken = False, None
    try:
        for event in events:
            if type(event) is kind:
                texts.append(event.text)
                continue
            if text := "".join(texts):
                yield kind(text)
            spoken, texts = spoken or bool(text), []
            if isinstance(event, TextDelta | ThinkingDelta):
                kind, texts = type(event), [event.text]
            else:
                spoken = True
                yield event
    except ModelError as exc:
        broken = exc
    if (text := "".join(texts)) or not spoken:
        yield kind(text)
    if broken is not None:
        raise broken


class Wire(Protocol):
    """One backend's protocol."""

    def events(self, request: ChatRequest, *, wish: bool) -> AsyncGenerator[WireEvent, None]:
        """One request. An empty TextDelta only says that the backend is alive; Finish comes last, and is missing
        when the stream was incomplete. `wish` False: say nothing about thinking, the model does not take it.
        Raises ModelError; closing the generator closes the connection.
        """
        ...

    async def facts(self, model: str) -> ModelFacts:
        """What the backend says of the model now. Raises ModelError when it is not there or does not have it."""
        ...

    async def aclose(self) -> None: ...


class WiredChatModel:
    """A chat model (see `shared.llm.port.ChatModel`) over a wire.

    `load_timeout`: longest wait in seconds for the first byte of an answer, in which a model may have to be loaded.
    `provider`: whose model it is, as traces name it.
    """

    def __init__(self, wire: Wire, load_timeout: float, provider: str = "") -> None:
        self._wire = wire
        self._provider = provider
        self._load_timeout = load_timeout
        self._lacking: dict[tuple[str, Ability], float] = {}
        self._discovered = Discovered(wire.facts)

    def stream(self, request: ChatRequest) -> AsyncGenerator[Delta, None]:
        return observed(self._provider, request, self._stream(without_markers(request)))

    async def _stream(self, request: ChatRequest) -> AsyncGenerator[Delta, None]:
        noticed: set[Ability] = set()
        retried = False
        while True:
            asked = self._possible(request)
            wish = not self._lacks(request.model, "thinking")
            if request.tools and not asked.tools and "tools" not in noticed:
                noticed.add("tools")
                yield Notice("tools_unsupported")
            if request.think and not wish and "thinking" not in noticed:
                noticed.add("thinking")
                yield Notice("thinking_unsupported")
            answer = _Answer(asked)
            try:
                async with aclosing(self._watched(asked, wish)) as events:
                    async for event in events:
                        for delta in answer.take(event):
                            yield delta
            except ToolsUnsupported:
                if answer.started or not asked.tools:
                    raise
                self._lacking[request.model, "tools"] = time.monotonic()
                continue
            except ThinkingUnsupported:
                if answer.started or not wish:
                    raise
                self._lacking[request.model, "thinking"] = time.monotonic()
                continue
            except ContextOverflow as exc:
                if exc.window is not None:
                    self._discovered.learn(request.model, exc.window)
                raise
            except ModelError as exc:
                if answer.started and type(exc) is ModelError:
                    # it had begun well: a backend that crashed and is back answers the same request
                    raise StreamInterrupted(str(exc)) from exc
                raise
            finish = answer.finish
            if finish is None:
                raise StreamInterrupted("the model's answer broke off before its end")
            if answer.said_something:
                yield finish
                return
            if finish.reason == "length":
                raise ModelError("the length limit was reached before the answer began; allow more tokens")
            if retried:
                raise EmptyAnswer(f"the model {request.model} gave an empty answer twice")
            retried = True

    async def facts(self, model: str) -> ModelFacts:
        return await self._discovered.facts(model)

    async def look(self, model: str) -> ModelFacts:
        """What the backend says of the model now. Raises ModelError when it is not there or does not have it."""
        return await self._discovered.renewed(model)

    async def reachable(self, model: str) -> str | None:
        try:
            await self.look(model)
        except ModelError as exc:
            return str(exc)
        return None

    async def aclose(self) -> None:
        await self._wire.aclose()

    def _possible(self, request: ChatRequest) -> ChatRequest:
        return replace(request, tools=()) if self._lacks(request.model, "tools") else request

    def _lacks(self, model: str, ability: Ability) -> bool:
        since = self._lacking.get((model, ability))
        return since is not None and time.monotonic() - since < _REMEMBERED

    async def _watched(self, request: ChatRequest, wish: bool) -> AsyncGenerator[WireEvent, None]:
        """The wire's events, as long as they keep coming."""
        limit = self._load_timeout
        begun = False
        async with aclosing(self._wire.events(request, wish=wish)) as events:
            while True:
                try:
                    async with asyncio.timeout(limit):
                        event = await anext(events)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    if begun:
                        raise StreamInterrupted(f"the model was silent for {limit:g}s") from None
                    raise ModelUnavailable(f"the model did not begin to answer within {limit:g}s") from None
                yield event
                begun, limit = True, request.idle_timeout


class _Answer:
    """One attempt: raw events in, clean deltas out."""

    def __init__(self, request: ChatRequest) -> None:
        names = [tool["function"]["name"] for tool in request.tools]
        self._cleaner = Cleaner(names)
        self._ids: set[str] = set()
        self.started = False
        self.said_something = False  # text that is not blank, or a call
        self.finish: Finish | None = None

    def take(self, event: WireEvent) -> Iterator[Delta]:
        if self.finish is not None:
            return
        match event:
            case ThinkingDelta():
                pieces: Iterator[TextDelta | ThinkingDelta | PrintedCall] = iter((event,))
            case TextDelta():
                pieces = self._cleaner.feed(event.text)
            case RawCall():
                yield self._call(event.id, event.name, arguments_of(event.arguments))
                return
            case Finish():
                pieces = self._cleaner.finish()
                self.finish = event
        for piece in pieces:
            if isinstance(piece, PrintedCall):
                yield self._call(None, piece.name, piece.args)
            elif piece.text:
                self.started = True
                if isinstance(piece, TextDelta) and piece.text.strip():
                    self.said_something = True
                yield piece

    def _call(self, given: str | None, name: str, args: dict[str, Any]) -> ToolCall:
        self.started = self.said_something = True
        error = trouble_with(args)
        return ToolCall(self._id(given), name, args if error is None else {}, error)

    def _id(self, given: str | None) -> str:
        """The backend's id, unless it is missing or was given before in this answer."""
        name = given if given and given not in self._ids else f"call_{uuid.uuid4().hex[:12]}"
        self._ids.add(name)
        return name
