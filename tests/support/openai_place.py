"""The genuine generator behind a gateway, at a scripted model, and OpenAI's own client for two users."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from support.http_gateway import Site, gateway_settings, serving
from support.stack import Stage, stage

PARIS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@dataclass
class Place:
    site: Site
    on: Stage
    ann: openai.AsyncOpenAI
    bob: openai.AsyncOpenAI

    def rules(self, *rules: dict[str, Any]) -> None:
        self.on.server.set_rules(rules)

    @property
    def sent(self) -> list[dict[str, Any]]:
        """What the model server was asked, in order."""
        return [received.body for received in self.on.server.requests]

    async def ask(self, said: str | Sequence[Any], client: openai.AsyncOpenAI | None = None, **fields: Any) -> Any:
        messages: Any = [{"role": "user", "content": said}] if isinstance(said, str) else said
        return await (client or self.ann).chat.completions.create(model="local2", messages=messages, **fields)


@asynccontextmanager
async def open_place(redis_url: str, data_dir: Path, num_ctx: int = 32_000, **settings: Any) -> AsyncIterator[Place]:
    """`num_ctx` is the generator's, `settings` are the gateway's."""
    async with stage(redis_url, probes=1, num_ctx=num_ctx) as on, AsyncExitStack() as stack:
        # the first look at a schema loads a library, and everything here shares one loop
        own = gateway_settings(redis_url, data_dir, bus_wait=30.0, **settings)
        site = await stack.enter_async_context(serving(own))
        clients = []
        for name in ("ann", "bob"):
            made = await site.http.post("/keys", json={"name": name, "user_id": name, "role": "user"})
            stock = openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key=made.json()["key"], max_retries=0)
            clients.append(await stack.enter_async_context(stock))
        yield Place(site, on, *clients)


def calling(*names: str, **respond: Any) -> dict[str, Any]:
    """A rule: the model's first answer calls these tools; `respond` is what it says beside them."""
    calls = [{"name": name, "args": {"text": "ping"} if name == "probe" else {"city": "Paris"}} for name in names]
    return {"when": {"tool_results": 0}, "respond": {"tool_calls": calls, **respond}}
