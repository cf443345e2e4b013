"""Ollama's models and embeddings, by the `ollama` package: list, show, ps, pull, embed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx

from shared.llm.failures import error_text, failure, what
from shared.llm.port import ModelError, ModelUnavailable
from shared.llm.vectors import unit

if TYPE_CHECKING:
    from ollama import AsyncClient

DEFAULT_PORT = 11434
# Longest wait for an answer that needs no model: list, show.
ADMIN_TIMEOUT = 10.0
_EMBED_BATCH = 64


def ollama_url(host: str | None) -> str:
    """The base URL for a value of OLLAMA_HOST: a URL, a host, or host:port; nothing means this machine."""
    value = (host or "").strip().rstrip("/") or "127.0.0.1"
    scheme, separator, _ = value.partition("://")
    parts = urlsplit(value if separator else f"http://{value}")
    # 0.0.0.0 is where a server listens, not where a client connects to.
    name = "127.0.0.1" if parts.hostname in (None, "0.0.0.0") else parts.hostname or ""
    if ":" in name:
        name = f"[{name}]"
    port = parts.port or (DEFAULT_PORT if not separator else {"https": 443}.get(scheme, 80))
    return f"{parts.scheme}://{name}:{port}{parts.path}"


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

    def __init__(self, base_url: str | None, api_key: str | None = None) -> None:
        self._url = ollama_url(base_url)
        self._api_key = api_key
        self._opened: AsyncClient | None = None

    async def models(self) -> list[str]:
        """Names with tags, as `ollama list` shows them."""
        with _Mapped(self._url):
            return [model.model or "" for model in (await self._client().list()).models]

    async def loaded(self) -> list[str]:
        """Names of the models in memory."""
        with _Mapped(self._url):
            return [model.model or "" for model in (await self._client().ps()).models]

    async def capabilities(self, model: str) -> frozenset[str]:
        """`completion`, `tools`, `thinking`, `embedding`, … of one model. Raises ModelMissing."""
        with _Mapped(self._url, model):
            return frozenset((await self._client().show(model)).capabilities or ())

    async def pull(self, model: str) -> AsyncGenerator[PullProgress, None]:
        """Downloads a model and says how far it is; complete when it ends without an error."""
        from ollama import AsyncClient

        last = ""
        # A client of its own: a layer may stall for minutes, a listing may not.
        client = AsyncClient(host=self._url, headers=self._headers(), timeout=300)
        try:
            with _Mapped(self._url, model):
                async for part in await client.pull(model, stream=True):
                    last = part.status or ""
                    yield PullProgress(last, part.total, part.completed)
        finally:
            await client.close()  # type: ignore[no-untyped-call]
        if last != "success":
            raise ModelUnavailable(f"the pull of {model} broke off at: {last or 'its beginning'}")

    async def aclose(self) -> None:
        if self._opened is not None:
            await self._opened.close()  # type: ignore[no-untyped-call]
            self._opened = None

    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self._api_key}"} if self._api_key else {}

    def _client(self) -> AsyncClient:
        # Imported at first use: the package costs memory, and a chat stream does without it.
        if self._opened is None:
            from ollama import AsyncClient

            self._opened = AsyncClient(host=self._url, headers=self._headers(), timeout=ADMIN_TIMEOUT)
        return self._opened


class OllamaEmbeddings:
    """`/api/embed`; the vectors come normalised. Raises ModelError."""

    def __init__(self, base_url: str | None, api_key: str | None = None, keep_alive: str | None = None) -> None:
        from ollama import AsyncClient

        self._url = ollama_url(base_url)
        self._keep_alive = keep_alive_value(keep_alive)
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        # The model may have to be loaded first.
        self._client = AsyncClient(host=self._url, headers=headers, timeout=httpx.Timeout(120, connect=10))

    async def embed(self, model: str, texts: Sequence[str]) -> list[list[float]]:
        vectors: list[list[float]] = []
        for start in range(0, len(texts), _EMBED_BATCH):
            batch = list(texts[start : start + _EMBED_BATCH])
            with _Mapped(self._url, model):
                answer = await self._client.embed(model, input=batch, keep_alive=self._keep_alive)
            if len(answer.embeddings) != len(batch):
                raise ModelError(f"{model} gave {len(answer.embeddings)} vectors for {len(batch)} texts")
            vectors.extend(unit(vector) for vector in answer.embeddings)
        return vectors

    async def aclose(self) -> None:
        await self._client.close()  # type: ignore[no-untyped-call]


class _Mapped:
    """Turns what the `ollama` package raises into our errors."""

    def __init__(self, url: str, model: str = "") -> None:
        self._url = url
        self._model = model

    def __enter__(self) -> None:
        return None

    def __exit__(self, _type: object, exc: BaseException | None, _trace: object) -> None:
        from ollama import ResponseError

        match exc:
            case ResponseError():
                status = exc.status_code if exc.status_code > 0 else None
                raise failure(status, error_text(exc.error), missing(self._model)) from exc
            case ConnectionError() | httpx.HTTPError():
                # The package's own sentence for this is long and names a download page.
                cause = exc if isinstance(exc, httpx.HTTPError) else ConnectionError("no connection")
                raise ModelUnavailable(unreachable(self._url, cause)) from exc
            case ValueError():
                raise ModelError(f"the server at {self._url} does not speak Ollama's protocol") from exc
