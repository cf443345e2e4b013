"""The common part of all adapters: turn a backend's wire into a chat model.

A wire sends one request and yields raw events. This module has the rest, once for all backends: the attempts of a call
(`shared.llm.attempts`), the markers of templates, references in the schemas of tools, the cleaner, blank lines before
an answer, ids for calls without one, and time-outs of a silent stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from shared.contracts import TOOL_ALIASES
from shared.llm.attempts import ABILITIES, Ability, Attempt, EndlessRepetition, Failure, next_attempt
from shared.llm.clean import Cleaner, Piece, asks_for_code, thought_calls
from shared.llm.discovery import Discovered, tokens_of
from shared.llm.loops import LoopWatch, asks_to_repeat
from shared.llm.markers import all_broken, without_markers
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
from shared.llm.printed_calls import PrintedCall, tool_name
from shared.llm.tool_schemas import without_references
from shared.llm.toolcalls import arguments_of, text_of, trouble_with
from shared.telemetry.logging import get_logger

log = get_logger()

# Seconds for which a lacking ability of a model is stored: the model may be pulled again with another template.
_REMEMBERED = 600.0
# Seconds for which text is held back because it may be a tool call.
HELD_SECONDS = 30.0
# Seconds to wait for the end of the connection after the end of the answer.
BEHIND = 1.0
# Characters at the end of the thoughts in which a tool call is searched.
_THOUGHTS_READ = 8_000
# Characters of a call's id, which each later request sends back to the model server.
_LONGEST_ID = 256
_BLANK_LINES = re.compile(r"(?:[^\S\n]*\n)+")
_LOOPS = "the model repeated itself without end and was stopped; ask in other words, or take another model"


@dataclass(frozen=True, slots=True)
class RawCall:
    """A tool call as the backend gave it: the id may be missing, the arguments may be JSON text."""

    id: str | None
    name: str
    arguments: Any
    signature: str | None = None


@dataclass(frozen=True, slots=True)
class Alive:
    """A sign of life without a token: the backend works on the answer."""


P = TypeVar("P")
WireEvent = TextDelta | ThinkingDelta | RawCall | Finish | Alive
# perf: text is a plain tuple, because there is one for every token.
Said = tuple[type[TextDelta] | type[ThinkingDelta], str] | RawCall | Finish
_EMPTY = (TextDelta(""), ThinkingDelta(""))


def merged(said: Iterable[Said]) -> Iterator[WireEvent]:
    """Yield the events of lines that arrived together, with neighbouring texts joined.

    At least one event, because every line is a sign of life. An error of `said` is raised after the text before it.
    """
    kind: type[TextDelta] | type[ThinkingDelta] = TextDelta
    texts: list[str] = []
    spoken, broken = False, None
    try:
        for what in said:
            if type(what) is tuple and what[0] is kind:
                texts.append(what[1])
                continue
            if text := _joined(texts):
                spoken = True
                yield kind(text)
            if isinstance(what, tuple):
                kind, texts = what[0], [what[1]]
            else:
                spoken, texts = True, []
                yield what
    except ModelError as exc:
        broken = exc
    if text := _joined(texts):
        yield kind(text)
    elif not spoken:
        yield kind("") if texts else Alive()
    if broken is not None:
        raise broken


def _joined(texts: Sequence[str]) -> str:
    try:
        return text_of("".join(texts))
    except TypeError as exc:
        raise StreamInterrupted(f"the server sent a text that cannot be read: {exc}") from exc


async def following(parts: AsyncIterator[P], until: float | None, *broken: type[Exception]) -> P | None:
    """Return the next part of an answer, or None at its end.

    until: for a complete answer, the loop time until which to wait for its token counts. The errors `broken` of the
    connection are then ignored.
    """
    if until is None:
        return await anext(parts, None)
    with contextlib.suppress(TimeoutError, *broken):
        async with asyncio.timeout_at(until):
            return await anext(parts, None)
    return None


class Wire(Protocol):
    """One backend's protocol."""

    def events(self, request: ChatRequest, *, wish: bool) -> AsyncGenerator[WireEvent, None]:
        """Yield the events of one request. Raises ModelError. Closing the generator closes the connection.

        An empty TextDelta is a token that cannot be shown yet. Finish is last, and is missing in an incomplete stream.
        wish: whether the request may contain options about thinking.
        """
        ...

    async def facts(self, model: str) -> ModelFacts:
        """Return the backend's current facts of the model. Raises ModelError if the backend or the model is missing."""
        ...

    async def aclose(self) -> None: ...


class WiredChatModel:
    """A chat model (see `shared.llm.port.ChatModel`) over a wire.

    provider: the provider's name in traces.
    """

    def __init__(self, wire: Wire, provider: str = "") -> None:
        self._wire = wire
        self._provider = provider
        self._lacking: dict[tuple[str, Ability], float] = {}
        self._discovered = Discovered(wire.facts)
        # perf: the tools of the last request and their converted form. They change seldom, and conversion takes long.
        self._tools: tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]] = ((), ())
        # Names of tools whose broken references have been logged.
        self._reported: set[str] = set()

    def stream(self, request: ChatRequest) -> AsyncGenerator[Delta, None]:
        if request.tools != self._tools[0]:
            self._tools = (request.tools, all_broken([self._plain(tool) for tool in request.tools]))
        return observed(self._provider, request, self._stream(without_markers(request, self._tools[1])))

    def _plain(self, tool: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the tool with its schema without references; log broken ones once for each tool."""
        function = tool["function"]
        parameters, unresolved = without_references(function.get("parameters") or {})
        if unresolved and function["name"] not in self._reported:
            self._reported.add(function["name"])
            log.warning(
                "model.tool_schema_incomplete",
                tool=function["name"],
                references=unresolved,
                reason="these references have no target in the schema; the model gets {} in their place",
            )
        return {**tool, "function": {**function, "parameters": parameters}} if "parameters" in function else tool

    async def _stream(self, request: ChatRequest) -> AsyncGenerator[Delta, None]:
        attempt = Attempt(request, self._lacked_by(request.model))
        noticed: set[Notice] = set()
        while True:
            for notice in attempt.notices:
                if notice not in noticed:
                    noticed.add(notice)
                    yield notice
            shown = False
            try:
                async with aclosing(self._deltas(attempt)) as deltas:
                    async for delta in deltas:
                        shown = True
                        yield delta
                return
            except ModelError as error:
                following = next_attempt(attempt, Failure(error, shown))
                if following is None:
                    raise
            now = time.monotonic()
            self._lacking |= {(request.model, ability): now for ability in following.lacks - attempt.lacks}
            attempt = following

    async def _deltas(self, attempt: Attempt) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of one attempt. Raises ModelError."""
        sent = attempt.request
        answer = _Answer(attempt.asked, think=sent.think)
        try:
            async with aclosing(self._watched(sent, attempt.thinking_options)) as events:
                async for event in events:
                    for delta in answer.take(event):
                        yield delta
                    if answer.looping:
                        break
        except ContextOverflow as exc:
            if exc.window is not None:
                self._discovered.learn(sent.model, exc.window)
            raise
        except ModelError as exc:
            if answer.started and type(exc) is ModelError:
                # The request is good: a backend that restarts after a crash can answer it.
                raise StreamInterrupted(str(exc)) from exc
            raise
        if answer.looping:
            for delta in answer.stopped():
                yield delta
            if not answer.said_something:
                raise EndlessRepetition(_LOOPS)
        elif answer.finish is None:
            raise StreamInterrupted("the model's answer broke off before its end")
        elif answer.said_something:
            yield answer.finish
        elif answer.finish.reason == "length":
            raise ModelError("the length limit was reached before the answer began; allow more tokens")
        else:
            raise EmptyAnswer(f"the model {sent.model} gave an empty answer twice")

    async def facts(self, model: str) -> ModelFacts:
        return await self._discovered.facts(model)

    async def look(self, model: str) -> ModelFacts:
        """Return the backend's current facts of the model. Raises ModelError if the backend or the model is missing."""
        return await self._discovered.renewed(model)

    async def reachable(self, model: str) -> str | None:
        try:
            await self.look(model)
        except ModelError as exc:
            return str(exc)
        return None

    async def aclose(self) -> None:
        await self._wire.aclose()

    def _lacked_by(self, model: str) -> frozenset[Ability]:
        """Return the abilities that the model was found to lack in the last minutes."""
        since = time.monotonic() - _REMEMBERED
        return frozenset(ability for ability in ABILITIES if self._lacking.get((model, ability), -math.inf) > since)

    async def _watched(self, request: ChatRequest, wish: bool) -> AsyncGenerator[WireEvent, None]:
        """Yield the wire's events. Raises an error when they stop."""
        clock = asyncio.get_running_loop().time
        begun = False
        until = clock() + request.first_token_timeout
        async with aclosing(self._wire.events(request, wish=wish)) as events:
            while True:
                try:
                    async with asyncio.timeout_at(until):
                        event = await anext(events)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    if begun:
                        raise StreamInterrupted(f"the model was silent for {request.idle_timeout:g}s") from None
                    waited = f"{request.first_token_timeout:g}s"
                    raise ModelUnavailable(f"the model did not begin to answer within {waited}") from None
                yield event
                if isinstance(event, Finish):
                    # The answer is complete. A connection that ends in time can be used again.
                    with contextlib.suppress(ModelError, TimeoutError):
                        async with asyncio.timeout(BEHIND):
                            async for _ in events:
                                pass
                    return
                if not begun:
                    begun = not isinstance(event, Alive) and event not in _EMPTY
                    until = clock() + (request.idle_timeout if begun else request.first_token_timeout)
                elif not isinstance(event, Alive):
                    until = clock() + request.idle_timeout


class _Answer:
    """One attempt: raw events in, clean deltas out. think: whether the request asks for thinking."""

    def __init__(self, request: ChatRequest, *, think: bool) -> None:
        self._think = think
        # All tools of the caller's request: a model without tool support may print their calls.
        current = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in request.tools}
        # A model may print a call under an older name of a tool.
        older = {name: current[tool] for name, tool in TOOL_ALIASES.items() if tool in current}
        self._offered = {**older, **current}
        self._cleaner = Cleaner(
            self._offered,
            asked=lambda: asks_for_code(_question(request)),
            structured=request.response_schema is not None,
        )
        self._model = request.model
        self._loops = LoopWatch(patient=lambda: asks_to_repeat(_question(request)))
        self._thinking_loops = LoopWatch()
        self._buffered_since: float | None = None
        self._thoughts: list[str] = []
        self._ids: set[str] = set()
        # Blank text before the answer; None once the answer has begun. A continued answer may begin with blank lines.
        self._blank: str | None = None if request.messages and request.messages[-1]["role"] == "assistant" else ""
        self.started = False
        self.said_something = False  # text that is not blank, or a call
        self.looping = False
        self.finish: Finish | None = None

    def take(self, event: WireEvent) -> Iterator[Delta]:
        if self.finish is not None:
            return
        match event:
            case ThinkingDelta():
                self.looping = self._thinking_loops.feed(event.text)
                yield from self._shown(iter((event,)))
            case TextDelta():
                self.looping = self._loops.feed(event.text)
                yield from self._shown(self._cleaner.feed(event.text))
            case RawCall():
                args, name = arguments_of(event.arguments), tool_name(event.name, self._offered)
                yield replace(self._call(event.id, name, args), signature=event.signature)
            case Finish():
                yield from self._ended(cut=event.reason == "length")
                self.finish = replace(
                    event,
                    prompt_tokens=tokens_of(event.prompt_tokens),
                    completion_tokens=tokens_of(event.completion_tokens),
                    model=text_of(event.model) if isinstance(event.model, str) else self._model,
                )
        yield from self._shown(self._flush())

    def stopped(self) -> Iterator[Delta]:
        """Yield the rest after the model was stopped; no Finish if there were only thoughts."""
        yield from self._shown(self._cleaner.finish(cut=True))
        if self.said_something:
            yield Finish("loop", None, None, self._model)

    def _ended(self, *, cut: bool) -> Iterator[Delta]:
        yield from self._shown(self._cleaner.finish(cut=cut))
        thoughts = "".join(self._thoughts)
        if not self.said_something and not cut:
            # Some models call a tool before the end marker of their thoughts.
            yield from self._shown(thought_calls(thoughts[-_THOUGHTS_READ:], self._offered))
        if not self.said_something and not self._think and thoughts.strip():
            # Some servers return an answer without thoughts as thoughts, because no end marker came.
            yield from self._shown(iter((TextDelta(thoughts),)))

    def _flush(self) -> Iterator[Piece]:
        """Yield text that has been held back for too long."""
        if not self._cleaner.is_buffering:
            self._buffered_since = None
        elif self._buffered_since is None:
            self._buffered_since = time.monotonic()
        elif time.monotonic() - self._buffered_since > HELD_SECONDS:
            yield from self._cleaner.flush()

    def _shown(self, pieces: Iterator[Piece]) -> Iterator[Delta]:
        for piece in pieces:
            if isinstance(piece, PrintedCall):
                yield self._call(None, piece.name, piece.args, piece.error)
                continue
            if isinstance(piece, TextDelta):
                piece = self._without_blank_lines(piece)
            if piece.text:
                self.started = True
                if isinstance(piece, ThinkingDelta):
                    self._thoughts.append(piece.text)
                elif piece.text.strip():
                    self.said_something = True
                yield piece

    def _without_blank_lines(self, piece: TextDelta) -> TextDelta:
        """Return the text without blank lines at the beginning of the answer; the first line keeps its indentation."""
        if self._blank is None:
            return piece
        text = self._blank + piece.text
        if found := _BLANK_LINES.match(text):
            text = text[found.end() :]
        self._blank = text if not text.strip() else None
        return TextDelta("" if self._blank is not None else text)

    def _call(self, given: str | None, name: str, args: dict[str, Any], error: str | None = None) -> ToolCall:
        self.started = self.said_something = True
        error = error or trouble_with(args)
        return ToolCall(self._id(given), name, args if error is None else {}, error)

    def _id(self, given: str | None) -> str:
        """Return the backend's id; a new one if it is missing, repeated in this answer, or too long."""
        usable = given and len(given) <= _LONGEST_ID and given not in self._ids
        name = given if given and usable else f"call_{uuid.uuid4().hex[:12]}"
        self._ids.add(name)
        return name


def _question(request: ChatRequest) -> str:
    """Return the newest message of the user."""
    return next((str(m.get("content") or "") for m in reversed(request.messages) if m["role"] == "user"), "")
