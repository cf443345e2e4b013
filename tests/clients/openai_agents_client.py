"""openai-agents: runs with tools, typed output and streaming, by responses (its default) and chat completions."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from pydantic import BaseModel
from trying import raised, tried

# docs: begin
from agents import Agent, Runner, set_tracing_disabled  # isort: skip

set_tracing_disabled(True)
agent = Agent(name="a", model="local2")
# docs: end

from agents import function_tool, set_default_openai_api  # noqa: E402
from agents.exceptions import AgentsException  # noqa: E402
from agents.models.openai_provider import OpenAIProvider  # noqa: E402
from agents.run import RunConfig  # noqa: E402

# its connections belong to the loop that opened them, and `run_sync` takes the current one
loop = asyncio.new_event_loop()
asyncio.set_event_loop(loop)


class Place(BaseModel):
    city: str
    country: str


PARIS = Place(city="Paris", country="France")


@function_tool
def get_weather(city: str) -> str:
    """The weather."""
    return "sunny"


async def streamed(agent: Agent[Any], said: str) -> Any:
    result = Runner.run_streamed(agent, said)
    async for _ in result.stream_events():
        pass
    return result.final_output


async def left(agent: Agent[Any]) -> bool:
    result = Runner.run_streamed(agent, "slowly")
    async for event in result.stream_events():
        if event.type == "raw_response_event" and "delta" in event.data.type:
            result.cancel()
            break
    return True


def thoughts(agent: Agent[Any]) -> str:
    items = Runner.run_sync(agent, "hello").new_items
    return str([item.raw_item for item in items if item.type == "reasoning_item"])


weather = Agent(name="b", model="local2", tools=[get_weather])
typed = Agent(name="c", model="local2", output_type=Place)
for api, way in (("chat_completions", ""), ("responses", "responses")):
    set_default_openai_api(api)  # type: ignore[arg-type]

    def feature(name: str, responses: str = way) -> tuple[str, str]:
        """Where it stands in the table, and which way it was."""
        return ("Responses", name) if responses else (name, "")

    name, how = feature("chat")
    tried(name, lambda: Runner.run_sync(agent, "hello").final_output, "Hello there.".__eq__, how)
    name, how = feature("stream")
    tried(name, lambda: loop.run_until_complete(streamed(weather, "the weather?")), "It is sunny there.".__eq__, how)
    name, how = feature("tools")
    tried(name, lambda: Runner.run_sync(weather, "the weather?").final_output, "It is sunny there.".__eq__, how)
    name, how = feature("structured")
    tried(name, lambda: Runner.run_sync(typed, "where?").final_output, PARIS.__eq__, how)
    used = lambda: Runner.run_sync(agent, "hello").raw_responses[0].usage.total_tokens  # noqa: E731
    tried("usage", used, lambda count: count > 0, way)
    tried("reasoning", lambda: thoughts(agent), lambda said: "Hm." in said, way)
    tried("abort", lambda: loop.run_until_complete(left(agent)), way=way)
    failing = raised((openai.APIError, AgentsException), lambda: loop.run_until_complete(streamed(agent, "break")))
    tried("mid-stream error", failing, way=way)

wrong = RunConfig(model_provider=OpenAIProvider(api_key="wrong"))
tried("wrong key", raised(openai.AuthenticationError, lambda: Runner.run_sync(agent, "hello", run_config=wrong)))
loop.close()
