"""instructor: typed answers in three of its modes."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from trying import not_offered, raised, tried

# docs: begin
import instructor  # isort: skip
import openai  # isort: skip

client = instructor.from_openai(openai.OpenAI())  # in the modes TOOLS (its default), JSON and JSON_SCHEMA
# docs: end


class Place(BaseModel):
    city: str
    country: str


def ask(text: str = "where?", client: Any = client, **fields: Any) -> Any:
    said: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="local2", response_model=Place, messages=said, max_retries=0, **fields)


PARIS = Place(city="Paris", country="France")


def the_place(found: Any) -> bool:
    """What comes back is of a class that was made from the one that was asked for."""
    return isinstance(found, Place) and found.model_dump() == PARIS.model_dump()


for mode in ("TOOLS", "JSON", "JSON_SCHEMA"):
    chosen = instructor.from_openai(openai.OpenAI(), mode=getattr(instructor.Mode, mode))
    tried("structured", lambda client=chosen: ask(client=client), the_place, mode)
streaming = instructor.from_openai(openai.OpenAI(), mode=instructor.Mode.JSON_SCHEMA)
parts = lambda said: streaming.chat.completions.create_partial(  # noqa: E731
    model="local2", response_model=Place, messages=[{"role": "user", "content": said}], max_retries=0
)
not_offered("chat", "every answer has a form")
tried("stream", lambda: list(parts("where?"))[-1].model_dump(), PARIS.model_dump().__eq__)
tried(
    "usage",
    lambda: (
        client.chat.completions.create_with_completion(
            model="local2", response_model=Place, messages=[{"role": "user", "content": "where?"}]
        )[1].usage.total_tokens
    ),
    lambda count: count > 0,
)
not_offered("reasoning", "the form is all that comes back")
not_offered("abort", "a form comes in one piece: there is nothing to leave in the middle of")
wrong = instructor.from_openai(openai.OpenAI(api_key="wrong"))
tried("wrong key", raised(Exception, lambda: ask(client=wrong)))
not_offered("tools", "it uses them for its own forms")
responses = instructor.from_openai(openai.OpenAI(), mode=instructor.Mode.RESPONSES_TOOLS)
tried("Responses", lambda: responses.responses.create(model="local2", input="where?", response_model=Place), the_place)
tried("mid-stream error", raised(Exception, lambda: list(parts("break"))))
