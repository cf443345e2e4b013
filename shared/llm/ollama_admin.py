"""Ollama's models and embeddings: `/api/tags`, `ps`, `show`, `pull`, `embed`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import orjson

from shared.llm.address import ollama_url as ollama_url
from shared.llm.discovery import of_ollama
from shared.llm.failures import error_text, failure, what
from shared.llm.http import open_http
from shared.llm.port import ModelError, ModelFacts, ModelUnavailable
from shared.llm.vectors import unit_vectors

# Longest wait for an answer that needs no model: list, show.
ADMIN_TIMEOUT = 10.0
# A layer of a pull may stall, and a model may have to be loaded before it embeds.
PULL_TIMEOUT = 300.0
EMBED_TIMEOUT = 120.0
_EMBED_BATCH = 64


def missing(model: str) -> str:
    return f"Ollama does not have the model {model}; get it with: ollama pull {model}"


def keep_alive_value(text: str | None) -> str | float | None:
    """Ollama takes a duration with a unit as text, but seconds (and -1, for ever) only as a number."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def unreachable(url: str, exc: Exception) -> str:
    return f"Ollama does not answer at {url} ({what(exc)}); start it with: ollama serve"


@dataclass(frozen=True, slots=True)
class PullProgress:
    """One line of a pull; `total` and `completed` are bytes of the layer under way, None between layers."""

    status: str
    total: int | None
    completed: int | None


class OllamaAdmin:
    """What the server has: models, their abilities, pulling one. Raises ModelError."""

    def __init__(self, base_url: str | None, api_key: str | None = None, ca_file: Path | None = None) -> None:
        self._url = ollama_url(base_url)
        self._open = partial(open_http, self._url, api_key, ca_file=ca_file)
        self._opened: httpx.AsyncClient | None = None

    async def models(self) -> list[str]:
        """Names with tags, as `ollama list` shows them."""
        with _Mapped(self._url):
            return _names(await _json(self._http(), "GET", "/api/tags"))

    async def loaded(self) -> list[str]:
        """Names of the models in memory."""
        with _Mapped(self._url):
            return _names(await _json(self._http(), "GET", "/api/ps"))

    async def capabilities(self, model: str) -> frozenset[str]:
        """`completion`, `tools`, `thinking`, `embedding`, … of one model. Raises ModelMissing."""
        with _Mapped(self._url, model):
            shown = await _json(self._http(), "POST", "/api/show", {"model": model})
            return frozenset(map(str, shown.get("capabilities") or ()))

    async def facts(self, model: str) -> ModelFacts:
        """Windows and abilities of one model. Raises ModelMissing."""
        with _Mapped(self._url, model):
            shown = await _json(self._http(), "POST", "/api/show", {"model": model})
            try:
                loaded = (await _json(self._http(), "GET", "/api/ps")).get("models")
            except _Refused:  # a proxy may let through what a chat needs, and no more
                loaded = None
            return of_ollama(shown, loaded if isinstance(loaded, list) else (), model)

    async def pull(self, model: str) -> AsyncGenerator[PullProgress, None]:
        """Downloads a model and says how far it is; complete when it ends without an error."""
        last = ""
        # A client of its own: a listing may not stall for minutes.
        async with self._open(timeout=PULL_TIMEOUT) as http:
            with _Mapped(self._url, model):
                async with http.stream("POST", "/api/pull", json={"model": model}) as response:
                    if not response.is_success:
                        await response.aread()
                        raise _Refused(response)
                    async for line in response.aiter_lines():
                        part = orjson.loads(line)
                        if "error" in part:
                            raise failure(None, error_text(line), missing(model))
                        last = str(part.get("status") or "")
                        yield PullProgress(last, part.get("total"), part.get("completed"))
        if last != "success":
            raise ModelUnavailable(f"the pull of {model} broke off at: {last or 'its beginning'}")

    async def aclose(self) -> None:
        if self._opened is not None:
            await self._opened.aclose()
            self._opened = None

    def _http(self) -> httpx.AsyncClient:
        if self._opened is None:
            self._opened = self._open(timeout=ADMIN_TIMEOUT)
        return self._opened


class OllamaEmbeddings:
    """`/api/embed`; the vectors come normalised. Raises ModelError."""

    def __init__(
        self,
        base_url: str | None,
        api_key: str | None = None,
        keep_alive: str | None = None,
        ca_file: Path | None = None,
    ) -> None:
        self._url = ollama_url(base_url)
        self._keep_alive = keep_alive_value(keep_alive)
        self._http = open_http(self._url, api_key, timeout=EMBED_TIMEOUT, ca_file=ca_file)

    async def embed(self, model: str, texts: Sequence[str]) -> list[list[float]]:
        vectors: list[list[float]] = []
        kept = {} if self._keep_alive is None else {"keep_alive": self._keep_alive}
        for start in range(0, len(texts), _EMBED_BATCH):
            batch = list(texts[start : start + _EMBED_BATCH])
            with _Mapped(self._url, model):
                answer = await _json(self._http, "POST", "/api/embed", {"model": model, "input": batch, **kept})
                if answer.get("error"):
                    raise failure(None, error_text(orjson.dumps(answer)), missing(model))
                try:
                    vectors.extend(unit_vectors(answer.get("embeddings"), len(batch)))
                except ValueError as exc:
                    raise ModelError(f"Ollama at {self._url} sent no embeddings of {model} ({exc})") from exc
        return vectors

    async def aclose(self) -> None:
        await self._http.aclose()


async def _json(http: httpx.AsyncClient, method: str, path: str, body: Any = None) -> dict[str, Any]:
    response = await http.request(method, path, json=body)
    if not response.is_success:
        raise _Refused(response)
    return dict(response.json())


def _names(answer: dict[str, Any]) -> list[str]:
    return [str(model.get("model") or "") for model in answer["models"]]


class _Refused(Exception):
    """The server answered, with an error."""

    def __init__(self, response: httpx.Response) -> None:
        self.status = response.status_code
        self.text = error_text(response.content)


class _Mapped:
    """Turns what goes wrong into our errors: no answer, a refusal, something that is no Ollama."""

    def __init__(self, url: str, model: str = "") -> None:
        self._url = url
        self._model = model

    def __enter__(self) -> None:
        return None

    def __exit__(self, _type: object, exc: BaseException | None, _trace: object) -> None:
        match exc:
            case _Refused():
                raise failure(exc.status, exc.text, missing(self._model)) from exc
            case httpx.HTTPError():
                raise ModelUnavailable(unreachable(self._url, exc)) from exc
            case ValueError() | TypeError() | KeyError() | AttributeError():
                raise ModelError(f"the server at {self._url} does not speak Ollama's protocol") from exc
