"""pydantic-ai: agents with tools and typed results, by responses (its default) and chat completions."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import BaseModel
from trying import raised, tried

# docs: begin
from pydantic_ai import Agent  # isort: skip

agent = Agent("openai:local2")
print(agent.run_sync("hello").output)
# docs: end

from pydantic_ai import NativeOutput  # noqa: E402
from pydantic_ai.exceptions import ModelHTTPError  # noqa: E402
from pydantic_ai.messages import ThinkingPart  # noqa: E402
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel  # noqa: E402
from pydantic_ai.providers.openai import OpenAIProvider  # noqa: E402


class Place(BaseModel):
    city: str
    country: str


PARIS = Place(city="Paris", country="France")


async def streamed(agent: Agent[Any, Any], said: str) -> str:
    async with agent.run_stream(said) as result:
        return [text async for text in result.stream_text()][-1]


async def left(agent: Agent[Any, Any]) -> bool:
    async with agent.run_stream("slowly") as result:
        async for _ in result.stream_text(debounce_by=None):
            return True
    return False


def thoughts(agent: Agent[Any, Any]) -> str:
    parts = [part for message in agent.run_sync("hello").all_messages() for part in message.parts]
    return "".join(part.content for part in parts if isinstance(part, ThinkingPart))


for model, way in ((OpenAIChatModel("local2"), ""), (OpenAIResponsesModel("local2"), "responses")):

    def feature(name: str, responses: str = way) -> tuple[str, str]:
        """Where it stands in the table, and which way it was."""
        return ("Responses", name) if responses else (name, "")

    plain, weather = Agent(model), Agent(model)

    @weather.tool_plain
    def get_weather(city: str) -> str:
        """The weather."""
        return "sunny" if city == "Paris" else "unknown"

    name, how = feature("chat")
    tried(name, lambda agent=plain: agent.run_sync("hello").output, "Hello there.".__eq__, how)
    name, how = feature("stream")
    tried(name, lambda agent=plain: asyncio.run(streamed(agent, "hello")), "Hello there.".__eq__, how)
    name, how = feature("tools")
    tried(name, lambda agent=weather: agent.run_sync("the weather?").output, "It is sunny there.".__eq__, how)
    typed, native = Agent(model, output_type=Place), Agent(model, output_type=NativeOutput(Place))
    name, how = feature("structured")
    tried(name, lambda agent=typed: agent.run_sync("where?").output, PARIS.__eq__, f"{how} by a tool".strip())
    tried(name, lambda agent=native: agent.run_sync("where?").output, PARIS.__eq__, f"{how} by a schema".strip())
    tried("usage", lambda agent=plain: agent.run_sync("hello").usage().total_tokens, lambda count: count > 0, way)
    tried("reasoning", lambda agent=plain: thoughts(agent), "Hm.".__eq__, way)
    tried("abort", lambda agent=plain: asyncio.run(left(agent)), way=way)
    failing = raised(Exception, lambda agent=plain: asyncio.run(streamed(agent, "break")))
    tried("mid-stream error", failing, way=way)

wrong = Agent(OpenAIChatModel("local2", provider=OpenAIProvider(api_key="wrong")))
tried("wrong key", raised(ModelHTTPError, lambda: wrong.run_sync("hello")))
