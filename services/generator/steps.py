"""The steps of the agent loop: each is read from the journal, or is run and written to it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from services.generator.context import (
    MOST_RATIO,
    ContextTooSmall,
    Conversation,
    Fitted,
    Rates,
    characters,
    images_in,
    one_system,
)
from services.generator.deltas import DeltaPump
from services.generator.loop import Message, Reply, call_of_message, in_order
from services.generator.recorded import recorded_reply, recorded_result, reply_of
from services.generator.response_run import ResponseRun
from services.generator.settings import GeneratorSettings
from shared.contracts import (
    ToolCallRecord,
    ToolResultMessage,
    canonical_tool,
)
from shared.envelope import age_ms
from shared.llm.loops import without_loop
from shared.llm.port import (
    ChatModel,
    ChatRequest,
    ContextOverflow,
    EmptyAnswer,
    Finish,
    ModelError,
    ModelFacts,
    ModelOverloaded,
    ModelRejected,
    ModelUnavailable,
    Notice,
    StreamInterrupted,
    TextDelta,
    ThinkingDelta,
    ToolCall,
)
from shared.llm.preemption import Preempted
from shared.participant.room import BusNearlyFull, TooMuchUnderWay
from shared.participant.tool_client import ToolClient, new_token, refused
from shared.records.events import (
    AnswerPiece,
    KnownEvent,
    ModelMessage,
    Restarted,
    Speaker,
    ThinkingPiece,
    ToolAnswered,
    ToolAsked,
    Truncated,
)
from shared.records.journal import Events
from shared.telemetry import metrics
from shared.telemetry.logging import get_logger

log = get_logger()

# After so many interruptions of one answer, another attempt will not help.
_MAX_INTERRUPTIONS = 3
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0
# The worker's timeout message is more precise than ours: wait for it a little longer.
_GRACE = 1.5
# The least number of tokens that an answer may have: the estimated length of a prompt is rather too high.
_LEAST_ANSWER = 256

_NOTICES = {
    "tools_unsupported": "this model cannot call tools; it answers without them",
    "thinking_unsupported": "this model cannot think aloud; it answers without",
    "model_loops": "the model began to repeat itself and was stopped; ask again, or try another model",
}


@dataclass(slots=True)
class JournalSteps:
    """The steps of one agent: of the answer, or of a committee member.

    allowed: names of our tools that are offered and run; None: all.
    scope: the member's part of the journal; empty: the answer.
    functions: schemas of the client's own tools, offered beside ours.
    max_deferral_s: how long interactive queries may defer a model call; None: as the settings say.
    arguments: default arguments of calls, by tool.
    parallel: other agents of the query run at the same time, so its calls are no states of the query.
    """

    run: ResponseRun
    conversation: Conversation
    model_name: str
    options: dict[str, Any]
    allowed: frozenset[str] | None
    scope: str = ""
    labels: dict[str, Any] = field(default_factory=dict)
    functions: Sequence[dict[str, Any]] = ()
    think: bool = True
    max_deferral_s: float | None = None
    arguments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    parallel: bool = False

    # ── state ────────────────────────────────────────────────────────────────────────────────────────────────

    async def transition(self, action: str) -> None:
        if not self.parallel:
            await self.run.transition(action)

    # ── the model ────────────────────────────────────────────────────────────────────────────────────────────

    async def model(
        self, step: int, current: Sequence[Message], *, with_tools: bool, form: Mapping[str, Any] | None = None
    ) -> Reply:
        recorded = recorded_reply(self.run.state, self.scope, step)
        if recorded is not None:
            # Later prompts are planned with the rates that this reply has measured.
            rates = self.conversation.rates
            self.conversation.rates = Rates(recorded.ratio or rates.ratio, recorded.image_tokens or rates.image)
            return recorded
        await self._void_partial(step)
        schemas = await self._schemas() if with_tools else []
        interruptions, pause = 0, _FIRST_PAUSE
        clock = asyncio.get_running_loop().time
        seconds = self.run.deps.context.settings.yield_seconds
        deferred_until = clock() + (seconds if self.max_deferral_s is None else min(seconds, self.max_deferral_s))
        while True:
            facts = await self._facts()
            # With tools and a schema in one request, servers refuse it or never call a tool.
            form = None if schemas else form
            request, fitted = await self._request(current, schemas, facts, form, max(0.0, deferred_until - clock()))
            try:
                reply = await self._call(step, request, fitted, facts.context(request.num_ctx))
                self.run.waits_for = ""
                return reply
            except ModelRejected:
                if request.response_schema is not None:
                    # Not every server takes every schema; the prompt contains the schema as well.
                    form = None
                elif self.conversation.resends_images():
                    # The user did not attach these images to this question: they must not make it fail.
                    self.conversation.sees = False
                else:
                    raise
            except Preempted:
                log.debug("model.yielded", step=step)
            except StreamInterrupted as exc:
                interruptions += 1
                if interruptions >= _MAX_INTERRUPTIONS:
                    raise
                log.warning("model.interrupted", step=step, reason=str(exc))
            except ContextOverflow as exc:
                # Most refusals contain the lengths of window and prompt; otherwise halve the history until it fits.
                sent, images = characters(request.messages, request.tools), images_in(request.messages)
                longer = self.conversation.measure(sent, exc.prompt, images)
                smaller = (await self._facts()).context(request.num_ctx) < facts.context(request.num_ctx)
                if not longer and not smaller and not self.conversation.halve():
                    raise ContextOverflow(f"{exc}; {_advice(facts, request.num_ctx)}") from exc
            except (ModelOverloaded, ModelUnavailable) as exc:
                self.run.waits_for = str(exc)
                log.warning("model.waiting", step=step, reason=str(exc), seconds=pause)
                await self.run.notice("model_waiting", f"waiting for the model: {exc}")
                await asyncio.sleep(pause * random.uniform(0.8, 1.2))
                pause = min(_LONGEST_PAUSE, pause * 2)

    async def _void_partial(self, step: int) -> None:
        """Void the partial text of a call that an earlier owner did not finish."""
        unsettled = self.run.state.unsettled.get(self._speaker)
        if unsettled is not None:
            await self.run.writer.append(Restarted(step=step, discard_after=unsettled, **self.labels))

    @property
    def _speaker(self) -> Speaker:
        return (self.labels["persona"], self.labels.get("round", 0)) if self.labels else None

    async def _schemas(self) -> list[dict[str, Any]]:
        return await offered(self.run.deps.tools, self.allowed, self.functions)

    async def _facts(self) -> ModelFacts:
        return await planned_with(self.run.deps.context.settings, self.run.model, self.model_name)

    async def _request(
        self,
        current: Sequence[Message],
        schemas: Sequence[Mapping[str, Any]],
        facts: ModelFacts,
        form: Mapping[str, Any] | None,
        patience: float,
    ) -> tuple[ChatRequest, Fitted]:
        settings = self.run.deps.context.settings
        try:
            fitted = self.conversation.fit(current, schemas, facts.context(settings.num_ctx))
        except ContextTooSmall as exc:
            raise ContextOverflow(f"{exc}; {_advice(facts, settings.num_ctx)}") from exc
        # Some servers refuse a request whose answer could exceed the window.
        left = settings.max_tokens if facts.window is None else max(_LEAST_ANSWER, facts.window - fitted.tokens)
        await self._announce_cut(fitted)
        request = ChatRequest(
            model=self.model_name,
            messages=one_system(fitted.messages),
            tools=schemas,
            think=self.think,
            num_ctx=settings.num_ctx,
            options=self.options,
            max_tokens=min(settings.max_tokens, left),
            first_token_timeout=settings.first_token_seconds,
            idle_timeout=settings.timeout_seconds,
            response_schema=form,
            patience=patience,
        )
        return request, fitted

    async def _announce_cut(self, fitted: Fitted) -> None:
        turns, images = self.conversation.announced
        left_out = {file.id: file.name for file in fitted.left_out}
        if fitted.dropped > turns or not images.issuperset(left_out):
            self.conversation.announced = max(turns, fitted.dropped), images.union(left_out)
            data: dict[str, Any] = {
                "dropped_turns": fitted.dropped,
                "kept_turns": fitted.kept,
                "prompt_tokens": fitted.tokens,
            }
            if left_out:
                data["attachments"] = [{"id": id, "name": name} for id, name in left_out.items()]
            await self.run.writer.append(Truncated(**data, **self.conversation.seen(fitted), **self.labels))

    async def _call(self, step: int, request: ChatRequest, fitted: Fitted, window: int) -> Reply:
        """Run one attempt: write its text as it comes, then the whole message as the checkpoint. window: in tokens."""
        writer = self.run.writer
        before = writer.position
        received = _Received()
        rest: Events = ()
        try:
            rest = await self._read(request, DeltaPump(writer, self.labels, self.run.deps.flush_timer), received)
        except EmptyAnswer:
            # The empty message is a checkpoint as well; the agent loop decides what follows.
            log.warning("model.silent", step=step)
        except (StreamInterrupted, ModelOverloaded, ModelUnavailable, ContextOverflow):
            if received.shown:
                await writer.append(Restarted(step=step, discard_after=before, **self.labels))
            raise
        finish, content, thinking = received.finish, "".join(received.text), "".join(received.thinking)
        if finish.reason == "loop":
            content, rest = await self._cut_back(step, before, content, thinking), ()
        sent = characters(request.messages, request.tools)
        self.conversation.measure(sent, finish.prompt_tokens, images_in(request.messages))
        data: dict[str, Any] = {
            "step": step,
            "role": "assistant",
            "content": content,
            "thinking": thinking,
            "tool_calls": [_entry_of(call) for call in received.calls],
            "prompt_tokens": finish.prompt_tokens,
            "completion_tokens": finish.completion_tokens,
            "finish_reason": finish.reason,
            "model": finish.model or request.model,
            "context": {
                "window": window,
                "tokens": _tokens_in_window(sent, fitted, finish),
                "ratio": self.conversation.rates.ratio,
                "image_tokens": self.conversation.rates.image,
                **self.conversation.seen(fitted),
            },
            **self.labels,
        }
        if finish.reasoning_details:
            data["reasoning_details"] = list(finish.reasoning_details)
        if self.scope:
            data["scope"] = self.scope
        message = ModelMessage(**data)
        await writer.append_all([*rest, message])
        return reply_of(message)

    async def _cut_back(self, step: int, before: str, content: str, thinking: str) -> str:
        """Return the text of an answer without its endless repetition, and write it in place of the shown text.

        before: the last entry before the call's.
        """
        kept = without_loop(content)
        events: list[KnownEvent] = [Restarted(step=step, discard_after=before, **self.labels)]
        events += [ThinkingPiece(text=thinking, **self.labels)] if thinking else []
        events += [AnswerPiece(text=kept, **self.labels)] if kept else []
        await self.run.writer.append_all(events)
        await self.run.notice("model_loops", _NOTICES["model_loops"])
        return kept

    async def _read(self, request: ChatRequest, pump: DeltaPump, received: _Received) -> Events:
        """Collect the model's deltas in `received`; return the entries that are still to be written."""
        stream = self.run.model.stream(request)
        try:
            async for delta in stream:
                match delta:
                    case ThinkingDelta(text):
                        received.thinking.append(text)
                        pump.add(ThinkingPiece, text)
                        self._measure_first_token()
                    case TextDelta(text):
                        received.text.append(text)
                        pump.add(AnswerPiece, text)
                        self._measure_first_token()
                    case ToolCall():
                        most = self.run.deps.context.settings.max_calls
                        refused = f"only the first {most} tool calls of a message are run"
                        received.calls.append(delta if len(received.calls) < most else replace(delta, error=refused))
                    case Notice(code):
                        # Only the first answer of a conversation has notices about the model's abilities.
                        if self.conversation.history:
                            self.run.hidden_notices.add(code)
                        await self.run.notice(code, _NOTICES[code])
                    case Finish():
                        received.finish = delta
                if pump.refused:
                    await pump.settle()
            await pump.settle()
            return pump.drain()
        except ModelError:
            # The client gets the text before the failure.
            await pump.settle()
            await self.run.writer.append_all(pump.drain())
            raise
        finally:
            # After an interruption nothing more is written.
            pump.drain()
            await stream.aclose()  # type: ignore[attr-defined]

    def _measure_first_token(self) -> None:
        """Record the time to the first token, except after a takeover, when it was recorded already."""
        if self.run.first_token_seen:
            return
        self.run.first_token_seen = True
        seconds = max(0.0, age_ms(self.run.caller.query_id) / 1000)
        total = self.run.deps.context.facts.setdefault("first_words", {"count": 0, "seconds": 0.0})
        total["count"] += 1
        total["seconds"] += seconds
        if (meter := metrics.meter()) is not None:
            meter.first_token(seconds)

    # ── tools ────────────────────────────────────────────────────────────────────────────────────────────────

    async def tools(self, step: int, calls: Sequence[tuple[int, ToolCall]]) -> list[ToolCallRecord]:
        numbered = [
            (f"{self.run.response_id}:{self.scope}{step}:{position}", self._completed(call)) for position, call in calls
        ]
        # The tokens of calls that an earlier owner requested.
        known = {call_id: token for call_id, _ in numbered if (token := self.run.state.token(call_id)) is not None}
        new = {call_id: new_token() for call_id, _ in numbered if call_id not in known}
        await self.run.writer.append_all(
            [
                ToolAsked(call_id=call_id, tool=call.name, args=call.args, step=step, **self.labels)
                for call_id, call in numbered
                if call_id in new
            ],
            list(new.values()),
        )
        tokens = {**known, **new}
        return await in_order(
            [partial(self._tool, call_id, call, tokens[call_id], call_id in known) for call_id, call in numbered]
        )

    def _completed(self, call: ToolCall) -> ToolCall:
        given = self.arguments.get(canonical_tool(call.name, call.args))
        return replace(call, args={**given, **call.args}) if given else call

    async def _tool(self, call_id: str, call: ToolCall, token: str, again: bool) -> ToolCallRecord:
        """Return the call with its result. again: an earlier owner has requested it."""
        recorded = recorded_result(self.run.state, call_id)
        if recorded is not None:
            return recorded
        if self.allowed is not None and canonical_tool(call.name, call.args) not in self.allowed:
            error = f"unknown tool: '{call.name}'"
            record = ToolCallRecord(tool=call.name, args=call.args, result=f"[{error}]", error=error, call_id=call_id)
        else:
            outcome = await self._call_tool(call_id, call, token, again)
            record = ToolCallRecord(
                tool=outcome.tool,
                args=call.args,
                result=outcome.result,
                error=outcome.error,
                call_id=call_id,
                duration_ms=outcome.duration_ms,
                data=outcome.data,
            )
        await self.run.writer.append(ToolAnswered(**record.model_dump(mode="json"), **self.labels))
        return record

    async def _call_tool(self, call_id: str, call: ToolCall, token: str, again: bool) -> ToolResultMessage:
        """Return the tool's result."""
        tools, settings = self.run.deps.tools, self.run.deps.context.settings
        try:
            if again:
                await tools.back(call.name, call.args, settings.tool_timeout)
            return await tools.call(
                call.name,
                call.args,
                call_id=call_id,
                caller=self.run.caller,
                timeout=await tools.patience(call.name, call.args, settings.tool_limit, settings.tool_timeout),
                grace=_GRACE,
                # The owner that wrote the journal's entry made the first attempt.
                attempt=2 if again else 1,
                token=token,
            )
        except (TooMuchUnderWay, BusNearlyFull) as exc:
            # The question goes on: a model can do without a call whose arguments are too large for now.
            tool = canonical_tool(call.name, call.args)
            return refused(tool, call_id, self.run.caller, f"[tool error: {exc}]", str(exc))


async def offered(
    tools: ToolClient, allowed: frozenset[str] | None = None, functions: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Return the schemas of the tools for a model; see `JournalSteps` for the arguments."""
    live = await tools.schemas()
    # A tool of the client replaces ours of the same name.
    replaced = {function["function"]["name"] for function in functions}
    own = [
        schema for name, schema in sorted(live.items()) if (allowed is None or name in allowed) and name not in replaced
    ]
    return [*own, *functions]


async def planned_with(settings: GeneratorSettings, model: ChatModel, name: str) -> ModelFacts:
    """Return the model's facts for planning a prompt. The demonstration model shortens its prompt by itself."""
    return ModelFacts() if settings.demo else await model.facts(name)


def _entry_of(call: ToolCall) -> dict[str, Any]:
    """Return a call in the form of a message's entry."""
    data = call_of_message(call)
    return data if call.error is None else {**data, "error": call.error}


def _advice(facts: ModelFacts, wanted: int) -> str:
    """Return what the user can do about a question that does not fit."""
    if facts.context(wanted) < wanted:
        return "ask for less at once, start the model server with a larger context, or take a model that has one"
    return "ask for less at once or raise num_ctx"


def _tokens_in_window(sent: int, fitted: Fitted, finish: Finish) -> int:
    """Return the tokens of a prompt of `sent` characters and its answer.

    The server's count, or the estimate if the server counts nothing, or only tokens outside its cache.
    """
    counted = finish.prompt_tokens or 0
    return (counted if sent <= MOST_RATIO * counted else fitted.tokens) + (finish.completion_tokens or 0)


_UNFINISHED = Finish("stop", None, None, "")


@dataclass(slots=True)
class _Received:
    """The deltas of one model call so far."""

    text: list[str] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    finish: Finish = _UNFINISHED

    @property
    def shown(self) -> bool:
        return bool(self.text or self.thinking)
