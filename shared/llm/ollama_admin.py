"""Ollama's models and embeddings by its own package: list, ps, show, pull, embed.

The package has no time limits, follows redirects, sends the key of its environment to any server, and keeps neither the
reason of a failed connection nor an error's text inside an answer with status 200. So it gets the options of our
client, and a hook that checks each answer before the package reads it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Sequence
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import Any, TypeVar

import httpx
import ollama
import orjson
from pydantic import ValidationError

from shared.llm.address import ollama_url as ollama_url
from shared.llm.discovery import of_ollama
from shared.llm.failures import failure, what
from shared.llm.port import ModelError, ModelFacts, ModelUnavailable
from shared.llm.server import OLLAMA, Kind, ModelServer, away
from shared.llm.vectors import unit_vectors

# Longest wait for an answer that needs no model: list, show.
ADMIN_TIMEOUT = 10.0
# A layer of a pull may stall, and a model may have to be loaded before it embeds.
PULL_TIMEOUT = 300.0
EMBED_TIMEOUT = 120.0
_EMBED_BATCH = 64
# Lines of progress come for hours.
_PULL_BYTES = 1_000_000_000
# What the package raises for a server that cannot be reached, and for an answer that is not the protocol's.
_NOT_CONNECTED = (httpx.HTTPError, ConnectionError)
_UNREADABLE = (ollama.ResponseError, ValueError, TypeError, AttributeError, RecursionError)
# Every server that imitates `/api/show` sends at least one of these.
_SHOWN = {"capabilities", "details", "modelfile", "template"}

T = TypeVar("T")


def missing(model: str) -> str:
    return f"Ollama does not have the model {model}; get it with: ollama pull {model}"


def keep_alive_value(text: str | None) -> str | float | None:
    """Ollama takes a duration with a unit as text, but seconds (and -1, for ever) only as a number."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


@dataclass(frozen=True, slots=True)
class PullProgress:
    """One line of a pull; `total` and `completed` are bytes of the layer under way, None between layers."""

    status: str
    total: int | None
    completed: int | None


class OllamaAdmin:
    """The models of a server: their abilities, download, embeddings. Raises ModelError."""

    def __init__(
        self,
        base_url: str | None,
        api_key: str | None = None,
        ca_file: Path | None = None,
        kind: Kind = OLLAMA,
    ) -> None:
        self._url = ollama_url(base_url)
        self.server = ModelServer(kind, self._url, api_key, ca_file)
        options = self.server.options(EMBED_TIMEOUT)
        self._client = ollama.AsyncClient(self._url, event_hooks={"response": [self._check]}, **options)

    async def models(self) -> list[str]:
        """Return names with tags, as `ollama list` shows them."""
        listed = await self._asked(self._client.list(), ADMIN_TIMEOUT)
        return [model.model or "" for model in listed.models]

    async def chat_model(self) -> str | None:
        """Return the first model that can answer; None if the server names no such model."""
        for name in await self.models():
            if "completion" in await self.capabilities(name):
                return name
        return None

    async def loaded(self) -> list[str]:
        """Return the names of the models in memory."""
        running = await self._asked(self._client.ps(), ADMIN_TIMEOUT)
        return [model.model or "" for model in running.models]

    async def version(self) -> str:
        """Return the server's version, which the package cannot ask for; empty if the server sends none."""
        return str((await self.server.ask("GET", "/api/version", timeout=ADMIN_TIMEOUT)).get("version") or "")

    async def capabilities(self, model: str) -> frozenset[str]:
        """Return `completion`, `tools`, `thinking`, `embedding`, … of one model. Raises ModelMissing."""
        return frozenset((await self._show(model)).get("capabilities") or ())

    async def facts(self, model: str) -> ModelFacts:
        """Return windows and abilities of one model. Raises ModelMissing."""
        shown = await self._show(model)
        running: list[dict[str, Any]] = []
        # a proxy may let through what a chat needs, and no more
        with contextlib.suppress(ModelError):
            listed = await self._asked(self._client.ps(), ADMIN_TIMEOUT)
            running = [one.model_dump() for one in listed.models]
        return of_ollama(shown, running, model)

    async def pull(self, model: str) -> AsyncGenerator[PullProgress, None]:
        """Download a model and yield the progress; the model is there when the generator ends without an error."""
        options = self.server.options(PULL_TIMEOUT, limit=_PULL_BYTES)
        last = ""
        async with ollama.AsyncClient(self._url, event_hooks={"response": [self._check_status]}, **options) as client:
            try:
                async with contextlib.aclosing(await client.pull(model, stream=True)) as parts:
                    async for part in parts:
                        last = part.status or ""
                        yield PullProgress(last, part.total, part.completed)
            except ollama.ResponseError as exc:
                raise failure(None, str(exc.error), missing(model)) from exc
            except _UNREADABLE as exc:
                if not last:
                    raise self.server.strange(exc.doc if isinstance(exc, JSONDecodeError) else "") from exc
                raise ModelUnavailable(f"the pull of {model} broke off at a line that cannot be read") from exc
            except _NOT_CONNECTED as exc:
                if not last:
                    raise self._away(exc) from exc
                raise ModelUnavailable(f"the pull of {model} broke off: {what(exc)}") from exc
        if last != "success":
            raise ModelUnavailable(f"the pull of {model} broke off at: {last or 'its beginning'}")

    async def embed(self, model: str, texts: Sequence[str], keep_alive: str | float | None) -> list[list[float]]:
        """Return one vector of length 1 for each text."""
        call = self._client.embed(model, list(texts), keep_alive=keep_alive)
        answer = await self._asked(call, EMBED_TIMEOUT)
        try:
            return unit_vectors(answer.embeddings, len(texts))
        except ValueError as exc:
            raise ModelError(f"Ollama at {self.server.url} sent no embeddings of {model} ({exc})") from exc

    async def aclose(self) -> None:
        await self.server.aclose()

    async def _show(self, model: str) -> dict[str, Any]:
        try:
            shown = await self._asked(self._client.show(model), ADMIN_TIMEOUT)
        except ModelError as exc:
            return _without_model_info(exc)
        return shown.model_dump(by_alias=True, exclude_unset=True)

    async def _asked(self, call: Awaitable[T], timeout: float) -> T:
        """Return the answer of a call of the package. timeout: seconds for the whole answer. Raises ModelError."""
        try:
            async with asyncio.timeout(timeout):
                return await call
        except TimeoutError:
            raise self._away(httpx.ReadTimeout(f"silent for {timeout:g}s")) from None
        except _NOT_CONNECTED as exc:
            raise self._away(exc) from exc
        except _UNREADABLE as exc:
            raise self.server.strange() from exc

    def _away(self, exc: Exception) -> ModelError:
        # the package replaces httpx's error of a failed connection by a sentence of its own
        cause = exc.__context__ if isinstance(exc, ConnectionError) else exc
        return away(self.server.kind, self.server.url, cause if isinstance(cause, Exception) else exc)

    async def _check(self, response: httpx.Response) -> None:
        await self.server.object_of(response, _missing_in(response.request))

    async def _check_status(self, response: httpx.Response) -> None:
        await self.server.check_status(response, _missing_in(response.request))


class OllamaEmbeddings:
    """`/api/embed`; the vectors come normalised. Raises ModelError."""

    def __init__(
        self,
        base_url: str | None,
        api_key: str | None = None,
        keep_alive: str | None = None,
        ca_file: Path | None = None,
    ) -> None:
        self._keep_alive = keep_alive_value(keep_alive)
        self._admin = OllamaAdmin(base_url, api_key, ca_file)

    async def embed(self, model: str, texts: Sequence[str]) -> list[list[float]]:
        vectors: list[list[float]] = []
        for start in range(0, len(texts), _EMBED_BATCH):
            vectors.extend(await self._admin.embed(model, texts[start : start + _EMBED_BATCH], self._keep_alive))
        return vectors

    async def aclose(self) -> None:
        await self._admin.aclose()


def _missing_in(request: httpx.Request) -> str:
    """Return the sentence for a missing model, by the name in the request; empty if the request has no model."""
    try:
        return missing(str(orjson.loads(request.content)["model"]))
    except (orjson.JSONDecodeError, KeyError):
        return ""


def _without_model_info(exc: ModelError) -> dict[str, Any]:
    """Return the answer of `/api/show` without `model_info`, which ollama 0.6.3 demands and proxies leave out.

    Raises `exc` if something else was wrong.
    """
    cause = exc.__cause__
    if isinstance(cause, ValidationError):
        match cause.errors():
            case [{"type": "missing", "loc": ("model_info",), "input": dict() as shown}] if shown.keys() & _SHOWN:
                return shown
    raise exc
