"""The steps of the agent loop on the bus: looked up in the journal, else run and recorded there."""

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
from services.generator.deltas import Beat, DeltaPump
from services.generator.loop import Message, Reply, in_order
from services.generator.recall import Recall, reply_of, speaker, written
from services.generator.settings import GeneratorSettings
from shared.contracts import (
    AGENT_TRANSITION,
    AgentTransition,
    Outgoing,
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
from shared.participant.machine import Machine, Transition
from shared.participant.room import BusNearlyFull, TooMuchUnderWay
from shared.participant.service import Context
from shared.participant.tool_client import Caller, ToolClient, new_token, refused
from shared.records.events import ModelMessage
from shared.records.journal import EntryType, Items, JournalWriter
from shared.telemetry import metrics
from shared.telemetry.logging import get_logger

log = get_logger()

# A stream that breaks off this often breaks off for a reason that another try does not remove.
_MAX_INTERRUPTIONS = 3
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0
# The worker's own time-out says more than ours: give its answer the time to arrive.
_GRACE = 1.5
# Tokens of an answer that are asked for in any case: the length of the prompt is estimated, and rather too high.
_LEAST_ANSWER = 256

_NOTICES = {
    "tools_unsupported": "this model cannot call tools; it answers without them",
    "thinking_unsupported": "this model cannot think aloud; it answers without",
    "model_loops": "the model began to repeat itself and was stopped; ask again, or try another model",
}


@dataclass(slots=True)
class Ports:
    """What a run touches outside itself. waits: why the model cannot be asked, while it is waited for."""

    context: Context[GeneratorSettings]
    model: ChatModel
    tools: ToolClient
    writer: JournalWriter
    recall: Recall
    machine: Machine
    caller: Caller
    response_id: str
    attempt: int
    beat: Beat = field(default_factory=Beat)
    shown: int = 0
    spoken: bool = False
    waits: str = ""


@dataclass(slots=True)
class JournalSteps:
    """One agent's steps. `scope` names a committee member's part of the journal; it is empty for the one answer.

    allowed: which of our tools are offered, and run, by their current names; None: all.
    functions: the schemas of the client's own, offered beside them.
    put_off: seconds that a call may be put off in favour of others' queries; None: as the settings say.
    arguments: of calls by their tool, where the model gives none. aside: it runs beside others, so that no single state
    is the query's: its calls are not shown as transitions.
    """

    ports: Ports
    conversation: Conversation
    model_name: str
    options: dict[str, Any]
    allowed: frozenset[str] | None
    scope: str = ""
    labels: dict[str, Any] = field(default_factory=dict)
    functions: Sequence[dict[str, Any]] = ()
    think: bool = True
    put_off: float | None = None
    arguments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    aside: bool = False

    # ── state ────────────────────────────────────────────────────────────────────────────────────────────────

    async def transition(self, action: str) -> None:
        if not self.aside:
            await show_transition(self.ports, action)

    # ── the model ────────────────────────────────────────────────────────────────────────────────────────────

    async def model(
        self, step: int, current: Sequence[Message], *, with_tools: bool, form: Mapping[str, Any] | None = None
    ) -> Reply:
        recorded = self.ports.recall.replies.get((self.scope, step))
        if recorded is not None:
            # what follows is planned with what that call has taught
            rates = self.conversation.rates
            self.conversation.rates = Rates(recorded.ratio or rates.ratio, recorded.image_tokens or rates.image)
            return recorded
        await self._void_partial(step)
        schemas = await self._schemas() if with_tools else []
        interruptions, pause = 0, _FIRST_PAUSE
        clock = asyncio.get_running_loop().time
        seconds = self.ports.context.settings.yield_seconds
        put_off_until = clock() + (seconds if self.put_off is None else min(seconds, self.put_off))
        while True:
            facts = await self._facts()
            # where both are asked for at once, servers refuse it or never call a tool
            form = None if schemas else form
            request, fitted = await self._request(current, schemas, facts, form, max(0.0, put_off_until - clock()))
            try:
                reply = await self._call(step, request, fitted, facts.context(request.num_ctx))
                self.ports.recall.replies[self.scope, step] = reply
                self.ports.waits = ""
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
                # most refusals say how long window and prompt are; else the history is halved until it fits
                sent, images = characters(request.messages, request.tools), images_in(request.messages)
                longer = self.conversation.measure(sent, exc.prompt, images)
                smaller = (await self._facts()).context(request.num_ctx) < facts.context(request.num_ctx)
                if not longer and not smaller and not self.conversation.halve():
                    raise ContextOverflow(f"{exc}; {_advice(facts, request.num_ctx)}") from exc
            except (ModelOverloaded, ModelUnavailable) as exc:
                self.ports.waits = str(exc)
                log.warning("model.waiting", step=step, reason=str(exc), seconds=pause)
                await self._notice("model_waiting", f"waiting for the model: {exc}")
                await asyncio.sleep(pause * random.uniform(0.8, 1.2))
                pause = min(_LONGEST_PAUSE, pause * 2)

    async def _notice(self, code: str, text: str) -> None:
        """Tells the client something once per answer."""
        if code not in self.ports.recall.notices:
            self.ports.recall.notices.add(code)
            await self.ports.writer.append(EntryType.NOTICE, {"code": code, "message": text})

    async def _void_partial(self, step: int) -> None:
        """Text of a call that nobody will finish: clients are told which."""
        unsettled = self.ports.recall.unsettled.pop(speaker(self.labels), None)
        if unsettled is not None:
            data = {"step": step, "discard_after": unsettled, **self.labels}
            await self.ports.writer.append(EntryType.RESTARTED, data)

    async def _schemas(self) -> list[dict[str, Any]]:
        return await offered(self.ports.tools, self.allowed, self.functions)

    async def _facts(self) -> ModelFacts:
        return await planned_with(self.ports.context.settings, self.ports.model, self.model_name)

    async def _request(
        self,
        current: Sequence[Message],
        schemas: Sequence[Mapping[str, Any]],
        facts: ModelFacts,
        form: Mapping[str, Any] | None,
        patience: float,
    ) -> tuple[ChatRequest, Fitted]:
        settings = self.ports.context.settings
        try:
            fitted = self.conversation.fit(current, schemas, facts.context(settings.num_ctx))
        except ContextTooSmall as exc:
            raise ContextOverflow(f"{exc}; {_advice(facts, settings.num_ctx)}") from exc
        # servers that know their window refuse an answer that could go beyond it
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
            await self.ports.writer.append(
                EntryType.CONTEXT_TRUNCATED, {**data, **self.conversation.seen(fitted), **self.labels}
            )

    async def _call(self, step: int, request: ChatRequest, fitted: Fitted, window: int) -> Reply:
        """One try. Its text is in the journal as it comes; the whole message is the checkpoint. window: tokens."""
        writer = self.ports.writer
        before = writer.position
        taken = _Taken()
        rest: Items = ()
        try:
            rest = await self._read(request, DeltaPump(writer, self.labels, self.ports.beat), taken)
        except EmptyAnswer:
            log.warning("model.silent", step=step)  # a checkpoint like any other: what to do about it is the loop's
        except (StreamInterrupted, ModelOverloaded, ModelUnavailable, ContextOverflow):
            if taken.shown:
                await writer.append(EntryType.RESTARTED, {"step": step, "discard_after": before, **self.labels})
            raise
        finish, content, thinking = taken.finish, "".join(taken.text), "".join(taken.thinking)
        if finish.reason == "loop":
            content, rest = await self._cut_back(step, before, content, thinking), ()
        sent = characters(request.messages, request.tools)
        self.conversation.measure(sent, finish.prompt_tokens, images_in(request.messages))
        data: dict[str, Any] = {
            "step": step,
            "role": "assistant",
            "content": content,
            "thinking": thinking,
            "tool_calls": [written(call) for call in taken.calls],
            "prompt_tokens": finish.prompt_tokens,
            "completion_tokens": finish.completion_tokens,
            "finish_reason": finish.reason,
            "model": finish.model or request.model,
            "context": {
                "window": window,
                "tokens": _taken_of_window(sent, fitted, finish),
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
        await writer.append_all([*rest, (EntryType.MESSAGE, data)])
        return reply_of(ModelMessage(**data))

    async def _cut_back(self, step: int, before: str, content: str, thinking: str) -> str:
        """The text of a model that went in circles, without the circles; clients are given it instead of what they saw.
        before: the last entry before the call's."""
        kept = without_loop(content)
        voided: tuple[EntryType, dict[str, Any]] = (EntryType.RESTARTED, {"step": step, "discard_after": before})
        again = [(EntryType.THINKING, {"text": thinking})] if thinking else []
        again += [(EntryType.ANSWER, {"text": kept})] if kept else []
        await self.ports.writer.append_all([(kind, {**data, **self.labels}) for kind, data in (voided, *again)])
        await self._notice("model_loops", _NOTICES["model_loops"])
        return kept

    async def _read(self, request: ChatRequest, pump: DeltaPump, taken: _Taken) -> Items:
        """Takes what the model says; what is left to be written of it."""
        stream = self.ports.model.stream(request)
        try:
            async for delta in stream:
                match delta:
                    case ThinkingDelta(text):
                        taken.thinking.append(text)
                        pump.add(EntryType.THINKING, text)
                        self._speaking()
                    case TextDelta(text):
                        taken.text.append(text)
                        pump.add(EntryType.ANSWER, text)
                        self._speaking()
                    case ToolCall():
                        most = self.ports.context.settings.max_calls
                        refused = f"only the first {most} tool calls of a message are run"
                        taken.calls.append(delta if len(taken.calls) < most else replace(delta, error=refused))
                    case Notice(code):
                        # what a model cannot do is said in a conversation's first answer
                        if self.conversation.history:
                            self.ports.recall.notices.add(code)
                        await self._notice(code, _NOTICES[code])
                    case Finish():
                        taken.finish = delta
                if pump.refused:
                    await pump.settle()
            await pump.settle()
            return pump.rest()
        except ModelError:
            # what was said before it failed was said
            await pump.settle()
            await self.ports.writer.append_all(pump.rest())
            raise
        finally:
            # of what breaks off nothing more is written
            pump.rest()
            await stream.aclose()  # type: ignore[attr-defined]

    def _speaking(self) -> None:
        """Measures when a client sees the first sign of an answer; of one taken over it was seen before."""
        if self.ports.spoken:
            return
        self.ports.spoken = True
        if self.ports.attempt > 1:
            return
        seconds = max(0.0, age_ms(self.ports.caller.query_id) / 1000)
        told = self.ports.context.facts.setdefault("first_words", {"count": 0, "seconds": 0.0})
        told["count"] += 1
        told["seconds"] += seconds
        if (meter := metrics.meter()) is not None:
            meter.first_token(seconds)

    # ── tools ────────────────────────────────────────────────────────────────────────────────────────────────

    async def tools(self, step: int, calls: Sequence[tuple[int, ToolCall]]) -> list[ToolCallRecord]:
        known = self.ports.recall
        numbered = [
            (f"{self.ports.response_id}:{self.scope}{step}:{position}", self._completed(call))
            for position, call in calls
        ]
        new = {call_id: new_token() for call_id, _ in numbered if call_id not in known.requested}
        await self.ports.writer.append_all(
            [
                (
                    EntryType.TOOL_REQUEST,
                    {"call_id": call_id, "tool": call.name, "args": call.args, "step": step, **self.labels},
                )
                for call_id, call in numbered
                if call_id in new
            ],
            list(new.values()),
        )
        tokens = {**known.requested, **new}
        return await in_order([partial(self._tool, call_id, call, tokens[call_id]) for call_id, call in numbered])

    def _completed(self, call: ToolCall) -> ToolCall:
        given = self.arguments.get(canonical_tool(call.name, call.args))
        return replace(call, args={**given, **call.args}) if given else call

    async def _tool(self, call_id: str, call: ToolCall, token: str) -> ToolCallRecord:
        recorded = self.ports.recall.results.get(call_id)
        if recorded is not None:
            return recorded
        if self.allowed is not None and canonical_tool(call.name, call.args) not in self.allowed:
            error = f"unknown tool: '{call.name}'"
            record = ToolCallRecord(tool=call.name, args=call.args, result=f"[{error}]", error=error, call_id=call_id)
        else:
            outcome = await self._asked(call_id, call, token)
            record = ToolCallRecord(
                tool=outcome.tool,
                args=call.args,
                result=outcome.result,
                error=outcome.error,
                call_id=call_id,
                duration_ms=outcome.duration_ms,
                data=outcome.data,
            )
        await self.ports.writer.append(EntryType.TOOL_RESULT, {**record.model_dump(mode="json"), **self.labels})
        return record

    async def _asked(self, call_id: str, call: ToolCall, token: str) -> ToolResultMessage:
        """Return the tool's result."""
        tools, settings = self.ports.tools, self.ports.context.settings
        again = call_id in self.ports.recall.requested
        try:
            if again:
                await tools.back(call.name, call.args, settings.tool_timeout)
            return await tools.call(
                call.name,
                call.args,
                call_id=call_id,
                caller=self.ports.caller,
                timeout=await tools.patience(call.name, call.args, settings.tool_limit, settings.tool_timeout),
                grace=_GRACE,
                # who writes the journal's entry is the first to ask
                attempt=2 if again else 1,
                token=token,
            )
        except (TooMuchUnderWay, BusNearlyFull) as exc:
            # The question goes on: a model can do without a call whose arguments are too large for now.
            tool = canonical_tool(call.name, call.args)
            return refused(tool, call_id, self.ports.caller, f"[tool error: {exc}]", str(exc))


async def offered(
    tools: ToolClient, allowed: frozenset[str] | None = None, functions: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Return the schemas of the tools for a model; see `JournalSteps` for the arguments."""
    live = await tools.schemas()
    theirs = {function["function"]["name"] for function in functions}
    ours = [
        schema for name, schema in sorted(live.items()) if (allowed is None or name in allowed) and name not in theirs
    ]
    return [*ours, *functions]


async def planned_with(settings: GeneratorSettings, model: ChatModel, name: str) -> ModelFacts:
    """Return the model's facts for planning a prompt. The demonstration model shortens its prompt by itself."""
    return ModelFacts() if settings.demo else await model.facts(name)


def _advice(facts: ModelFacts, wanted: int) -> str:
    """What to do about a question that does not fit."""
    if facts.context(wanted) < wanted:
        return "ask for less at once, start the model server with a larger context, or take a model that has one"
    return "ask for less at once or raise num_ctx"


def _taken_of_window(sent: int, fitted: Fitted, finish: Finish) -> int:
    """Tokens of a prompt of `sent` characters and its answer: as the server counted them, or as estimated where it did
    not, or counted only what was not in its cache."""
    counted = finish.prompt_tokens or 0
    return (counted if sent <= MOST_RATIO * counted else fitted.tokens) + (finish.completion_tokens or 0)


_UNFINISHED = Finish("stop", None, None, "")


@dataclass(slots=True)
class _Taken:
    """What one model call has given so far."""

    text: list[str] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    finish: Finish = _UNFINISHED

    @property
    def shown(self) -> bool:
        return bool(self.text or self.thinking)


def stepped(ports: Ports, action: str) -> tuple[Transition, list[Outgoing]]:
    """Takes a step of the state machine. It, and the message that shows it: none while a journal is being replayed."""
    step = ports.machine.step(action)
    ports.shown += 1
    if ports.shown <= ports.recall.states:
        return step, []
    return step, [told(ports.context, ports.caller, step)]


def told(context: Context[GeneratorSettings], caller: Caller, step: Transition) -> Outgoing:
    """The message that shows a step."""
    transition = AgentTransition(
        agent=context.settings.name,
        replica=context.replica,
        query_id=caller.query_id,
        from_state=step.before,
        action=step.action,
        to=step.after,
    )
    return AGENT_TRANSITION.of(transition, **caller.headers())


def shown(step: Transition) -> tuple[EntryType, dict[str, Any]]:
    """A step as its journal has it."""
    return EntryType.STATE, {"from": step.before, "action": step.action, "to": step.after}


async def show_transition(ports: Ports, action: str) -> None:
    """A step of the state machine, in the journal and on the bus; silent while a journal is being replayed."""
    step, messages = stepped(ports, action)
    if messages:
        await ports.writer.append(*shown(step), messages=messages)
