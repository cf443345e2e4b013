"""instructor: typed answers in three of its modes."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from pydantic import BaseModel
from trying import tried


class Place(BaseModel):
    city: str
    country: str


said: Any = [{"role": "user", "content": "where?"}]
for mode in ("TOOLS", "JSON", "JSON_SCHEMA"):
    client = instructor.from_openai(openai.OpenAI(), mode=getattr(instructor.Mode, mode))
    tried(
        mode,
        lambda client=client: client.chat.completions.create(
            model="local2", response_model=Place, messages=said, max_retries=0
        ),
        lambda place: (place.city, place.country) == ("Paris", "France"),
    )
