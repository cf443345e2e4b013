"""The `openai` package: the reference of all others."""

from __future__ import annotations

import json
from typing import Any

import openai
from pydantic import BaseModel
from trying import raised, tried

client = openai.OpenAI()
hello: Any = [{"role": "user", "content": "hello"}]
where: Any = [{"role": "user", "content": "where?"}]
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


def chat(**fields: Any) -> Any:
    return client.chat.completions.create(model="local2", messages=hello, **fields)


def reasoning(message: Any) -> str:
    return str((message.model_extra or {}).get("reasoning_content"))


def tool_round() -> str | None:
    messages: Any = [{"role": "user", "content": "the weather?"}]
    first = client.chat.completions.create(model="local2", messages=messages, tools=[TOOL]).choices[0]
    assert first.finish_reason == "tool_calls", first
    call = first.message.tool_calls[0]  # type: ignore[index]
    assert json.loads(call.function.arguments) == {"city": "Paris"}  # type: ignore[union-attr]
    messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    last = client.chat.completions.create(model="local2", messages=messages, tools=[TOOL])
    return last.choices[0].message.content


def responses_stream() -> str:
    with client.responses.stream(model="local2", input="hello") as stream:
        stream.until_done()
        return stream.get_final_response().output_text


def stopped() -> bool:
    slow: Any = [{"role": "user", "content": "slowly"}]
    with client.chat.completions.create(model="local2", messages=slow, stream=True) as stream:
        return any(chunk.choices and chunk.choices[0].delta.content for chunk in stream)


def broken_stream() -> Any:
    said: Any = [{"role": "user", "content": "break"}]
    return list(client.chat.completions.create(model="local2", messages=said, stream=True))


tried("chat", lambda: chat().choices[0].message.content, lambda text: text == "Hello there.")
tried("usage", lambda: chat().usage.total_tokens, lambda count: count > 0)
tried("reasoning", lambda: reasoning(chat().choices[0].message), lambda text: text == "Hm.")
tried(
    "stream",
    lambda: "".join(c.choices[0].delta.content or "" for c in chat(stream=True) if c.choices),
    lambda text: text == "Hello there.",
)
tried("tools", tool_round, lambda text: text == "It is sunny there.")
tried(
    "structured",
    lambda: (
        client.chat.completions.parse(model="local2", messages=where, response_format=Place).choices[0].message.parsed
    ),
    lambda place: place == Place(city="Paris", country="France"),
)
tried(
    "responses",
    lambda: client.responses.create(model="local2", input="hello").output_text,
    lambda t: t == "Hello there.",
)
tried("responses, streamed", responses_stream, lambda text: text == "Hello there.")
tried(
    "responses, structured",
    lambda: client.responses.parse(model="local2", input="where?", text_format=Place).output_parsed,
    lambda place: place == Place(city="Paris", country="France"),
)
tried("models", lambda: [model.id for model in client.models.list()], lambda names: "local2" in names)
tried("wrong key", raised(openai.AuthenticationError, lambda: openai.OpenAI(api_key="wrong").models.list()))
tried("abort", stopped)
tried("error in a stream", raised(openai.APIError, broken_stream))
tried("refusal", raised(openai.NotFoundError, lambda: client.chat.completions.create(model="none", messages=hello)))
