"""web_fetch: reads one page for the model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_settings import NoDecode

from services.web_fetch.errors import Blocked
from services.web_fetch.guard import AllowedHosts, GuardedBackend
from services.web_fetch.names import open_names
from services.web_fetch.page import Browser, Page
from services.web_fetch.reader import Reader, Reading, open_reader
from shared.errors import ToolError
from shared.participant.settings import Settings
from shared.participant.tool import Run, ToolResult, tool_service
from shared.reading.lines import one_line, without_controls

# Characters of the URL of a refresh in a note: a `javascript:` URL may be a whole program.
MAX_SHOWN_URL = 200
# The list of links has at most this many times `max_chars` characters: by default 100 links of 90 characters each.
LINKS_FACTOR = 3


class WebFetch(BaseModel):
    """Fetch one web page or PDF and read its main text. Call it when the user gives a URL ("summarise https://...",
    "what does this page say"), or when a search result's snippet is not enough and the page itself is needed."""

    model_config = ConfigDict(str_strip_whitespace=True)

    url: str = Field(min_length=1, description="Full URL to fetch (must start with http:// or https://)")
    offset: int = Field(
        default=0, ge=0, le=1_000_000_000, description="Characters to skip: the next part of a long page"
    )
    links: bool = Field(
        default=False, description="true: list the addresses of the page's links behind the text, to go on from there"
    )


# A host that may be allowed, as whoever changes the setting is told at once; `AllowedHosts` looks more closely.
_LABEL = r"[^\x00-,./:-@\[-^`{-\x7f]+"
_PORT = r"0*([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_HOST = rf"^\s*(\[[0-9A-Fa-f:.]+\]|{_LABEL}(\.{_LABEL})*\.?)(:({_PORT})?)?\s*$"


class WebFetchSettings(Settings):
    runtime: ClassVar[frozenset[str]] = Settings.runtime | {
        "max_chars",
        "timeout",
        "user_agent",
        "max_bytes",
        "max_pdf_bytes",
        "max_redirects",
        "allowed_private_hosts",
    }

    max_chars: int = Field(
        default=3_000,
        ge=1,
        le=1_000_000,
        description="Characters of text given to the model; a list of links has at most three times as many",
    )
    timeout: float = Field(default=15.0, gt=0, le=300, description="Seconds for the whole fetch, extraction included")
    user_agent: str = Field(
        default="LoCAL2/1.0 (research agent)",
        pattern=r"^[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?$",
        description="Sent as User-Agent",
    )
    max_bytes: int = Field(
        default=5_000_000, ge=1, le=100_000_000, description="Size after decompression at which reading stops"
    )
    max_pdf_bytes: int = Field(
        default=20_000_000, ge=1, le=32_000_000, description="Largest PDF that is read; a larger one is refused"
    )
    max_redirects: int = Field(default=5, ge=0, le=20, description="Redirects that are followed")
    # NoDecode: in the environment the list may be separated by commas instead of being JSON.
    allowed_private_hosts: Annotated[list[str], NoDecode] = Field(
        default=[],
        json_schema_extra={"items": {"type": "string", "pattern": _HOST, "description": "a host, or host:port"}},
        description="Private hosts (host or host:port) that may be fetched all the same",
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
    reader: Reader
    timeout: float
    max_chars: int

    async def __call__(self, args: WebFetch) -> ToolResult:
        """Return the page's main text. Raises ToolError; never tries twice.

        If a page's refresh fails or leads to a page without text, the result is the last page with text of its own,
        with a note.
        """
        found: tuple[Page, Reading] | None = None
        try:
            async with asyncio.timeout(self.timeout):
                page = await self.browser.get(args.url)
                reading = await self._read(page, args.offset)
                while reading.refresh:
                    if reading.has_text:
                        found = page, reading
                    target = page.url.join(reading.refresh)
                    if target == page.url:
                        break
                    page = await self.browser.refreshed(page, target)
                    reading = await self._read(page, args.offset)
        except TimeoutError as exc:
            error = f"fetch timeout after {self.timeout:g}s: {args.url}"
            if found is None:
                raise ToolError(error) from exc
        except ToolError as exc:
            error = str(exc)
            if found is None:
                raise
        else:
            if found is None or reading.has_text:
                return render(args, page, reading, self.max_chars)
            error = "that page has no readable text"
        return render(args, *found, self.max_chars, not_followed=error)

    async def _read(self, page: Page, offset: int) -> Reading:
        # The other half of the time is for fetching the page.
        return await self.reader.read(page, offset, self.max_chars, self.timeout / 2)


def render(args: WebFetch, page: Page, reading: Reading, max_chars: int, not_followed: str = "") -> ToolResult:
    """Return the tool's result: exactly the agreed text. The caller marks it as untrusted before a model reads it.

    max_chars: bounds the list of links, which has at most LINKS_FACTOR times as many characters.
    not_followed: why the page's refresh was not followed, or "".
    """
    left = reading.chars - reading.after
    if reading.text:
        text = reading.text
    elif reading.chars:
        text = f"[the page's text ends after {reading.chars} characters]"
    else:
        text = "[the page has no readable text]"
    notes = []
    if left:
        notes.append(f"{left} of {reading.chars} characters left out; go on with offset {reading.after}")
    if reading.cut:
        notes.append(reading.note or "the page itself was longer than the size limit")
    if not_followed:
        target = one_line(without_controls(reading.refresh))
        shown = target if len(target) <= MAX_SHOWN_URL else f"{target[:MAX_SHOWN_URL]}…"
        notes.append(f"the page sends its reader on to {shown}, which was not followed: {not_followed}")
    lines = [f"URL: {args.url}", "Extracted text:", text, *([f"[{'; '.join(notes)}]"] if notes else ())]
    if args.links:
        lines += _listed(reading.links, LINKS_FACTOR * max_chars)
    data = {
        "url": args.url,
        "final_url": str(page.url),
        "status": page.status,
        "title": reading.title,
        "content_type": page.content_type,
        "chars": reading.chars,
        "offset": args.offset,
        "next_offset": reading.after if left else None,
        "truncated": bool(left or reading.cut),
        "redirects": page.redirects,
        "links": reading.links,
    }
    return ToolResult("\n".join(lines), data)


def _listed(links: list[dict[str, str]], max_chars: int) -> list[str]:
    """Return the lines of the list of links.

    max_chars: bounds the lines with a link, line ends included; a last line counts the links left out.
    """
    if not links:
        return ["[the page's text has no links]"]
    lines = ["Links:"]
    left = max_chars
    for at, link in enumerate(links):
        line = f"- {link['text']}: {link['url']}"
        left -= len(line) + 1
        if left < 0:
            more = len(links) - at
            lines.append(f"[{more} more {'link is' if more == 1 else 'links are'} in data.links]")
            break
        lines.append(line)
    return lines


@asynccontextmanager
async def build(settings: WebFetchSettings) -> AsyncIterator[Run[WebFetch]]:
    async with open_names() as names, open_reader() as reader:
        backend = GuardedBackend(AllowedHosts.of(settings.allowed_private_hosts), names)
        browser = Browser(
            backend, settings.user_agent, settings.max_bytes, settings.max_pdf_bytes, settings.max_redirects
        )
        yield Fetcher(browser, reader, settings.timeout, settings.max_chars)


app = tool_service("web_fetch", WebFetch, WebFetchSettings, build)
