"""One chat request: a call by rule and example, short results as they are, else an answer by the model."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.demo_model.llama import Done, Llama, Text
from services.demo_model.prompt import build, short_results, turn_of
from services.demo_model.rules import Call, follow_up
from services.demo_model.tools import ExampleIndex, choose


@dataclass(frozen=True, slots=True)
class ToolCalled:
    """A call in Ollama's form."""

    call: Mapping[str, Any]


Event = Text | ToolCalled | Done


class Conversation:
    """The chat side of the model; it keeps nothing between two requests."""

    def __init__(self, llama: Llama, index: ExampleIndex) -> None:
        self._llama = llama
        self._index = index
        # One thread at a time may use the index: it learns from descriptions.
        self._index_lock = asyncio.Lock()

    async def reply(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        response_format: Mapping[str, Any] | None,
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of one answer; Done comes last. Closing the iterator stops the model."""
        call = await self._tool(messages, tools) if tools else None
        if call is not None:
            function = {"index": 0, "name": call.name, "arguments": call.args}
            yield ToolCalled({"id": f"call_{uuid.uuid4().hex[:8]}", "function": function})
            yield Done("stop")
            return
        short = short_results(turn_of(messages)) if response_format is None else ""
        if short:
            yield Text(short)
            yield Done("stop")
            return
        num_ctx = int(options.get("num_ctx") or self._llama.n_ctx)
        answer = self._llama.chat(lambda budget: build(messages, budget), options, num_ctx, response_format)
        async with contextlib.aclosing(answer) as pieces:
            async for piece in pieces:
                yield piece

    async def _tool(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Call | None:
        functions = [tool["function"] for tool in tools if isinstance(tool.get("function"), Mapping)]
        turn = turn_of(messages)
        if messages[-1].get("role") == "tool":
            return follow_up(turn.question, turn.results, functions)
        # A question with files is about these files.
        if messages[-1].get("role") != "user" or not turn.question or turn.attached:
            return None
        async with self._index_lock:
            return await asyncio.to_thread(choose, turn.question, functions, self._index)
