"""smolagents: its model for OpenAI's API, and both kinds of agents on it."""

from __future__ import annotations

import json
import os
from typing import Any

import openai
from trying import left, not_offered, raised, tried

# docs: begin
from smolagents import CodeAgent, OpenAIModel  # isort: skip

model = OpenAIModel("local2")
agent = CodeAgent(tools=[], model=model, verbosity_level=0)
print(agent.run("hello, agent"))
# docs: end

from smolagents import ChatMessage, ToolCallingAgent, tool  # noqa: E402


@tool
def get_weather(city: str) -> str:
    """The weather.

    Args:
        city: Where.
    """
    return "sunny"


def said(text: str) -> list[Any]:
    return [ChatMessage(role="user", content=[{"type": "text", "text": text}])]  # type: ignore[arg-type]


def text_of(parts: Any) -> str:
    return "".join(part.content or "" for part in parts)


WHERE = {
    "type": "json_schema",
    "json_schema": {
        "name": "place",
        "schema": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "country": {"type": "string"}},
            "required": ["city", "country"],
        },
    },
}

tried("chat", lambda: model.generate(said("hello")).content, "Hello there.".__eq__, "model")
tried("chat", lambda: CodeAgent(tools=[], model=model, verbosity_level=0).run("hello, agent"), "Hello there.".__eq__)
tried("stream", lambda: text_of(model.generate_stream(said("hello"))), "Hello there.".__eq__)
tried("usage", lambda: model.generate(said("hello")).token_usage.output_tokens, lambda count: count > 0)
not_offered("reasoning", "an agent's own steps are what it shows")
tried("abort", lambda: left(part for part in model.generate_stream(said("slowly")) if part.content))
wrong = OpenAIModel("local2", api_base=os.environ["OPENAI_BASE_URL"], api_key="wrong")
tried("wrong key", raised(openai.AuthenticationError, lambda: wrong.generate(said("hello"))))
tried(
    "tools",
    lambda: ToolCallingAgent(tools=[get_weather], model=model, verbosity_level=0).run("the weather?"),
    "It is sunny there.".__eq__,
)
tried(
    "structured",
    lambda: json.loads(str(model.generate(said("where?"), response_format=WHERE).content)),
    {"city": "Paris", "country": "France"}.__eq__,
)
not_offered("Responses", "it speaks chat completions only")
tried("mid-stream error", raised(openai.APIError, lambda: list(model.generate_stream(said("break")))))
