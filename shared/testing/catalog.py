"""What the model server answers besides chat: its models, their abilities, a pull, embeddings."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from shared.testing.script import Script

VERSION = "0.33.0"
DIMENSIONS = 256
# What a server without a list of models says that it has.
_USUAL = {
    "gemma4:e4b": ["completion", "tools", "thinking"],
    "gemma4:e2b": ["completion", "tools", "thinking"],
    "ggozad/prometheus2:latest": ["completion"],
    "nomic-embed-text:latest": ["embedding"],
}
_WORD = re.compile(r"\w+")


class Catalog:
    """`script` gives the script that plays now: its models are the server's."""

    def __init__(self, script: Callable[[], Script]) -> None:
        self._script = script

    def routes(self) -> list[Route]:
        return [
            Route("/api/version", self._version),
            Route("/api/tags", self._tags),
            Route("/api/ps", self._loaded),
            Route("/api/show", self._show, methods=["POST"]),
            Route("/api/pull", self._pull, methods=["POST"]),
            Route("/api/embed", self._embed, methods=["POST"]),
            *self.openai_routes(),
            Route("/v1/models/{name}", self._google_model),
            Route("/v1beta/models/{name}", self._google_model),
        ]

    def openai_routes(self) -> list[Route]:
        return [
            Route("/v1/models", self._openai_models),
            Route("/v1/embeddings", self._openai_embed, methods=["POST"]),
        ]

    def _abilities(self, name: str) -> list[str] | None:
        models = self._script().models
        if models is None:
            return _USUAL.get(name, _USUAL.get(f"{name}:latest", ["completion", "tools", "thinking"]))
        found = models.get(name, models.get(name.removesuffix(":latest"), models.get(f"{name}:latest")))
        return None if found is None else ["completion", *found]

    def _names(self) -> list[str]:
        models = self._script().models
        return [name if ":" in name else f"{name}:latest" for name in (_USUAL if models is None else models)]

    async def _version(self, _request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def _tags(self, _request: Request) -> Response:
        now = datetime.now(UTC).isoformat()
        return JSONResponse(
            {
                "models": [
                    {
                        "name": name,
                        "model": name,
                        "modified_at": now,
                        "size": 9_600_000_000,
                        "digest": hashlib.sha256(name.encode()).hexdigest(),
                        "details": {"format": "gguf", "family": name.partition(":")[0]},
                        "capabilities": self._abilities(name) or [],
                    }
                    for name in self._names()
                ]
            }
        )

    async def _loaded(self, _request: Request) -> Response:
        return JSONResponse({"models": []})

    async def _show(self, request: Request) -> Response:
        name = (await request.json())["model"]
        abilities = self._abilities(name)
        if abilities is None:
            return _missing(name)
        return JSONResponse(
            {
                "modelfile": "",
                "parameters": "",
                "template": "{{ .Prompt }}",
                "details": {"format": "gguf", "family": name.partition(":")[0], "parameter_size": "8.0B"},
                "model_info": {"general.architecture": "gemma4", "gemma4.context_length": 131_072},
                "capabilities": abilities,
                "modified_at": datetime.now(UTC).isoformat(),
            }
        )

    async def _pull(self, request: Request) -> Response:
        name = (await request.json())["model"]
        models = self._script().models

        async def lines() -> AsyncIterator[bytes]:
            yield _line(status="pulling manifest")
            if "nosuch" in name:
                yield _line(error="pull model manifest: file does not exist")
                return
            digest = hashlib.sha256(name.encode()).hexdigest()
            for completed in (0, 500_000, 1_000_000):
                yield _line(
                    status=f"pulling {digest[:12]}",
                    digest=f"sha256:{digest}",
                    total=1_000_000,
                    completed=completed,
                )
            for status in ("verifying sha256 digest", "writing manifest", "success"):
                yield _line(status=status)
            if models is not None:
                models[name] = ["tools", "thinking"]

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    async def _embed(self, request: Request) -> Response:
        body = await request.json()
        if self._abilities(body["model"]) is None:
            return _missing(body["model"])
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        return JSONResponse({"model": body["model"], "embeddings": [embedding(text) for text in texts]})

    async def _openai_models(self, _request: Request) -> Response:
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "library"} for name in self._names()]
        return JSONResponse({"object": "list", "data": data})

    async def _openai_embed(self, request: Request) -> Response:
        body = await request.json()
        if self._abilities(body["model"]) is None:
            return JSONResponse({"error": {"message": f"model '{body['model']}' not found"}}, 404)
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        data = [{"object": "embedding", "index": n, "embedding": embedding(text)} for n, text in enumerate(texts)]
        usage = {"prompt_tokens": 1, "total_tokens": 1}
        return JSONResponse({"object": "list", "data": data, "model": body["model"], "usage": usage})

    async def _google_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if self._abilities(name) is None:
            error = {"code": 404, "message": f"models/{name} is not found", "status": "NOT_FOUND"}
            return JSONResponse({"error": error}, 404)
        return JSONResponse({"name": f"models/{name}", "version": "001", "displayName": name})


def embedding(text: str) -> list[float]:
    """A vector of unit length from the words of a text: the same text always gives the same vector, and texts that
    share words are nearer to each other than texts that do not.
    """
    vector = [0.0] * DIMENSIONS
    for word in _WORD.findall(text.lower()):
        digest = hashlib.blake2b(word.encode(), digest_size=4).digest()
        vector[int.from_bytes(digest[:2]) % DIMENSIONS] += 1.0 if digest[2] & 1 else -1.0
    length = math.sqrt(sum(x * x for x in vector))
    if not length:
        return [1.0, *vector[1:]]
    return [x / length for x in vector]


def _line(**part: object) -> bytes:
    return orjson.dumps(part) + b"\n"


def _missing(name: str) -> Response:
    return JSONResponse({"error": f"model '{name}' not found"}, 404)
