"""pydantic-ai: agents with tools and typed results, by chat completions and by responses (its default)."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from trying import tried


class Place(BaseModel):
    city: str
    country: str


PARIS = Place(city="Paris", country="France")

for kind, model in (("chat", OpenAIChatModel("local2")), ("responses", OpenAIResponsesModel("local2"))):
    plain, weather = Agent(model), Agent(model)

    @weather.tool_plain
    def get_weather(city: str) -> str:
        """The weather."""
        return "sunny" if city == "Paris" else "unknown"

    async def streamed(agent: Agent[Any, Any] = plain) -> Any:
        async with agent.run_stream("hello") as result:
            return [text async for text in result.stream_text()][-1]

    tried(kind, lambda agent=plain: agent.run_sync("hello").output, lambda text: text == "Hello there.")
    tried(f"{kind}, streamed", lambda run=streamed: asyncio.run(run()), lambda text: text == "Hello there.")
    tried(
        f"{kind}, tools",
        lambda agent=weather: agent.run_sync("the weather?").output,
        lambda t: t == "It is sunny there.",
    )
    typed, native = Agent(model, output_type=Place), Agent(model, output_type=NativeOutput(Place))
    tried(f"{kind}, typed result", lambda agent=typed: agent.run_sync("where?").output, lambda place: place == PARIS)
    tried(f"{kind}, native schema", lambda agent=native: agent.run_sync("where?").output, lambda place: place == PARIS)
