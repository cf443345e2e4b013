"""The span (OpenTelemetry's `invoke_agent`) and the counters of a response."""

from __future__ import annotations

from typing import Any, Self

from services.generator.ending import Cancelled, Ending, Failure, Finished
from services.generator.settings import GeneratorSettings
from shared.contracts import QueryReceived
from shared.envelope import Message, age_ms
from shared.llm.factory import PROVIDERS
from shared.telemetry import metrics, tracing
from shared.telemetry.spans import NOTHING, Span


class Watch:
    """A block for one response: its span is the parent of the spans of model and tool calls."""

    def __init__(self, span: Span, query_id: str) -> None:
        self._span = span
        self._query_id = query_id

    def __enter__(self) -> Self:
        self._span.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._span.__exit__(*exc)

    def ended(self, ending: Ending) -> None:
        match ending:
            case Finished(answer):
                self._span.set(
                    {
                        "gen_ai.response.model": answer.model,
                        "gen_ai.response.finish_reasons": [answer.finish_reason],
                        "gen_ai.usage.input_tokens": answer.usage.prompt_tokens,
                        "gen_ai.usage.output_tokens": answer.usage.completion_tokens,
                        "local2.tool_calls": len(answer.tool_calls),
                    }
                )
                self._count("completed")
            case Failure(code):
                self._span.fail(code)
                self._count("failed")
            case Cancelled():
                self._span.set({"local2.stopped": "cancelled"})
                self._count("cancelled")

    def _count(self, outcome: str) -> None:
        if (meter := metrics.meter()) is not None:
            meter.query(outcome, age_ms(self._query_id) / 1000)


def watched_answer(settings: GeneratorSettings, message: Message[QueryReceived]) -> Watch:
    return Watch(_span(settings, message) if tracing.active() else NOTHING, message.entry_id)


def _span(settings: GeneratorSettings, message: Message[QueryReceived]) -> Span:
    query = message.payload
    return tracing.span(
        f"invoke_agent {settings.name}",
        attributes={
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": PROVIDERS[settings.backend],
            "gen_ai.agent.name": settings.name,
            "gen_ai.conversation.id": query.session_id,
            "gen_ai.request.model": query.model or settings.model,
            "local2.query.id": message.entry_id,
            "local2.respondent.id": settings.respondent_id,
            "local2.mode": query.mode,
            "local2.message.deliveries": message.deliveries,
        },
    )
