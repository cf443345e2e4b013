"""Servers that are asked by OpenAI's protocol, and may be an Ollama.

Ollama's `/v1` cannot be told how long the context is to be, leaves out what does not fit without a word, and thinks
whether it is wanted or not. Behind the same address it has its own protocol, which has none of these faults.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

from shared.llm.adapter import Wire, WireEvent
from shared.llm.address import openai_url
from shared.llm.ollama import OllamaWire
from shared.llm.openai import LOOK_TIMEOUT, OpenAIWire, root_of
from shared.llm.port import ChatRequest, ModelError, ModelFacts, ModelUnavailable
from shared.llm.server import OLLAMA_BY_URL

# A server may be replaced by another one; an Ollama that was found is taken to stay one.
_LOOK_AGAIN = 300.0
# Of a server that did not answer: the next call asks, but not every one of many.
_ASK_AGAIN = 5.0


class CompatibleWire:
    """OpenAI's protocol, or Ollama's where the server turns out to be one. For the arguments see
    `shared.llm.factory.open_chat_model`."""

    def __init__(
        self, base_url: str | None, api_key: str | None, keep_alive: str | None, ca_file: Path | None = None
    ) -> None:
        root = root_of(openai_url(base_url))
        self._openai = OpenAIWire(base_url, api_key, ca_file)
        self._open_ollama = partial(OllamaWire, root, api_key, keep_alive, ca_file, OLLAMA_BY_URL)
        self._root = root
        # set once the server turned out to be an Ollama
        self._ollama: OllamaWire | None = None
        self._until = 0.0

    async def events(self, request: ChatRequest, *, wish: bool) -> AsyncGenerator[WireEvent, None]:
        wire = await self._wire()
        async with aclosing(wire.events(request, wish=wish)) as events:
            async for event in events:
                yield event

    async def facts(self, model: str) -> ModelFacts:
        return await (await self._wire()).facts(model)

    async def aclose(self) -> None:
        await self._openai.aclose()
        if self._ollama is not None:
            await self._ollama.aclose()

    async def _wire(self) -> Wire:
        if self._ollama is None and time.monotonic() >= self._until:
            try:
                found, pause = await self._is_ollama(), _LOOK_AGAIN
            except ModelUnavailable:
                # The call itself raises the server's error.
                found, pause = False, _ASK_AGAIN
            self._until = time.monotonic() + pause
            if found and self._ollama is None:
                self._ollama = self._open_ollama()
        return self._ollama or self._openai

    async def _is_ollama(self) -> bool:
        """Others have one of the two at most: Open WebUI a version, llama.cpp a list of models."""
        version, listed = await self._json("/api/version"), await self._json("/api/tags")
        return isinstance(version.get("version"), str) and isinstance(listed.get("models"), list)

    async def _json(self, path: str) -> dict[str, Any]:
        """Empty for an answer that is no object. Raises ModelUnavailable when there is no answer."""
        try:
            return await self._openai.server.ask("GET", f"{self._root}{path}", timeout=LOOK_TIMEOUT)
        except ModelUnavailable:
            raise
        except ModelError:
            return {}
