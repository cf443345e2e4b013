"""The finished steps of a response, read from its state, in the types of the agent loop. Pure."""

from __future__ import annotations

from services.generator.loop import Reply
from shared.contracts import ToolCallRecord
from shared.llm.port import ToolCall
from shared.records.events import ModelMessage
from shared.records.response_state import ResponseState


def recorded_reply(state: ResponseState, scope: str, step: int) -> Reply | None:
    """Return the reply of a step. scope: of a committee member; empty: the answer."""
    message = state.newest(ModelMessage, lambda one: (one.scope, one.step) == (scope, step))
    return reply_of(message) if message is not None else None


def recorded_result(state: ResponseState, call_id: str) -> ToolCallRecord | None:
    """Return the call with its result, if it has one."""
    answered = state.result(call_id)
    if answered is None:
        return None
    names = ToolCallRecord.model_fields
    return ToolCallRecord(**{name: value for name, value in answered if name in names})


def reply_of(message: ModelMessage) -> Reply:
    """Return the reply that a message records."""
    context = message.context
    return Reply(
        content=message.content,
        thinking=message.thinking,
        tool_calls=[ToolCall(call.id, call.name, call.args, call.error, call.signature) for call in message.tool_calls],
        finish_reason=message.finish_reason,
        model=message.model,
        prompt_tokens=message.prompt_tokens or 0,
        completion_tokens=message.completion_tokens or 0,
        context=(context.tokens, context.window) if context else (0, 0),
        ratio=(context.ratio or None) if context else None,
        reasoning_details=message.reasoning_details,
        image_tokens=(context.image_tokens or None) if context else None,
    )
