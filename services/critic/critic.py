"""Grades every answer and compares A with B; what it publishes, it publishes once."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

import orjson

from services.critic.grading import JudgePrompt, absolute_prompt
from services.critic.judge import Judge
from services.critic.jury import Comparison, Grade
from services.critic.machine import IDLE, TABLE
from services.critic.pairs import Half, Pairs
from services.critic.rubrics import DEFAULT, Rubric, rubric_for
from services.critic.settings import CriticSettings
from services.critic.turns import LeftOut, Turns
from shared.bus import order
from shared.bus.keys import grade_key, verdict_key
from shared.contracts import (
    AGENT_TRANSITION,
    CRITIQUE_RESULT,
    PAIRWISE_RESULT,
    AgentTransition,
    ChatTurnMessage,
    CritiqueResult,
    JudgeGrade,
    JudgeVerdict,
    Outgoing,
    PairwiseResult,
    ResponseGeneration,
)
from shared.envelope import Message
from shared.participant.machine import Machine
from shared.participant.sampling import one_in
from shared.participant.service import Context
from shared.records.erasing import erase
from shared.records.events import CritiqueShown, KnownEvent, PairwiseShown
from shared.records.sessions import Sessions
from shared.records.steps import tell_after
from shared.telemetry import metrics
from shared.telemetry.logging import get_logger

log = get_logger()
T = TypeVar("T")

# The judge needs the thread of the conversation, not all of it; in characters.
_CONTEXT_LIMIT = 6_000
# One message takes no more than this of it, nor less than would still say something.
_MESSAGE_LIMIT = 2_000
_LEAST_LEFT = 200
_FOUND_LIMIT = 8_000
_CUT = " […] "
# What was tried so often without an end does not wait beside others any more.
_TRIED = 2
_FOUND = "What the assistant was given or had found when it answered (context, not an answer):"


def gradeable(response: ResponseGeneration, *, skip_tool_answers: bool) -> bool:
    return bool(response.answer.strip()) and not (skip_tool_answers and response.tool_calls)


def found_by(response: ResponseGeneration) -> str:
    """What the answer could be drawn from: what stood before the question, and what the turn's tools found."""
    parts = [f"{call.tool}: {call.result}" for call in response.tool_calls if call.error is None]
    if response.material:
        # shown first, but not instead of what was found
        room = max(_FOUND_LIMIT - sum(len(part) + 2 for part in parts), _FOUND_LIMIT // 2)
        parts.insert(0, f"Given with the question: {response.material.strip()}"[:room])
    return "\n\n".join(parts)[:_FOUND_LIMIT]


_SPEAKERS = {"user": "User", "assistant": "Assistant"}


def instruction_of(query: str, before: Iterable[Mapping[str, str]]) -> str:
    """What the respondent was asked, with the newest of the messages that led to it; a long one is shortened."""
    said: list[str] = []
    room = _CONTEXT_LIMIT
    for message in reversed(list(before)):
        if message["role"] not in _SPEAKERS or not message["content"].strip():
            continue
        text = shortened(f"{_SPEAKERS[message['role']]}: {message['content']}", min(_MESSAGE_LIMIT, room))
        if not text:
            break
        room -= len(text)
        said.insert(0, text)
    if not said:
        return query
    return "The conversation so far:\n" + "\n".join(said) + f"\n\nThe user's message to answer now:\n{query}"


def shortened(text: str, most: int) -> str:
    """The text, or its beginning and its end where it is too long; nothing where there is no room for either."""
    if len(text) <= most:
        return text
    if most < _LEAST_LEFT:
        return ""
    end = (most - len(_CUT)) // 3
    return text[: most - len(_CUT) - end] + _CUT + text[-end:]


def with_found(instruction: str, *found: str) -> str:
    """The instruction with what the answers were drawn from: facts to judge by, not an answer to be like."""
    each = [part for part in dict.fromkeys(found) if part]
    if not each:
        return instruction
    shown = "\n\n".join(shortened(part, _FOUND_LIMIT // len(each)) for part in each)
    return f"{instruction}\n\n{_FOUND}\n{shown}"


def headers_of(message: Message[ResponseGeneration]) -> dict[str, Any]:
    """The envelope of what comes of an answer; an answer that another program wrote may have its payload alone."""
    response = message.payload
    return {
        **message.headers(),
        "correlation_id": response.query_id,
        "session_id": response.session_id,
        "user_id": response.user_id,
        "respondent_id": response.respondent_id,
    }


def _asked(message: Message[ResponseGeneration]) -> tuple[int, int]:
    """The id of the question on the bus as a value; the answer's, where another program has called it otherwise."""
    try:
        return order(message.payload.query_id)
    except ValueError:
        return order(message.entry_id)


def _size(response: ResponseGeneration) -> int:
    """How much an answer holds while it waits, in characters."""
    history = sum(len(said.content) for said in response.history or ())
    found = sum(len(call.result) for call in response.tool_calls)
    return sum(map(len, (response.query, response.answer, response.material or "", response.system))) + history + found


def _stored(kind: type[T], raw: bytes | None) -> T | None:
    """What was stored of a judgement; None when there is nothing, or nothing that can be read."""
    try:
        return None if raw is None else kind(**orjson.loads(raw))
    except (ValueError, TypeError):
        return None


class Critic:
    """turns: whose turn it is at the judge."""

    def __init__(
        self, context: Context[CriticSettings], judge: Judge, rubrics: dict[str, Rubric], turns: Turns
    ) -> None:
        self._context = context
        self._turns = turns
        self._bus = context.bus
        self._judge = judge
        self._rubrics = rubrics
        self._sessions = Sessions(context.bus)
        self.pairs = Pairs(context.bus, context.settings.retention)
        self.left_out: dict[LeftOut, int] = {"backlog": 0, "age": 0}

    async def grade(self, message: Message[ResponseGeneration]) -> Iterable[Outgoing]:
        """One answer, when it is its turn: its grade, then, when its counterpart is there, the comparison."""
        response, settings = message.payload, self._context.settings
        if not one_in(settings.judge_one_in, response.query_id):
            await self._skip(response)
        elif not gradeable(response, skip_tool_answers=settings.skip_tool_answers):
            await self.pairs.close(response.query_id)
            await self._skip(response)
        else:
            suspended = message.suspended if message.deliveries <= _TRIED else None
            turn = self._turns.turn(_asked(message), order(message.entry_id), _size(response), suspended)
            async with turn as left:
                if left is not None:
                    self._count(response, left)
                    await self.pairs.close(response.query_id)
                    await self._skip(response)
                elif await self._deleted(response):
                    await self._skip(response)
                else:
                    await self._judge_it(message)
                    await self._deleted(response)
        return ()

    async def _skip(self, response: ResponseGeneration) -> None:
        async with self._states(response) as step:
            await step("SKIP")

    def _count(self, response: ResponseGeneration, left: LeftOut) -> None:
        """An answer is left ungraded: a judge that is slower than the answers come would fill Redis, and a grade that
        comes hours late is of no use to anybody."""
        self.left_out[left] += 1
        if (meter := metrics.meter()) is not None:
            meter.left_ungraded(left)
        log.warning("critic.left_out", response_id=response.response_id, reason=left)

    async def _judge_it(self, message: Message[ResponseGeneration]) -> None:
        response = message.payload
        async with self._states(response) as step:
            await step("GRADE")
            instruction = await self._instruction(response)
            rubric = self._rubric(response)
            asked = with_found(instruction, found_by(response))
            grade = await self._graded(response, asked, rubric)
            if grade is None:
                await self.pairs.close(response.query_id)
                await step("RESET")
                return
            await step("PUBLISH")
            shown = None if response.material else absolute_prompt(asked, response.answer, rubric.text)
            await self._publish_grade(message, grade, shown)
            half = Half(
                response.response_id,
                response.answer,
                found_by(response),
                grade.score,
                response.config,
                instruction,
                rubric.name,
            )
            limit = self._context.settings.pairwise_buffer
            offer = await self.pairs.offer(response.query_id, response.respondent_id, half, limit)
            if offer.evicted:
                # without a second respondent every answer is given up in its time
                log.debug("critic.pairs_evicted", count=len(offer.evicted))
            if offer.pair is not None:
                await step("COMPARE")
                if await self._compare(message, *offer.pair):
                    await step("PUBLISH")
                await self.pairs.close(response.query_id)
            await step("RESET")

    async def abandon(self, message: Message[ResponseGeneration], reason: str) -> Iterable[Outgoing]:
        """An answer whose handling failed every time is published as not graded, so that nobody looks for its grade."""
        if not await self._deleted(message.payload):
            await self._publish_grade(message, Grade(None, f"not graded: {reason}", DEFAULT, 0))
            await self.pairs.close(message.payload.query_id)
        return ()

    async def _deleted(self, response: ResponseGeneration) -> bool:
        """Whether its question was taken back, or its session deleted: then nothing may come of the answer any more,
        and what has come of it is removed."""
        if not await self._sessions.deleted(response.session_id, response.query_id):
            return False
        await erase(self._bus, [response.query_id])
        return True

    # ── grading ──────────────────────────────────────────────────────────────────────────────────────────────

    def _rubric(self, response: ResponseGeneration) -> Rubric:
        tools = [call.tool for call in response.tool_calls if call.counts]
        return rubric_for(tools, self._context.settings.rubrics, self._rubrics)

    async def _instruction(self, response: ResponseGeneration) -> str:
        before: list[dict[str, str]]
        if response.history is not None:
            before = [{"role": said.role, "content": said.content} for said in response.history]
        else:
            turns = await self._sessions.turns(response.session_id, response.respondent_id, response.query_id)
            before = [said for turn in turns for said in turn.messages()]
        return instruction_of(response.query, before)

    async def _graded(self, response: ResponseGeneration, asked: str, rubric: Rubric) -> Grade | None:
        """The grade, asked for once: a takeover after a crash finds it stored. None when there is nothing to
        publish: it was deleted while the judge was reading, or the judge is missing, as was said before."""
        key = grade_key(response.response_id)
        if stored := _stored(Grade, await self._bus.link.call("GET", key)):
            return stored
        grade = await self._judge.grade(asked, response.answer, "", rubric)
        if grade is None or await self._deleted(response):
            return None
        await self._bus.link.call("SET", key, orjson.dumps(asdict(grade)), "EX", self._context.settings.retention)
        if (meter := metrics.meter()) is not None:
            meter.grade(grade.score)
        log.info("critic.graded", score=grade.score, rubric=grade.rubric, attempts=grade.attempts)
        return grade

    async def _publish_grade(
        self, message: Message[ResponseGeneration], grade: Grade, prompt: JudgePrompt | None = None
    ) -> None:
        """`prompt`: what the judge read."""
        response = message.payload
        critique = CritiqueResult(
            query_id=response.query_id,
            response_id=response.response_id,
            session_id=response.session_id,
            respondent_id=response.respondent_id,
            score=grade.score,
            feedback=grade.feedback,
            rubric=grade.rubric,
            query=response.query,
            answer=response.answer,
            prompt=None if prompt is None else [ChatTurnMessage.model_validate(said) for said in prompt],
            judges=[JudgeGrade(**said) for said in grade.judges],
        )
        headers = headers_of(message)
        (entry_id,) = await self._bus.publish(CRITIQUE_RESULT.of(critique, once=response.response_id, **headers))
        judges = {"judges": critique.judges} if critique.judges else {}
        shown = CritiqueShown(score=grade.score, feedback=grade.feedback, rubric=grade.rubric, **judges)
        await self._tell(response, response.response_id, shown, entry_id)

    # ── comparing ────────────────────────────────────────────────────────────────────────────────────────────

    async def _compare(self, message: Message[ResponseGeneration], a: Half, b: Half) -> bool:
        response = message.payload
        found = await self._compared(response, a, b)
        if found is None:
            return False
        result = PairwiseResult(
            original_query_id=response.query_id,
            query_id_a=a.response_id,
            query_id_b=b.response_id,
            winner=found.winner,
            score_a=a.score,
            score_b=b.score,
            reason=found.reason,
            config_a=a.config,
            config_b=b.config,
            session_id=response.session_id,
            forward=found.forward,
            swapped=found.swapped,
            judges=[JudgeVerdict(**said) for said in found.judges],
        )
        headers = {**headers_of(message), "respondent_id": "A"}
        (entry_id,) = await self._bus.publish(PAIRWISE_RESULT.of(result, once=response.query_id, **headers))
        log.info("critic.compared", winner=found.winner, forward=found.forward, swapped=found.swapped)
        judges = {"judges": result.judges} if result.judges else {}
        shown = PairwiseShown(winner=found.winner, reason=found.reason, score_a=a.score, score_b=b.score, **judges)
        for half in (a, b):
            await self._tell(response, half.response_id, shown, entry_id)
        return True

    async def _compared(self, response: ResponseGeneration, a: Half, b: Half) -> Comparison | None:
        """The verdict, asked for once: what both journals and the bus say of a pair is the same after a crash. The
        conversation is A's, which is what its user saw, whichever answer came second."""
        key = verdict_key(response.query_id)
        if stored := _stored(Comparison, await self._bus.link.call("GET", key)):
            return stored
        asked = with_found(a.instruction, a.reference, b.reference)
        rubric = self._rubrics.get(a.rubric) or self._rubric(response)
        found = await self._judge.compare(asked, a.answer, b.answer, "", rubric)
        if await self._deleted(response):
            return None
        if (meter := metrics.meter()) is not None:
            meter.verdict(found.winner if found else None, split=bool(found and found.forward != found.swapped))
        if found is not None:
            kept = orjson.dumps(asdict(found))
            await self._bus.link.call("SET", key, kept, "EX", self._context.settings.retention)
        return found

    async def _tell(self, response: ResponseGeneration, name: str, event: KnownEvent, message_id: str) -> None:
        once = event.type.value
        await tell_after(self._bus, response.session_id, name, event, message_id=message_id, once=once)

    # ── states ───────────────────────────────────────────────────────────────────────────────────────────────

    @contextlib.asynccontextmanager
    async def _states(self, response: ResponseGeneration) -> AsyncIterator[Any]:
        machine = Machine(TABLE, IDLE)

        async def step(action: str) -> None:
            made = machine.step(action)
            shown = AgentTransition(
                agent="critic",
                replica=self._context.replica,
                query_id=response.query_id,
                from_state=made.before,
                action=made.action,
                to=made.after,
            )
            headers = {
                "correlation_id": response.query_id,
                "session_id": response.session_id,
                "respondent_id": response.respondent_id,
            }
            await self._bus.publish(AGENT_TRANSITION.of(shown, **headers))

        await step("RECEIVE")
        try:
            yield step
        except BaseException:
            # whatever ended it, cancelling too; that it cannot be told (the bus is away) must not hide why
            with contextlib.suppress(Exception):
                await step("FAIL")
                await step("RESET")
            raise
