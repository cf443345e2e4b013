"""litellm: completion by chat completions, and its `responses`."""

from __future__ import annotations

import json
from typing import Any

import openai
from pydantic import BaseModel
from trying import left, raised, tried

# docs: begin
import litellm  # isort: skip

answer = litellm.completion(model="openai/local2", messages=[{"role": "user", "content": "hello"}])
print(answer.choices[0].message.content)
# docs: end

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Place(BaseModel):
    city: str
    country: str


def chat(said: str | list[Any], **fields: Any) -> Any:
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
    return litellm.completion(model="openai/local2", messages=messages, **fields)


def responses(said: Any, **fields: Any) -> Any:
    return litellm.responses(model="openai/local2", input=said, **fields)


def tool_round() -> str:
    messages: list[Any] = [{"role": "user", "content": "the weather?"}]
    first = chat(messages, tools=[TOOL]).choices[0].message
    (call,) = first.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    messages += [first, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    return str(chat(messages, tools=[TOOL]).choices[0].message.content)


def text_of(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def response_text(response: Any) -> str:
    return "".join(part.text for item in response.output if item.type == "message" for part in item.content)


tried("chat", lambda: chat("hello").choices[0].message.content, "Hello there.".__eq__)
tried("stream", lambda: text_of(chat("hello", stream=True)), "Hello there.".__eq__)
tried("usage", lambda: chat("hello").usage.total_tokens, lambda count: count > 0)
tried("reasoning", lambda: chat("hello").choices[0].message.reasoning_content, "Hm.".__eq__)
tried("abort", lambda: left(chat("slowly", stream=True)))
tried("wrong key", raised(litellm.AuthenticationError, lambda: chat("hello", api_key="wrong")))
tried("tools", tool_round, "It is sunny there.".__eq__)
tried(
    "structured",
    lambda: json.loads(chat("where?", response_format=Place).choices[0].message.content),
    {"city": "Paris", "country": "France"}.__eq__,
)
tried("Responses", lambda: response_text(responses("hello")), "Hello there.".__eq__)
tried(
    "Responses",
    lambda: "".join(e.delta for e in responses("hello", stream=True) if e.type == "response.output_text.delta"),
    "Hello there.".__eq__,
    "stream",
)
tried("mid-stream error", raised(openai.APIError, lambda: list(chat("break", stream=True))))
