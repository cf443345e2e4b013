"""openai-agents: runs with tools, typed output and streaming, by responses (its default) and chat completions."""

from __future__ import annotations

import asyncio
from typing import Any

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled
from pydantic import BaseModel
from trying import tried

set_tracing_disabled(True)
# its connections belong to the loop that opened them, and `run_sync` takes the current one
loop = asyncio.new_event_loop()
asyncio.set_event_loop(loop)


class Place(BaseModel):
    city: str
    country: str


@function_tool
def get_weather(city: str) -> str:
    """The weather."""
    return "sunny"


async def streamed(agent: Agent[Any]) -> Any:
    result = Runner.run_streamed(agent, "the weather?")
    async for _ in result.stream_events():
        pass
    return result.final_output


for api in ("responses", "chat_completions"):
    set_default_openai_api(api)  # type: ignore[arg-type]
    plain, weather = Agent(name="a", model="local2"), Agent(name="b", model="local2", tools=[get_weather])
    typed = Agent(name="c", model="local2", output_type=Place)
    tried(api, lambda agent=plain: Runner.run_sync(agent, "hello").final_output, lambda text: text == "Hello there.")
    tried(
        f"{api}, tools",
        lambda agent=weather: Runner.run_sync(agent, "the weather?").final_output,
        lambda text: text == "It is sunny there.",
    )
    tried(
        f"{api}, streamed",
        lambda agent=weather: loop.run_until_complete(streamed(agent)),
        lambda t: t == "It is sunny there.",
    )
    tried(
        f"{api}, typed output",
        lambda agent=typed: Runner.run_sync(agent, "where?").final_output,
        lambda place: place == Place(city="Paris", country="France"),
    )
