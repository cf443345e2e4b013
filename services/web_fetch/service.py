"""web_fetch: reads one page for the model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_settings import NoDecode

from services.web_fetch.errors import Blocked
from services.web_fetch.extract import Extract, extract
from services.web_fetch.guard import AllowedHosts, GuardedBackend
from services.web_fetch.page import Browser, Page
from shared.errors import ToolError
from shared.participant.settings import Settings
from shared.participant.tool import Run, ToolResult, tool_service

# Extraction is pure Python and lxml: more threads would only take turns.
EXTRACTORS = 2


class WebFetch(BaseModel):
    """Fetch one web page and read its main text. Call it when the user gives a URL ("summarise https://...", "what does
    this page say"), or when a search result's snippet is not enough and the page itself is needed."""

    model_config = ConfigDict(str_strip_whitespace=True)

    url: str = Field(min_length=1, description="Full URL to fetch (must start with http:// or https://)")


class WebFetchSettings(Settings):
    runtime: ClassVar[frozenset[str]] = Settings.runtime | {
        "max_chars",
        "timeout",
        "user_agent",
        "max_bytes",
        "max_redirects",
        "allowed_private_hosts",
    }

    max_chars: int = Field(default=3_000, ge=1, le=1_000_000, description="Characters of text given to the model")
    timeout: float = Field(default=15.0, gt=0, le=300, description="Seconds for the whole fetch, extraction included")
    user_agent: str = Field(
        default="LoCAL2/1.0 (research agent)",
        pattern=r"^[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?$",
        description="Sent as User-Agent",
    )
    max_bytes: int = Field(
        default=5_000_000, ge=1, le=100_000_000, description="Size after decompression at which reading stops"
    )
    max_redirects: int = Field(default=5, ge=0, le=20, description="Redirects that are followed")
    # NoDecode: in the environment the list may be separated by commas instead of being JSON.
    allowed_private_hosts: Annotated[list[str], NoDecode] = Field(
        default=[], description="Private hosts (host or host:port) that may be fetched all the same"
    )

    @field_validator("allowed_private_hosts", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [item for part in value.strip("[] ").split(",") if (item := part.strip(" \"'"))]
        return value

    @field_validator("allowed_private_hosts")
    @classmethod
    def _are_hosts(cls, value: list[str]) -> list[str]:
        for entry in value:
            try:
                AllowedHosts.of([entry])
            except Blocked as exc:
                raise ValueError("each entry must be a host name, an address or host:port") from exc
        return value


@dataclass(frozen=True, slots=True)
class Fetcher:
    browser: Browser
    executor: Executor
    timeout: float
    max_chars: int

    async def __call__(self, args: WebFetch) -> ToolResult:
        """The page's main text. Raises ToolError; never tries twice."""
        try:
            async with asyncio.timeout(self.timeout):
                page = await self.browser.get(args.url)
                loop = asyncio.get_running_loop()
                content = await loop.run_in_executor(self.executor, extract, page.text, page.content_type)
        except TimeoutError as exc:
            raise ToolError(f"fetch timeout after {self.timeout:g}s: {args.url}") from exc
        return render(args.url, page, content, self.max_chars)


def render(url: str, page: Page, content: Extract, max_chars: int) -> ToolResult:
    """The tool's result: exactly the agreed text. Whoever shows it to a model marks it as untrusted."""
    left_out = max(0, len(content.text) - max_chars)
    lines = [f"URL: {url}", "Extracted text:", content.text[:max_chars] or "[the page has no readable text]"]
    if left_out or page.cut:
        cut = f"{left_out} of {len(content.text)} characters left out"
        lines.append(f"[{cut}; the page itself was longer than the size limit]" if page.cut else f"[{cut}]")
    data = {
        "url": url,
        "final_url": str(page.url),
        "status": page.status,
        "title": content.title,
        "content_type": page.content_type,
        "chars": len(content.text),
        "truncated": bool(left_out or page.cut),
        "redirects": page.redirects,
    }
    return ToolResult("\n".join(lines), data)


@asynccontextmanager
async def build(settings: WebFetchSettings) -> AsyncIterator[Run[WebFetch]]:
    backend = GuardedBackend(AllowedHosts.of(settings.allowed_private_hosts))
    browser = Browser(backend, settings.user_agent, settings.max_bytes, settings.max_redirects)
    executor = ThreadPoolExecutor(EXTRACTORS, thread_name_prefix="extract")
    try:
        yield Fetcher(browser, executor, settings.timeout, settings.max_chars)
    finally:
        # An extraction that nobody waits for any more must not hold up the stop.
        executor.shutdown(wait=False, cancel_futures=True)


app = tool_service("web_fetch", WebFetch, WebFetchSettings, build)
