"""The inner committee: personas deliberate in turn, then The Self answers with their deliberations in its prompt."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.resources import files
from typing import Any

from services.generator.identities import Identities
from services.generator.loop import Answer, Message, Steps, in_order, run_agent
from shared.contracts import Deliberation, PersonaToolTrace, persona_key

PERSONA_TOOLS = frozenset({"search_memory", "search_knowledge_graph"})
# Default arguments of the members' searches: a few reranked memories help more than many.
PERSONA_ARGUMENTS: dict[str, dict[str, Any]] = {"search_memory": {"do_rerank": True}}
_PREVIEW = 200


@cache
def _prompt(name: str) -> str:
    return files("services.generator").joinpath(f"prompts/{name}.md").read_text(encoding="utf-8").strip()


def persona_prompt(
    identity: str, date_line: str, deliberations: Sequence[Deliberation], context: str | None = None
) -> str:
    """Return the system prompt of a member. context: memories for a model that cannot call tools."""
    parts = [identity, _prompt("persona"), _prompt("relations"), date_line, *_retrieved(context)]
    if deliberations:
        parts.append(f"=== PREVIOUS DELIBERATIONS ===\n{transcript(deliberations)}")
    return "\n\n".join(parts)


def self_prompt(base: str, identity: str, deliberations: Sequence[Deliberation], context: str | None = None) -> str:
    """Return the system prompt of The Self. base: the system prompt of every answer."""
    deliberation = f"=== INNER COMMITTEE DELIBERATION ===\n{transcript(deliberations)}"
    return "\n\n".join([base, identity, _prompt("relations"), *_retrieved(context), deliberation])


def _retrieved(context: str | None) -> list[str]:
    return [f"=== RETRIEVED CONTEXT ===\n{context}"] if context else []


def transcript(deliberations: Sequence[Deliberation]) -> str:
    return "\n".join(f"[{one.persona}, round {one.round}]: {one.response}" for one in deliberations)


@dataclass(frozen=True, slots=True)
class Seat:
    """A member in a round. again: the member repeats the round with memories in its prompt."""

    persona: str
    round: int
    again: bool = False

    @property
    def scope(self) -> str:
        return f"{persona_key(self.persona)}.{self.round}{'.again' if self.again else ''}:"


@dataclass(frozen=True, slots=True)
class Session:
    """The plan of a deliberation.

    personas: in their order. parallel: the members of a round speak at the same time. persona_iterations,
    self_iterations: rounds of tool calls of a member, and of The Self. date_line: in every member's prompt.
    """

    personas: Sequence[str]
    rounds: int = 1
    parallel: bool = False
    persona_iterations: int = 3
    self_iterations: int = 5
    date_line: str = ""


# Opens the steps of a member (a seat), or of The Self (None), under a system prompt.
OpenSteps = Callable[[Seat | None, str], Steps]
Progress = Callable[[str, Seat, dict[str, Any]], Awaitable[None]]
# Returns memories for a question if the model cannot call tools; None if it can, or without a memory.
Retrieve = Callable[[], Awaitable[str | None]]


async def deliberate(
    session: Session,
    identities: Identities,
    base_prompt: str,
    question: Message,
    open_steps: OpenSteps,
    progress: Progress,
    retrieve: Retrieve,
) -> tuple[Answer, list[Deliberation]]:
    """Return the answer of The Self, and the deliberations before it.

    Members speak in their order, round after round. Each prompt has the deliberations so far; in parallel, those of
    the rounds before.
    """
    deliberations: list[Deliberation] = []
    context: str | None = None

    async def speak(seat: Seat) -> Answer:
        prompt = persona_prompt(identities.personas[seat.persona], session.date_line, deliberations, context)
        return await run_agent(open_steps(seat, prompt), question, session.persona_iterations)

    for seats in _turns(session):
        for seat in seats:
            await progress("working", seat, {})
        answers = await in_order([partial(speak, seat) for seat in seats])
        if context is None and (context := await retrieve()) is not None:
            # The model cannot call tools: the members speak again, with memories in their prompts.
            answers = await in_order([partial(speak, replace(seat, again=True)) for seat in seats])
        deliberations += [_deliberation(seat, answer) for seat, answer in zip(seats, answers, strict=True)]
        for seat, answer in zip(seats, answers, strict=True):
            await progress("done", seat, {"response": answer.text})
    steps = open_steps(None, self_prompt(base_prompt, identities.self_identity, deliberations, context))
    return await run_agent(steps, question, session.self_iterations), deliberations


def _turns(session: Session) -> list[list[Seat]]:
    """Return the seats in their order; the seats of one list speak at the same time."""
    rounds = [[Seat(persona, number) for persona in session.personas] for number in range(1, session.rounds + 1)]
    return rounds if session.parallel else [[seat] for seats in rounds for seat in seats]


def _deliberation(seat: Seat, answer: Answer) -> Deliberation:
    trace = [
        PersonaToolTrace(tool=record.tool, args=record.args, result_preview=record.result[:_PREVIEW])
        for record in answer.tool_calls
    ]
    return Deliberation(
        persona=seat.persona, round=seat.round, response=answer.text, thinking=answer.thinking, tool_trace=trace
    )
