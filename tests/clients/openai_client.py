"""The `openai` package: the reference of all others."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel
from trying import left, raised, tried

# docs: begin
import openai  # isort: skip

client = openai.OpenAI()
answer = client.chat.completions.create(model="local2", messages=[{"role": "user", "content": "hello"}])
print(answer.choices[0].message.content)
# docs: end

hello: Any = [{"role": "user", "content": "hello"}]
where: Any = [{"role": "user", "content": "where?"}]
slowly: Any = [{"role": "user", "content": "slowly"}]
broken: Any = [{"role": "user", "content": "break"}]
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


PARIS = Place(city="Paris", country="France")


def chat(messages: Any = hello, **fields: Any) -> Any:
    return client.chat.completions.create(model="local2", messages=messages, **fields)


def streamed(**fields: Any) -> list[Any]:
    return list(chat(stream=True, **fields))


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def reasoning(message: Any) -> str:
    return str((message.model_extra or {}).get("reasoning_content"))


def tool_round() -> str | None:
    messages: Any = [{"role": "user", "content": "the weather?"}]
    first = chat(messages, tools=[TOOL]).choices[0]
    assert first.finish_reason == "tool_calls", first
    call = first.message.tool_calls[0]
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    content: str | None = chat(messages, tools=[TOOL]).choices[0].message.content
    return content


def responses_tool_round() -> str:
    tool: Any = {"type": "function", "strict": False, **TOOL["function"]}
    first = client.responses.create(model="local2", input="the weather?", tools=[tool])
    (call,) = [item for item in first.output if item.type == "function_call"]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    last = client.responses.create(model="local2", input=[result], previous_response_id=first.id, tools=[tool])
    return last.output_text


def responses_stream() -> Any:
    with client.responses.stream(model="local2", input="hello") as stream:
        stream.until_done()
        return stream.get_final_response()


def stopped() -> bool:
    with chat(slowly, stream=True) as stream:
        return any(chunk.choices and chunk.choices[0].delta.content for chunk in stream)


def thoughts(response: Any) -> str:
    return "".join(part.text for item in response.output if item.type == "reasoning" for part in item.summary)


tried("chat", lambda: chat().choices[0].message.content, lambda text: text == "Hello there.")
tried("stream", lambda: text_of(streamed()), lambda text: text == "Hello there.")
tried("usage", lambda: chat().usage.total_tokens, lambda count: count > 0)
tried(
    "usage", lambda: streamed(stream_options={"include_usage": True})[-1].usage.total_tokens, lambda n: n > 0, "stream"
)
tried("reasoning", lambda: reasoning(chat().choices[0].message), lambda text: text == "Hm.")
tried("reasoning", lambda: thoughts(responses_stream()), lambda text: text == "Hm.", "responses")
tried("abort", stopped)
tried("abort", lambda: left(client.responses.create(model="local2", input="slowly", stream=True)), way="responses")
tried("wrong key", raised(openai.AuthenticationError, lambda: openai.OpenAI(api_key="wrong").models.list()))
tried("tools", tool_round, lambda text: text == "It is sunny there.")
tried(
    "structured",
    lambda: (
        client.chat.completions.parse(model="local2", messages=where, response_format=Place).choices[0].message.parsed
    ),
    lambda place: place == PARIS,
)
tried("Responses", lambda: client.responses.create(model="local2", input="hello").output_text, "Hello there.".__eq__)
tried("Responses", lambda: responses_stream().output_text, "Hello there.".__eq__, "stream")
tried("Responses", responses_tool_round, "It is sunny there.".__eq__, "tools")
tried(
    "Responses",
    lambda: client.responses.parse(model="local2", input="where?", text_format=Place).output_parsed,
    lambda place: place == PARIS,
    "structured",
)
tried("mid-stream error", raised(openai.APIError, lambda: list(chat(broken, stream=True))))
tried("models", lambda: [model.id for model in client.models.list()], lambda names: "local2" in names)
tried("unknown model", raised(openai.NotFoundError, lambda: client.models.retrieve("none")))
tried(
    "unknown model",
    raised(openai.NotFoundError, lambda: client.chat.completions.create(model="none", messages=hello)),
    way="chat",
)
