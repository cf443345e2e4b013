"""The attempts of one model call: after a failure, a fallback returns the next attempt or none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from shared.llm.failures import ThinkingUnsupported, ToolsUnsupported
from shared.llm.port import ChatRequest, EmptyAnswer, ModelError, Notice

Ability = Literal["tools", "thinking"]
ABILITIES: tuple[Ability, ...] = ("tools", "thinking")

# Extra tokens for a model that thinks without a request to think: its thoughts count within the limit.
_ROOM_FOR_THOUGHTS = 4_096
# Names of the option that limits the length of an answer.
_LENGTH_OPTIONS = ("num_predict", "max_tokens", "max_completion_tokens")


class EndlessRepetition(ModelError):
    """The model repeated the same thoughts without end and was stopped."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One request to the model server.

    asked: the caller's request. lacks: abilities that the model does not have.
    after_empty: an earlier attempt gave an empty answer. after_loop: an earlier attempt repeated its thoughts.
    """

    asked: ChatRequest
    lacks: frozenset[Ability] = frozenset()
    after_empty: bool = False
    after_loop: bool = False

    @property
    def thinking_options(self) -> bool:
        """Whether the request may contain options about thinking."""
        return "thinking" not in self.lacks

    @property
    def request(self) -> ChatRequest:
        """The request without what the model lacks."""
        request = self.asked
        if self.after_loop:
            request = replace(request, think=False)
        if "tools" in self.lacks and request.tools:
            request = replace(request, tools=())
        if not self.thinking_options and not request.think and (length := request.length) is not None:
            # Larger models of Gemini and OpenAI may think all the same.
            options = {name: value for name, value in request.options.items() if name not in _LENGTH_OPTIONS}
            request = replace(request, options=options, max_tokens=length + _ROOM_FOR_THOUGHTS)
        return request

    @property
    def notices(self) -> tuple[Notice, ...]:
        """The abilities that the caller asked for and the model lacks."""
        tools = (Notice("tools_unsupported"),) if self.asked.tools and "tools" in self.lacks else ()
        thinking = (Notice("thinking_unsupported"),) if self.asked.think and "thinking" in self.lacks else ()
        return tools + thinking


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt gave no answer. shown: the caller has received text, thoughts or calls of this attempt."""

    error: ModelError
    shown: bool = False


Fallback = Callable[[Attempt, Failure], Attempt | None]


def without_tools(attempt: Attempt, failure: Failure) -> Attempt | None:
    """Return the attempt without tools if the model server refuses tools."""
    if not isinstance(failure.error, ToolsUnsupported) or failure.shown or not attempt.request.tools:
        return None
    return replace(attempt, lacks=attempt.lacks | {"tools"})


def without_thinking_options(attempt: Attempt, failure: Failure) -> Attempt | None:
    """Return the attempt without options about thinking if the model server refuses these options."""
    if not isinstance(failure.error, ThinkingUnsupported) or failure.shown or not attempt.thinking_options:
        return None
    return replace(attempt, lacks=attempt.lacks | {"thinking"})


def again_after_empty(attempt: Attempt, failure: Failure) -> Attempt | None:
    """Return the same request once more after the first empty answer."""
    if not isinstance(failure.error, EmptyAnswer) or attempt.after_empty:
        return None
    return replace(attempt, after_empty=True)


def without_thoughts(attempt: Attempt, failure: Failure) -> Attempt | None:
    """Return the attempt without thinking after the first endless repetition of thoughts."""
    if not isinstance(failure.error, EndlessRepetition) or not attempt.request.think:
        return None
    return replace(attempt, after_loop=True)


FALLBACKS: tuple[Fallback, ...] = (without_tools, without_thinking_options, again_after_empty, without_thoughts)


def next_attempt(attempt: Attempt, failure: Failure) -> Attempt | None:
    """Return the attempt after a failure; None if no fallback applies."""
    return next((found for fallback in FALLBACKS if (found := fallback(attempt, failure)) is not None), None)
