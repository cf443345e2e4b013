"""langchain-openai: invoke, stream, bound tools and structured output, by both APIs."""

from __future__ import annotations

import openai
from pydantic import BaseModel
from trying import left, raised, tried

# docs: begin
from langchain_openai import ChatOpenAI  # isort: skip

model = ChatOpenAI(model="local2")  # use_responses_api=True for Responses
print(model.invoke("hello").text)
# docs: end

from langchain_core.messages import HumanMessage, ToolMessage  # noqa: E402
from langchain_core.tools import tool  # noqa: E402


class Place(BaseModel):
    """A place."""

    city: str
    country: str


PARIS = Place(city="Paris", country="France")


@tool
def get_weather(city: str) -> str:
    """The weather."""
    return "sunny"


def tool_round(model: ChatOpenAI) -> str:
    bound = model.bind_tools([get_weather])
    messages = [HumanMessage("the weather?")]
    first = bound.invoke(messages)
    (call,) = first.tool_calls
    return str(bound.invoke([*messages, first, ToolMessage("sunny", tool_call_id=call["id"])]).text)


def read(model: ChatOpenAI, said: str) -> str:
    return "".join(str(part.text) for part in model.stream(said))


responses = ChatOpenAI(model="local2", use_responses_api=True)
tried("chat", lambda: str(model.invoke("hello").text), "Hello there.".__eq__)
tried("stream", lambda: read(model, "hello"), "Hello there.".__eq__)
tried("usage", lambda: model.invoke("hello").usage_metadata["total_tokens"], lambda count: count > 0)
tried("reasoning", lambda: model.invoke("hello").additional_kwargs.get("reasoning_content"), "Hm.".__eq__)
tried("reasoning", lambda: str(responses.invoke("hello").content_blocks), lambda said: "Hm." in said, "responses")
tried("abort", lambda: left(part for part in model.stream("slowly") if part.text))
tried("abort", lambda: left(part for part in responses.stream("slowly") if part.text), way="responses")
wrong = ChatOpenAI(model="local2", api_key="wrong")  # type: ignore[arg-type]
tried("wrong key", raised(openai.AuthenticationError, lambda: wrong.invoke("hello")))
tried("tools", lambda: tool_round(model), "It is sunny there.".__eq__)
tried("Responses", lambda: str(responses.invoke("hello").text), "Hello there.".__eq__)
tried("Responses", lambda: read(responses, "hello"), "Hello there.".__eq__, "stream")
tried("Responses", lambda: tool_round(responses), "It is sunny there.".__eq__, "tools")
for method in ("json_schema", "function_calling"):
    for feature, way, asked in (("structured", "", model), ("Responses", "structured by ", responses)):
        chain = asked.with_structured_output(Place, method=method)
        tried(feature, lambda chain=chain: chain.invoke("where?"), PARIS.__eq__, f"{way}{method}")
tried("mid-stream error", raised(openai.APIError, lambda: read(model, "break")))
