"""The model port: what the agent loop and the judges see of a model backend.

An adapter turns a backend's stream into deltas and its failures into the errors below:

    ModelError
    ├── ModelMissing        the backend does not have this model         → failed, with the command that gets it
    ├── ModelRejected       the request itself is wrong (HTTP 400)       → failed
    │   ├── AccessRefused   the key is not accepted (401, 403)           → failed
    │   └── NotOffered      the server lacks this ability (404, 405, 501) → failed
    ├── ContextOverflow     the prompt does not fit the context          → half of the history, until it fits
    ├── ModelOverloaded     busy (429, 503)                              → back-off inside the deadline
    ├── ModelUnavailable    no connection                                → back-off inside the deadline
    ├── AnswerTooLong       larger than an answer may be                → failed
    ├── EmptyAnswer         neither text nor calls, in two attempts      → again without tools, else failed
    └── StreamInterrupted   the stream ended before its last chunk       → the step is started again
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from shared.errors import ModelError
from shared.llm.discovery import ModelFacts

__all__ = [
    "AccessRefused", "AnswerTooLong", "ChatModel", "ChatRequest", "ContextOverflow", "Delta", "EmbeddingModel",
    "EmptyAnswer", "Finish", "ModelError", "ModelFacts", "ModelMissing", "ModelOverloaded", "ModelRejected",
    "ModelUnavailable", "NotOffered", "Notice", "StreamInterrupted", "TextDelta", "ThinkingDelta", "ToolCall",
]  # fmt: skip


class ModelMissing(ModelError):
    """The backend does not have the model; the text says how to get it."""


class ModelRejected(ModelError):
    """The backend refuses the request, and would refuse it again."""


class AccessRefused(ModelRejected):
    """The backend requires another key, or refuses this host name."""


class NotOffered(ModelRejected):
    """The server has nothing at this address: a wrong address, or an ability that it was started without."""


class ContextOverflow(ModelError):
    """The prompt is longer than the model's context. `window`, `prompt`: the length of both in tokens, as far as the
    backend says."""

    def __init__(self, text: str, window: int | None = None, prompt: int | None = None) -> None:
        super().__init__(text)
        self.window = window
        self.prompt = prompt


class ModelOverloaded(ModelError):
    """The backend is busy; try again after a pause."""


class ModelUnavailable(ModelError):
    """The backend cannot be reached."""


class AnswerTooLong(ModelError):
    """An answer, or a line of it, is larger than the limit; another attempt would not help."""


class EmptyAnswer(ModelError):
    """The answer has neither text nor calls."""


class StreamInterrupted(ModelError):
    """The stream ended before its last chunk; its text is void."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the model. id: the backend's, or a new one if the backend gives none.

    error: why it cannot be run: its arguments are unusable, and are left out.
    signature: Gemini's signature of the thoughts before the call, as base64. The server requires it with the call.
    """

    id: str
    name: str
    args: dict[str, Any]
    error: str | None = None
    signature: str | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One model call.

    messages: `{"role", "content", "thinking"?, "reasoning_details"?, "tool_calls"? [{"id", "name", "args",
        "signature"?}], "tool_name"?, "tool_call_id"?, "images"? [{"type" (such as image/png), "data" (bytes)}]}`; the
        adapter writes them in its backend's form. Only messages of the current turn have `thinking`,
        `reasoning_details` and `signature`: servers require them with the results of the turn's tool calls.
    tools: schemas in the OpenAI form `{type: "function", function: {name, description, parameters}}`.
    num_ctx: context length in tokens, always sent where the backend takes it.
    max_tokens: the most tokens of the answer, thinking included; None: the backend's default.
    first_token_timeout: longest wait for the first token in seconds, while the server loads the model and reads the
        prompt; each sign of life of the server restarts it.
    idle_timeout: longest wait from one token to the next in seconds; signs of life do not extend it.
    patience: seconds for which a background call may still be deferred (see `shared.llm.preemption`); None: as its
        settings say.
    """

    model: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    think: bool = True
    num_ctx: int = 32_000
    options: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    first_token_timeout: float = 600.0
    idle_timeout: float = 120.0
    response_schema: Mapping[str, Any] | None = None
    patience: float | None = None

    @property
    def length(self) -> int | None:
        """The most tokens of the answer: the options' number, but never more than `max_tokens`."""
        wished = self.options.get("num_predict", self.options.get("max_tokens"))
        if not isinstance(wished, int) or wished <= 0:
            return self.max_tokens
        return wished if self.max_tokens is None else min(wished, self.max_tokens)


# Not frozen: one is made for every token, and a frozen one takes three times as long to make.
@dataclass(slots=True)
class ThinkingDelta:
    text: str


@dataclass(slots=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class Notice:
    """The adapter left out an ability that the caller asked for."""

    code: Literal["tools_unsupported", "thinking_unsupported"]


@dataclass(frozen=True, slots=True)
class Finish:
    """The last delta of every complete stream. Token counts are the backend's; None if it gives none.

    reason: `loop` when the model repeated itself without end and was stopped; the text ends with the repetitions.
    reasoning_details: the thoughts in the server's own form. The server requires them with the message (OpenRouter's
        `reasoning_details`, Gemini's signature of a text).
    """

    reason: Literal["stop", "length", "loop"]
    prompt_tokens: int | None
    completion_tokens: int | None
    model: str
    reasoning_details: tuple[Mapping[str, Any], ...] = ()


Delta = ThinkingDelta | TextDelta | ToolCall | Notice | Finish


class ChatModel(Protocol):
    """A model backend. Closing the iterator early closes the connection, which stops the GPU."""

    def stream(self, request: ChatRequest) -> AsyncIterator[Delta]:
        """Yield deltas as they arrive; the last one is the only Finish. Raises ModelError."""
        ...

    async def facts(self, model: str) -> ModelFacts:
        """Return the model's facts, which are read from the backend from time to time. Never fails."""
        ...

    async def reachable(self, model: str) -> str | None:
        """Return None if the backend answers and has the model, else a sentence that names the missing part."""
        ...

    async def aclose(self) -> None: ...


class EmbeddingModel(Protocol):
    """Texts to vectors of unit length."""

    async def embed(self, model: str, texts: Sequence[str]) -> list[list[float]]:
        """Return one vector for each text. Raises ModelError."""
        ...
