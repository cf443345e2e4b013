"""Model calls as spans (OpenTelemetry's GenAI names) and counters. Nothing of what is said is in either."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from shared.llm.port import (
    ChatRequest,
    Delta,
    EmbeddingModel,
    Finish,
    ModelError,
    ModelMissing,
    ModelOverloaded,
    ModelRejected,
    ModelUnavailable,
    Notice,
    StreamInterrupted,
)
from shared.telemetry import metrics, tracing
from shared.telemetry.outcome import Outcome
from shared.telemetry.spans import Kind, Value

# Options by the name of their attribute.
_OPTIONS = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "num_predict": "gen_ai.request.max_tokens",
    "seed": "gen_ai.request.seed",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
}


def observed(provider: str, request: ChatRequest, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
    """The same deltas, watched as they pass; as they are when neither traces nor metrics are on."""
    if metrics.meter() is None and not tracing.active():
        return deltas
    return _watched(provider, request, deltas)


@dataclass(slots=True)
class _Seen:
    first: float | None = None
    finish: Finish | None = None
    outcome: Outcome = "cancelled"
    ended: bool = False


async def _watched(
    provider: str, request: ChatRequest, deltas: AsyncGenerator[Delta, None]
) -> AsyncGenerator[Delta, None]:
    started, seen = time.perf_counter(), _Seen()
    # not the current span: a generator's context is that of whoever happens to ask for the next piece
    span = tracing.span(f"chat {request.model}", Kind.CLIENT, _asked(provider, request))
    try:
        async with aclosing(deltas):
            async for delta in deltas:
                if seen.first is None and not isinstance(delta, Finish | Notice):
                    seen.first = time.perf_counter() - started
                if isinstance(delta, Finish):
                    seen.finish = delta
                yield delta
        seen.outcome, seen.ended = "ok", True
    except ModelError as exc:
        seen.outcome, seen.ended = _outcome(exc), True
        span.fail(type(exc).__name__)
        raise
    finally:
        finish = seen.finish
        span.set(
            {
                "gen_ai.response.time_to_first_chunk": seen.first,
                "gen_ai.response.model": (finish.model or request.model) if finish else None,
                "gen_ai.response.finish_reasons": [finish.reason] if finish else None,
                "gen_ai.usage.input_tokens": finish.prompt_tokens if finish else None,
                "gen_ai.usage.output_tokens": finish.completion_tokens if finish else None,
                "local2.stopped": None if seen.ended else "cancelled",
            }
        )
        span.end()
        if (meter := metrics.meter()) is not None:
            used = (finish.prompt_tokens or 0, finish.completion_tokens or 0) if finish else (0, 0)
            seconds = time.perf_counter() - started
            meter.model_call(request.model, seen.outcome, seconds, seen.first, *used)


def _asked(provider: str, request: ChatRequest) -> dict[str, Value | None]:
    asked: dict[str, Value | None] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": provider,
        "gen_ai.request.model": request.model,
        "gen_ai.request.stream": True,
        "local2.request.messages": len(request.messages),
        "local2.request.tools": len(request.tools),
        "local2.request.num_ctx": request.num_ctx,
    }
    for option, name in _OPTIONS.items():
        if isinstance(value := request.options.get(option), int | float):
            asked[name] = value
    return asked


def _outcome(exc: ModelError) -> Outcome:
    match exc:
        case ModelMissing() | ModelRejected():
            return "refused"
        case ModelOverloaded() | ModelUnavailable():
            return "unavailable"
        case StreamInterrupted():
            return "interrupted"
        case _:
            return "error"


class ClosableEmbeddingModel(EmbeddingModel, Protocol):
    """An embedding model that owns its connections."""

    async def aclose(self) -> None: ...


class ObservedEmbeddings:
    """The same vectors, with a span and counters for each call."""

    def __init__(self, provider: str, model: ClosableEmbeddingModel) -> None:
        self._provider = provider
        self._model = model

    async def embed(self, model: str, texts: Sequence[str]) -> list[list[float]]:
        meter = metrics.meter()
        if meter is None and not tracing.active():
            return await self._model.embed(model, texts)
        started = time.perf_counter()
        outcome: Outcome = "cancelled"
        asked: dict[str, Value | None] = {
            "gen_ai.operation.name": "embeddings",
            "gen_ai.provider.name": self._provider,
            "gen_ai.request.model": model,
            "local2.request.texts": len(texts),
        }
        try:
            with tracing.span(f"embeddings {model}", Kind.CLIENT, asked):
                vectors = await self._model.embed(model, texts)
            outcome = "ok"
            return vectors
        except ModelError as exc:
            outcome = _outcome(exc)
            raise
        finally:
            if meter is not None:
                meter.model_call(model, outcome, time.perf_counter() - started, None, 0, 0)

    async def aclose(self) -> None:
        await self._model.aclose()
