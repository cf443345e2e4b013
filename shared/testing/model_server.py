"""A model server that plays a script: Ollama's, OpenAI's and Gemini's protocols over real HTTP, with faults on demand.
Under `/plain/v1` it is a server that has OpenAI's protocol and no other.

In a test: `async with ScriptedModelServer(rules) as server: … server.url … server.requests …`
As a program: `python -m shared.testing.model_server --port 11434 [--host 0.0.0.0] [--rules FILE]`; then
`GET /script/requests` and `/script/state` tell what happened, `POST /script/rules` gives it another script.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import orjson
import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from uvicorn.server import ServerState

from shared.testing.catalog import Catalog
from shared.testing.play import Performance, Received
from shared.testing.script import STORIES, Asked, Director, Rule, Script, load_script
from shared.testing.speech import (
    GoogleSpeech,
    OllamaSpeech,
    OpenAISpeech,
    Speech,
    google_asked,
    google_error,
    ollama_asked,
    openai_asked,
    openai_error,
)

Rules = Script | Sequence[Rule | dict[str, Any]]
# Old requests are forgotten beyond this many, so that a long load does not fill the memory.
_KEPT = 10_000


class ScriptedModelServer:
    """`requests` are the chat requests in the order they came, each with its outcome."""

    def __init__(self, rules: Rules = (), *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._address = (host, port)
        self._state = ServerState()
        self.requests: list[Received] = []
        self.set_rules(rules)
        openai = [Route("/v1/chat/completions", self._openai, methods=["POST"])]
        self.app = Starlette(
            routes=[
                Route("/api/chat", self._ollama, methods=["POST"]),
                *openai,
                Route("/v1/models/{call:path}", self._google, methods=["POST"]),
                Route("/v1beta/models/{call:path}", self._google, methods=["POST"]),
                Route("/script/rules", self._post_rules, methods=["POST"]),
                Route("/script/requests", self._get_requests, methods=["GET", "DELETE"]),
                Route("/script/state", self._get_state),
                Route("/", lambda _request: PlainTextResponse("Ollama is running")),
                *Catalog(lambda: self.director.script).routes(),
                # a server that speaks OpenAI's protocol alone
                Mount("/plain", routes=[*openai, *Catalog(lambda: self.director.script).openai_routes()]),
            ]
        )

    def set_rules(self, rules: Rules) -> None:
        """Another script; what is being played goes on."""
        script = rules if isinstance(rules, Script) else Script.model_validate({"rules": list(rules)})
        self.director = Director(script)

    @property
    def url(self) -> str:
        return f"http://{self._socket_name[0]}:{self._socket_name[1]}"

    @property
    def connections(self) -> int:
        """TCP connections open now, idle ones included."""
        return len(self._state.connections)

    @property
    def streaming(self) -> int:
        """Answers under way now."""
        return sum(received.outcome == "running" for received in self.requests)

    @property
    def aborted(self) -> list[Received]:
        """Requests whose client left before the answer was complete."""
        return [received for received in self.requests if received.outcome == "aborted"]

    async def wait_until(self, fact: Callable[[Self], bool], timeout: float = 20.0) -> None:
        """Returns when the fact holds of this server; looked at every few milliseconds. Raises TimeoutError."""
        async with asyncio.timeout(timeout):
            while not fact(self):
                await asyncio.sleep(0.002)

    async def __aenter__(self) -> Self:
        config = uvicorn.Config(
            self.app, lifespan="off", log_config=None, log_level="critical", access_log=False, ws="none"
        )
        config.load()
        protocol: Any = config.http_protocol_class
        # The protocol alone, without uvicorn's server: that one takes over the signals and needs 0.2 s to stop.
        self._listener = await asyncio.get_running_loop().create_server(
            lambda: protocol(config=config, server_state=self._state, app_state={}),
            *self._address,
            reuse_address=True,
            backlog=1024,
        )
        self._socket_name = self._listener.sockets[0].getsockname()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._listener.close()
        for connection in list(self._state.connections):
            connection.transport.abort()
        while self._state.tasks:
            await asyncio.wait(self._state.tasks)
        await self._listener.wait_closed()

    async def serve_until_stopped(self) -> None:
        """For the program: runs until SIGTERM or SIGINT."""
        async with self:
            stopped = asyncio.Event()
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, stopped.set)
            print(f"model server on {self.url}", flush=True)
            await stopped.wait()

    async def _ollama(self, request: Request) -> Response:
        body = await request.json()
        if not body.get("messages"):
            return JSONResponse(
                {"model": body["model"], "message": {"role": "assistant", "content": ""}, "done": True,
                 "done_reason": "load"}
            )  # fmt: skip
        return await self._perform(request, body, ollama_asked(body), OllamaSpeech, _ollama_error)

    async def _openai(self, request: Request) -> Response:
        body = await request.json()
        with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        return await self._perform(
            request,
            body,
            openai_asked(body),
            lambda asked, respond: OpenAISpeech(asked, respond, with_usage=with_usage),
            openai_error,
        )

    async def _google(self, request: Request) -> Response:
        model, _, method = request.path_params["call"].rpartition(":")
        if method not in ("streamGenerateContent", "generateContent"):
            return Response(google_error(404, f"no method {method}"), 404, media_type="application/json")
        body = await request.json()
        asked = google_asked(model, body, stream=method == "streamGenerateContent")
        return await self._perform(request, body, asked, GoogleSpeech, google_error)

    async def _perform(
        self,
        request: Request,
        body: dict[str, Any],
        asked: Asked,
        speech: Callable[..., Speech],
        error: Callable[[int, str], bytes],
    ) -> Response:
        received = Received(
            path=request.url.path, body=body, headers=dict(request.headers), query=asked.query, model=asked.model
        )
        self.requests.append(received)
        del self.requests[:-_KEPT]
        refusal = self._refusal(received, asked)
        rule = self.director.choose(asked) if refusal is None else Rule(name="refused")
        received.rule = rule.name
        if rule.respond.status is not None:
            refusal = (rule.respond.status, rule.respond.error)
        if refusal is not None:
            await asyncio.sleep(rule.respond.delay)
            received.note("refused")
            return Response(error(*refusal), refusal[0], media_type="application/json")
        performance = Performance(asked, rule, speech(asked, rule.respond), received)
        received.note("running")
        return performance

    def _refusal(self, received: Received, asked: Asked) -> tuple[int, str] | None:
        """Return the status and text of a refusal, by the rules for messages and the model's abilities; None: none."""
        insists = self.director.script.insists
        if insists is not None and (objection := insists.objection(received.body)) is not None:
            return 400, objection
        models = self.director.script.models
        if models is None:
            return None
        name = asked.model.removesuffix(":latest")
        abilities = models.get(name, models.get(f"{name}:latest"))
        if abilities is None:
            return 404, f"model '{asked.model}' not found"
        if asked.tools and "tools" not in abilities:
            return 400, f"registry.ollama.ai/library/{asked.model} does not support tools"
        if asked.think is True and "thinking" not in abilities:
            return 400, f'"{asked.model}" does not support thinking'
        return None

    async def _post_rules(self, request: Request) -> Response:
        try:
            self.set_rules(load_script((await request.body()).decode()))
        except (ValidationError, ValueError) as exc:
            return JSONResponse({"error": str(exc)}, 422)
        return JSONResponse({"rules": len(self.director.script.rules)})

    async def _get_requests(self, request: Request) -> Response:
        if request.method == "DELETE":
            self.requests = [received for received in self.requests if received.outcome == "running"]
        return JSONResponse([received.shown() for received in self.requests])

    async def _get_state(self, _request: Request) -> Response:
        return JSONResponse(
            {
                "connections": self.connections,
                "streaming": self.streaming,
                "aborted": len(self.aborted),
                "requests": len(self.requests),
            }
        )


def _ollama_error(_status: int, text: str) -> bytes:
    return orjson.dumps({"error": text})


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="model_server", description="A model server that plays a script.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=11434)
    parser.add_argument("--rules", type=Path, default=STORIES, help="YAML or JSON (default: the stories)")
    options = parser.parse_args(argv)
    script = load_script(options.rules.read_text(encoding="utf-8"))

    async def serve() -> None:
        await ScriptedModelServer(script, host=options.host, port=options.port).serve_until_stopped()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
