"""langchain-openai: invoke, stream, bound tools and structured output, by both APIs."""

from __future__ import annotations

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from trying import tried


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


for kind, responses in (("chat", False), ("responses", True)):
    model = ChatOpenAI(model="local2", use_responses_api=responses)
    tried(kind, lambda model=model: str(model.invoke("hello").text), lambda text: text == "Hello there.")
    tried(
        f"{kind}, streamed",
        lambda model=model: "".join(str(part.text) for part in model.stream("hello")),
        lambda text: text == "Hello there.",
    )
    tried(f"{kind}, tools", lambda model=model: tool_round(model), lambda text: text == "It is sunny there.")
    for method in ("json_schema", "function_calling"):
        chain = model.with_structured_output(Place, method=method)
        tried(f"{kind}, {method}", lambda chain=chain: chain.invoke("where?"), lambda place: place == PARIS)
