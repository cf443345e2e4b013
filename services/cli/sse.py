"""Server-sent events of a query, resumed after every broken connection without losing or repeating one."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from services.cli.api import Api, ApiError, unreachable
from shared.records.events import TERMINAL

# How long a stream may stay away before the command gives up.
PATIENCE = 60.0
# The same for a gateway that was not there at all: it may just be starting again.
START_PATIENCE = 5.0
_IDLE = httpx.Timeout(60.0, connect=5.0)
_PASSING = frozenset({429, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Event:
    """`type` is the journal's entry type, `id` the entry's."""

    id: str
    type: str
    data: dict[str, Any]


class Parser:
    """Lines of an event stream in, events out (the part of the format that carries data)."""

    def __init__(self) -> None:
        self._id = ""
        self._type = ""
        self._data: list[str] = []

    def feed(self, line: str) -> Event | None:
        """Read one line without its end; return the event that an empty line completes."""
        if not line:
            event = None
            if self._data:
                event = Event(self._id, self._type or "message", _object("\n".join(self._data)))
            self._type, self._data = "", []
            return event
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "id":
                self._id = value
            case "event":
                self._type = value
            case "data":
                self._data.append(value)
        return None


def _object(text: str) -> dict[str, Any]:
    """Return the JSON object in a text; an empty one for malformed data, which a journal may have."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


class QueryStream:
    """One query's events. `query_id` and `session_id` are known after the first answer of the gateway."""

    def __init__(
        self,
        api: Api,
        *,
        on_resume: Callable[[str], None] = lambda _what: None,
        patience: float = PATIENCE,
        start_patience: float = START_PATIENCE,
    ) -> None:
        self._api = api
        self._on_resume = on_resume
        self._patience = patience
        self._start_patience = start_patience
        self._last = ""
        self._sent = False
        self.query_id: str | None = None
        self.session_id: str | None = None

    async def ask(self, body: dict[str, Any]) -> AsyncGenerator[Event, None]:
        """Sends the query and yields its events up to the terminal one. Raises ApiError.

        When the connection breaks before anything came back, the query is sent again under the same key: the
        gateway then answers with the one that it has accepted, if it has.
        """
        headers = {**_ACCEPT, "idempotency-key": uuid.uuid4().hex}

        def request() -> httpx.Request:
            http = self._api.http
            if self.query_id is None:
                return http.build_request("POST", "/query", json=body, headers=headers, timeout=_IDLE)
            resume = {**_ACCEPT, **({"last-event-id": self._last} if self._last else {})}
            return http.build_request("GET", f"/queries/{self.query_id}/events", headers=resume, timeout=_IDLE)

        async with aclosing(self._follow(request)) as events:
            async for event in events:
                yield event

    async def _follow(self, request: Callable[[], httpx.Request]) -> AsyncGenerator[Event, None]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        give_up = began + self._patience
        pause = 0.1
        told = False
        while True:
            why: Exception
            try:
                async with aclosing(self._read(request())) as events:
                    async for event in events:
                        give_up, pause = loop.time() + self._patience, 0.1
                        yield event
                        if event.type in TERMINAL:
                            return
                why = ApiError("stream_ended", "the stream ended before the answer was complete")
            except httpx.HTTPError as exc:
                # Nothing was sent when there was no connection: nobody may be there, and a long wait is no use.
                self._sent = self._sent or not isinstance(exc, httpx.ConnectError | httpx.ConnectTimeout)
                why = unreachable(self._api.base_url, exc)
            except ApiError as exc:
                if exc.status not in _PASSING or self.query_id is None:
                    raise
                why = exc
            if loop.time() >= (give_up if self._sent else began + self._start_patience):
                raise why
            if self._sent:
                self._on_resume(f"{why}; resuming")
            elif not told:
                told = True
                self._on_resume(f"nothing answers at {self._api.base_url}; trying for {self._start_patience:g} s")
            await asyncio.sleep(pause)
            pause = min(pause * 2, 2.0)

    async def _read(self, request: httpx.Request) -> AsyncGenerator[Event, None]:
        response = await self._api.http.send(request, stream=True)
        try:
            if not response.is_success:
                await response.aread()
                raise self._api.refusal(response)
            self._sent = True
            self.query_id = response.headers.get("x-query-id", self.query_id)
            self.session_id = response.headers.get("x-session-id", self.session_id)
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                raise ApiError("not_a_stream", f"{response.url} did not answer with an event stream")
            parser = Parser()
            async for line in lines(response):
                if (event := parser.feed(line)) is not None:
                    self._last = event.id or self._last
                    yield event
        finally:
            await response.aclose()


_ACCEPT = {"accept": "text/event-stream"}


async def lines(response: httpx.Response) -> AsyncGenerator[str, None]:
    """The lines of a stream, split at line feeds only: httpx's own splitting breaks at U+2028 and others too."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line.removesuffix(b"\r").decode(errors="replace")
