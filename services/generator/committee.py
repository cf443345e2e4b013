"""The inner committee: personas deliberate in turn, then The Self, who has heard them all, answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from services.generator.loop import Answer, Message, Steps, run_agent
from shared.contracts import Deliberation, PersonaToolTrace, Usage, persona_key
from shared.errors import ModelError, SettingsError

PERSONA_TOOLS = frozenset({"search_memory", "search_knowledge_graph"})
PERSONA_ITERATIONS = 3
_PREVIEW = 200


class UnknownPersona(ModelError):
    """A query names a committee member that there is not."""


@dataclass(frozen=True, slots=True)
class Identities:
    """Who may sit in the committee: name → system prompt; and The Self, who always comes last."""

    personas: dict[str, str]
    self_identity: str

    def named(self, names: Iterable[str]) -> list[str]:
        """The names as they are here, however they are written. Raises UnknownPersona."""
        known = {persona_key(name): name for name in self.personas}
        if unknown := sorted({name for name in names if persona_key(name) not in known}):
            raise UnknownPersona(f"unknown personas: {', '.join(unknown)}; there are {', '.join(self.personas)}")
        return [known[persona_key(name)] for name in names]


@cache
def load_identities(path: Path | None) -> Identities:
    """The shipped identities, or those of an operator's file of the same form. Raises SettingsError."""
    prompts = files("services.generator").joinpath("prompts")
    try:
        text = (
            prompts.joinpath("identities.yaml").read_text(encoding="utf-8")
            if path is None
            else path.read_text(encoding="utf-8")
        )
        content = yaml.safe_load(text)
        return Identities({str(k): str(v) for k, v in content["personas"].items()}, str(content["self"]))
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as exc:
        raise SettingsError(f"identities {path}: a mapping with `self` and `personas` is expected: {exc}") from exc


@cache
def _persona_rules() -> str:
    return files("services.generator").joinpath("prompts/persona.md").read_text(encoding="utf-8").strip()


def persona_prompt(identity: str, deliberations: Sequence[Deliberation], context: str | None = None) -> str:
    """What a member is told. `context`: memories looked up for a model that cannot call tools."""
    parts = [identity, _persona_rules()]
    if context:
        parts.append(f"=== RETRIEVED CONTEXT ===\n{context}")
    if deliberations:
        parts.append(f"=== PREVIOUS DELIBERATIONS ===\n{transcript(deliberations)}")
    return "\n\n".join(parts)


def self_prompt(base: str, identity: str, deliberations: Sequence[Deliberation]) -> str:
    return f"{base}\n\n{identity}\n\n=== INNER COMMITTEE DELIBERATION ===\n{transcript(deliberations)}"


def transcript(deliberations: Sequence[Deliberation]) -> str:
    return "\n".join(f"[{said.persona}, round {said.round}]: {said.response}" for said in deliberations)


@dataclass(frozen=True, slots=True)
class Seat:
    """One member's turn to speak."""

    persona: str
    round: int
    again: bool = False

    @property
    def scope(self) -> str:
        return f"{self.persona}.{self.round}{'.again' if self.again else ''}:"


# Opens the steps of a member (a seat), or of The Self (None), under a system prompt.
OpenSteps = Callable[[Seat | None, str], Steps]
Progress = Callable[[str, Seat, dict[str, Any]], Awaitable[None]]
# Memories for a question, for a model that cannot call tools; None when it can, or when there is no memory.
Retrieve = Callable[[], Awaitable[str | None]]


async def deliberate(
    personas: Sequence[str],
    rounds: int,
    identities: Identities,
    base_prompt: str,
    question: Message,
    max_tool_iterations: int,
    open_steps: OpenSteps,
    progress: Progress,
    retrieve: Retrieve,
) -> tuple[Answer, list[Deliberation]]:
    """Members speak in the order given, round after round, each hearing those before; The Self writes the answer."""
    said: list[Deliberation] = []
    spent: list[Usage] = []
    context: str | None = None
    for number in range(1, rounds + 1):
        for persona in personas:
            seat = Seat(persona, number)
            await progress("working", seat, {})
            identity = identities.personas[persona]
            answer = await run_agent(
                open_steps(seat, persona_prompt(identity, said, context)), question, PERSONA_ITERATIONS
            )
            if context is None and (context := await retrieve()) is not None:
                # the model has just turned out not to call tools: it speaks again, with what memory holds
                steps = open_steps(replace(seat, again=True), persona_prompt(identity, said, context))
                answer = await run_agent(steps, question, PERSONA_ITERATIONS)
            spent.append(answer.usage)
            said.append(_deliberation(seat, answer))
            await progress("done", seat, {"response": answer.text})
    steps = open_steps(None, self_prompt(base_prompt, identities.self_identity, said))
    final = await run_agent(steps, question, max_tool_iterations)
    spent.append(final.usage)
    final.usage = Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in spent),
        completion_tokens=sum(usage.completion_tokens for usage in spent),
    )
    return final, said


def _deliberation(seat: Seat, answer: Answer) -> Deliberation:
    trace = [
        PersonaToolTrace(tool=record.tool, args=record.args, result_preview=record.result[:_PREVIEW])
        for record in answer.tool_calls
    ]
    return Deliberation(
        persona=seat.persona, round=seat.round, response=answer.text, thinking=answer.thinking, tool_trace=trace
    )
