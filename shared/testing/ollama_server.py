"""A scripted Ollama that fails where the real one fails; `model_server` says how it is told what to answer.

What it does beyond the script, in the forms that were recorded of Ollama 0.32.14:

- so many answers at once as it has slots, one by default; the others wait in line without a sign of life;
- a slot reads a prompt at a certain speed, batch by batch, and keeps what it has read: the next prompt that begins with
  the same text is read from where it differs. Who leaves is noticed after the batch that is being read;
- a context is clamped to the model's own without a word. A prompt that does not fit is refused with 400 when `truncate`
  is false; `/v1`, and `/api` without it, leave out the oldest messages silently and refuse a single one;
- `/api/ps` says with which context a model is loaded; another one means that it is loaded again (`loads`);
- names other than localhost, IP addresses and a few domains are refused in the Host header, with 403 and no body;
- a killed runner ends all answers with a line that quotes its log, whoever's request that was about (`crash`).

It starts when its block is entered: an Ollama that comes late is one with a given `port`, entered late.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from shared.testing.model_server import Rules, ScriptedModelServer
from shared.testing.play import Performance, Received
from shared.testing.script import Asked
from shared.testing.speech import Speech

# What Ollama gives a model whose context nobody asks for, as all clients of /v1.
DEFAULT_CONTEXT = 4096
_BATCH = 512
CRASHED = "an error was encountered while running the model: unexpected EOF"
_LOCAL = (".localhost", ".local", ".internal")


def overflow(prompt: int, context: int) -> str:
    """The text of a refusal: llama.cpp's JSON as it was, inside of Ollama's."""
    told = {
        "code": 400,
        "message": _too_long(prompt, context),
        "type": "exceed_context_size_error",
        "n_prompt_tokens": prompt,
        "n_ctx": context,
    }
    return orjson.dumps({"error": told}).decode()


def crashed(prompt: int, context: int) -> str:
    """What a killed runner's answers end with after somebody's request had been too long."""
    quoted = _too_long(prompt, context)
    return f"an error was encountered while running the model: error: task id = 0, error: {quoted}"


def _too_long(prompt: int, context: int) -> str:
    return f"request ({prompt} tokens) exceeds the available context size ({context} tokens), try increasing it"


def tokens(messages: Sequence[dict[str, Any]]) -> int:
    """The length of a prompt, as the server counts it everywhere."""
    return sum(len(message["content"]) for message in messages) // 4 + 1


class ScriptedOllama(ScriptedModelServer):
    """window: the context that its models were made for, in tokens. slots: answers at the same time.
    reading: tokens of a prompt read in a second; None: at once."""

    def __init__(
        self,
        rules: Rules = (),
        *,
        window: int = 131_072,
        slots: int = 1,
        reading: float | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        super().__init__(rules, host=host, port=port)
        self.window = window
        self._reading = reading
        self._free: asyncio.Queue[_Slot] = asyncio.Queue()
        for _ in range(slots):
            self._free.put_nowait(_Slot())
        self._loaded: dict[str, int] = {}
        self._playing: set[_InLine] = set()
        # each time that a model was loaded: its name and the context
        self.loads: list[tuple[str, int]] = []
        routes = [Route("/api/ps", self._ps), Route("/api/show", self._show_window, methods=["POST"])]
        self.app.router.routes[:0] = routes
        self._catalog_show = next(
            route.endpoint
            for route in self.app.router.routes[len(routes) :]
            if isinstance(route, Route) and route.path == "/api/show"
        )
        self.app.add_middleware(_OwnNames)

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return sum(received.outcome == "waiting" for received in self.requests)

    def crash(self, text: str = CRASHED) -> None:
        """The process that runs the models is killed; the next request has it started again."""
        for playing in set(self._playing):
            playing.crash(text)
        self._loaded.clear()

    async def _perform(
        self,
        request: Request,
        body: dict[str, Any],
        asked: Asked,
        speech: Callable[..., Speech],
        error: Callable[[int, str], bytes],
    ) -> Response:
        said: list[Speech] = []

        def speaking(*args: Any) -> Speech:
            said.append(speech(*args))
            return said[-1]

        if request.url.path.startswith("/v1"):
            # what other servers read is not read here
            asked = replace(asked, think=False if body.get("reasoning_effort") == "none" else None)
        fitted = self._fitted(request.url.path, body, asked)
        answer = await super()._perform(request, body, fitted, speaking, error)
        received = next(one for one in reversed(self.requests) if one.body is body)
        if not isinstance(answer, Performance):
            return answer
        context = self._context(request.url.path, body)
        if self._loaded.get(asked.model) != context:
            self._loaded[asked.model] = context
            self.loads.append((asked.model, context))
        received.note("waiting")
        return _InLine(answer, said[0], received, fitted, self._free, self._reading, self._playing)

    def _context(self, path: str, body: dict[str, Any]) -> int:
        wanted = (body.get("options") or {}).get("num_ctx") if path == "/api/chat" else None
        return min(wanted or DEFAULT_CONTEXT, self.window)

    def _fitted(self, path: str, body: dict[str, Any], asked: Asked) -> Asked:
        """What is left of a prompt where the server cuts without a word: system messages and the newest ones."""
        if body.get("truncate") is False:
            return asked
        kept, context = list(asked.messages), self._context(path, body)
        while tokens(kept) >= context:
            first = next((n for n, said in enumerate(kept[:-1]) if said["role"] != "system"), None)
            if first is None:
                break
            del kept[first]
        return replace(asked, messages=kept)

    def _refusal(self, received: Received, asked: Asked) -> tuple[int, str] | None:
        refusal = super()._refusal(received, asked)
        context, prompt = self._context(received.path, dict(received.body)), tokens(asked.messages)
        if refusal is None and prompt >= context:
            return 400, overflow(prompt, context)
        return refusal

    async def _ps(self, _request: Request) -> Response:
        models = [
            {
                "name": _tagged(name),
                "model": _tagged(name),
                "size": 210_690_374,
                "digest": "0" * 64,
                "details": {"parent_model": "", "format": "gguf", "family": "llama", "families": ["llama"]},
                "expires_at": "2318-01-01T00:00:00Z",
                "size_vram": 0,
                "context_length": context,
            }
            for name, context in self._loaded.items()
        ]
        return JSONResponse({"models": models})

    async def _show_window(self, request: Request) -> Response:
        shown: Response = await self._catalog_show(request)
        if shown.status_code != 200:
            return shown
        value = orjson.loads(bytes(shown.body))
        info = value["model_info"]
        info[f"{info['general.architecture']}.context_length"] = self.window
        return JSONResponse(value)


def _tagged(name: str) -> str:
    return name if ":" in name else f"{name}:latest"


class _Slot:
    """`read`: the prompt whose tokens it holds."""

    def __init__(self) -> None:
        self.read = ""

    def unread(self, prompt: str) -> int:
        """Tokens of the prompt that are not held."""
        both = min(len(self.read), len(prompt))
        same = next((n for n in range(both) if self.read[n] != prompt[n]), both)
        return (len(prompt) - same) // 4 + 1


class _InLine(Response):
    """An answer that waits for a slot, which reads its prompt; a client that leaves gives up its place."""

    def __init__(
        self,
        answer: Performance,
        speech: Speech,
        received: Received,
        asked: Asked,
        free: asyncio.Queue[_Slot],
        reading: float | None,
        playing: set[_InLine],
    ) -> None:
        super().__init__()
        self._answer = answer
        self._speech = speech
        self._received = received
        self._prompt = "\n".join(f"{said['role']}: {said['content']}" for said in asked.messages)
        self._free = free
        self._reading = reading
        self._playing = playing
        self._crashed: asyncio.Future[str] | None = None

    def crash(self, text: str) -> None:
        if self._crashed is not None and not self._crashed.done():
            self._crashed.set_result(text)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        leaving = asyncio.ensure_future(_left(receive))
        try:
            slot = await self._slot(leaving)
            if slot is None:
                self._received.note("aborted")
                return
            try:
                await self._play(slot, leaving, scope, receive, send)
            finally:
                self._free.put_nowait(slot)
        finally:
            leaving.cancel()

    async def _slot(self, leaving: asyncio.Future[Any]) -> _Slot | None:
        """None when the client left the line."""
        turn: asyncio.Future[_Slot] = asyncio.ensure_future(self._free.get())
        both: set[asyncio.Future[Any]] = {turn, leaving}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not leaving.done():
            return turn.result()
        if turn.done():
            self._free.put_nowait(turn.result())
        turn.cancel()
        return None

    async def _play(
        self, slot: _Slot, leaving: asyncio.Future[Any], scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._received.note("running")
        self._crashed = asyncio.get_running_loop().create_future()
        self._playing.add(self)
        sent = False

        async def sending(message: Any) -> None:
            nonlocal sent
            sent = sent or message["type"] == "http.response.start"
            await send(message)

        async def gone() -> Any:
            await leaving
            return {"type": "http.disconnect"}

        answering: asyncio.Future[Any] = asyncio.ensure_future(
            self._read_and_answer(slot, leaving, scope, gone, sending)
        )
        try:
            await asyncio.wait({answering, self._crashed}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                answering.cancel()
                await asyncio.gather(answering, return_exceptions=True)
                await self._end(self._crashed.result(), sent, send)
                return
            await answering
        finally:
            self._playing.discard(self)

    async def _read_and_answer(
        self, slot: _Slot, leaving: asyncio.Future[Any], scope: Scope, gone: Receive, send: Send
    ) -> None:
        left = slot.unread(self._prompt) if self._reading else 0
        slot.read = ""
        while left > 0 and self._reading:
            await asyncio.sleep(min(left, _BATCH) / self._reading)
            left -= _BATCH
            if leaving.done():
                self._received.note("aborted")
                return
        slot.read = self._prompt
        await self._answer(scope, gone, send)

    async def _end(self, text: str, sent: bool, send: Send) -> None:
        """The error that an answer ends with when its process was killed."""
        if not sent:
            await send(
                {"type": "http.response.start", "status": 500, "headers": [(b"content-type", b"application/json")]}
            )
        await send({"type": "http.response.body", "body": self._speech.error(text), "more_body": False})
        self._received.note("broken")


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _OwnNames:
    """Refuses names that a page of a stranger could have had pointed at this machine."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
            if not _known(host):
                await Response(status_code=403)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _known(host: str) -> bool:
    name = host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in ("", "localhost") or name.endswith(_LOCAL)
    return True
