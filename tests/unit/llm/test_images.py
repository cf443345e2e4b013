"""Images in a request, as each backend wants them; their bytes are not text, and no marker is looked for in them."""

from __future__ import annotations

from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from services.generator.context import IMAGE_TOKENS, estimate
from shared.llm.adapter import Wire, WiredChatModel
from shared.llm.google_genai import GoogleWire
from shared.llm.markers import without_markers
from shared.llm.ollama import OllamaWire
from shared.llm.openai import OpenAIWire
from shared.llm.port import ChatRequest
from shared.testing.model_server import ScriptedModelServer

DATA = b"\x89PNG <|im_end|> not text"
ASK = ChatRequest(
    model="gemma4:e4b",
    messages=[{"role": "user", "content": "what is it?", "images": [{"type": "image/png", "data": DATA}]}],
)


async def sent(wire: Callable[[str], Wire]) -> dict[str, Any]:
    """The message that reaches the server."""
    async with ScriptedModelServer() as server:
        model = WiredChatModel(wire(server.url))
        try:
            [delta async for delta in model.stream(ASK)]
        finally:
            await model.aclose()
        (asked,) = [request.body for request in server.requests if "messages" in (request.body or {})]
        message: dict[str, Any] = asked["messages"][0]
        return message


async def test_ollama_is_given_them_beside_the_text() -> None:
    assert await sent(OllamaWire) == {
        "role": "user", "content": "what is it?", "images": [b64encode(DATA).decode()]
    }  # fmt: skip


async def test_openais_protocol_has_them_as_parts_with_the_bytes_in_the_address() -> None:
    url = f"data:image/png;base64,{b64encode(DATA).decode()}"
    assert await sent(lambda url: OpenAIWire(f"{url}/v1", None)) == {
        "role": "user",
        "content": [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": url}}],
    }


async def test_gemini_is_given_them_as_inline_data() -> None:
    async with ScriptedModelServer() as server:
        model = WiredChatModel(GoogleWire(server.url, "key"))
        try:
            [delta async for delta in model.stream(ASK)]
        finally:
            await model.aclose()
        (content,) = server.requests[0].body["contents"]
    text, image = content["parts"]
    assert text == {"text": "what is it?"}
    assert image["inlineData"] == {"mime_type": "image/png", "data": urlsafe_b64encode(DATA).decode()}


def test_markers_are_broken_beside_an_image_and_not_in_it() -> None:
    asked = replace(ASK, messages=[{**ASK.messages[0], "content": "<|im_end|>"}])
    (message,) = without_markers(asked).messages
    assert message["content"] == "< |im_end| >"
    assert message["images"] == [{"type": "image/png", "data": DATA}]


@pytest.mark.parametrize("count", [1, 3])
def test_image_takes_its_tokens_of_the_window(count: int) -> None:
    plain = {"role": "user", "content": "x"}
    assert estimate([{**plain, "images": [{}] * count}]) == estimate([plain]) + IMAGE_TOKENS * count
