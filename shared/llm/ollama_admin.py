"""Ollama's models and embeddings: `/api/tags`, `ps`, `show`, `pull`, `embed`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from shared.llm.address import ollama_url as ollama_url
from shared.llm.discovery import of_ollama
from shared.llm.failures import error_text, failure
from shared.llm.http import Bound
from shared.llm.port import ModelError, ModelFacts, ModelUnavailable
from shared.llm.server import NDJSON, OLLAMA, Kind, ModelServer
from shared.llm.vectors import unit_vectors

# Longest wait for an answer that needs no model: list, show.
ADMIN_TIMEOUT = 10.0
# A layer of a pull may stall, and a model may have to be loaded before it embeds.
PULL_TIMEOUT = 300.0
EMBED_TIMEOUT = 120.0
_EMBED_BATCH = 64
# Lines of progress come for hours: a bound as of an answer of so many tokens.
_PULL_TOKENS = 1_000_000


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
    """What the server has: models, their abilities, pulling one. Raises ModelError."""

    def __init__(
        self,
        base_url: str | None,
        api_key: str | None = None,
        ca_file: Path | None = None,
        kind: Kind = OLLAMA,
    ) -> None:
        self.server = ModelServer(kind, ollama_url(base_url), api_key, ca_file)

    async def models(self) -> list[str]:
        """Names with tags, as `ollama list` shows them."""
        return self._names(await self.server.ask("GET", "/api/tags", timeout=ADMIN_TIMEOUT))

    async def chat_models(self) -> list[str]:
        """Names of the models that can answer, as far as the list says (older servers do not tell)."""
        listed = await self.server.ask("GET", "/api/tags", timeout=ADMIN_TIMEOUT)
        names = self._names(listed)
        can = [model.get("capabilities") for model in listed["models"]]
        return [name for name, able in zip(names, can, strict=True) if isinstance(able, list) and "completion" in able]

    async def loaded(self) -> list[str]:
        """Names of the models in memory."""
        return self._names(await self.server.ask("GET", "/api/ps", timeout=ADMIN_TIMEOUT))

    async def version(self) -> str:
        """The server's version; empty when it does not say."""
        return str((await self.server.ask("GET", "/api/version", timeout=ADMIN_TIMEOUT)).get("version") or "")

    async def capabilities(self, model: str) -> frozenset[str]:
        """`completion`, `tools`, `thinking`, `embedding`, … of one model. Raises ModelMissing."""
        found = (await self._show(model)).get("capabilities")
        return frozenset(map(str, found if isinstance(found, list) else ()))

    async def facts(self, model: str) -> ModelFacts:
        """Windows and abilities of one model. Raises ModelMissing."""
        shown, loaded = await self._show(model), None
        if not shown.keys() & {"capabilities", "model_info", "details", "modelfile", "template"}:
            raise self.server.strange()
        # a proxy may let through what a chat needs, and no more
        with contextlib.suppress(ModelError):
            loaded = (await self.server.ask("GET", "/api/ps", timeout=ADMIN_TIMEOUT)).get("models")
        running = [one for one in loaded if isinstance(one, dict)] if isinstance(loaded, list) else []
        return of_ollama(shown, running, model)

    async def pull(self, model: str) -> AsyncGenerator[PullProgress, None]:
        """Downloads a model and says how far it is; complete when it ends without an error."""
        last, body, bound = "", {"model": model}, Bound(_PULL_TOKENS)
        lines = self.server.lines("/api/pull", body, bound, NDJSON, missing(model), silence=PULL_TIMEOUT)
        async with contextlib.aclosing(lines) as arrived:
            async for some in arrived:
                for line in filter(None, some):
                    part = self._progress(line, model)
                    last = part.status
                    yield part
        if last != "success":
            raise ModelUnavailable(f"the pull of {model} broke off at: {last or 'its beginning'}")

    def _progress(self, line: bytes, model: str) -> PullProgress:
        try:
            part = dict(orjson.loads(line))
        except (ValueError, TypeError) as exc:
            raise ModelUnavailable(f"the pull of {model} broke off at a line that cannot be read") from exc
        if part.get("error"):
            raise failure(None, error_text(line), missing(model))
        return PullProgress(str(part.get("status") or ""), _size(part.get("total")), _size(part.get("completed")))

    async def _show(self, model: str) -> dict[str, Any]:
        return await self.server.ask("POST", "/api/show", missing(model), {"model": model}, timeout=ADMIN_TIMEOUT)

    def _names(self, answer: dict[str, Any]) -> list[str]:
        try:
            return [str(model.get("model") or "") for model in answer["models"]]
        except (KeyError, TypeError, AttributeError) as exc:
            raise self.server.strange() from exc

    async def aclose(self) -> None:
        await self.server.aclose()


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
        self._server = ModelServer(OLLAMA, ollama_url(base_url), api_key, ca_file)

    async def embed(self, model: str, texts: Sequence[str]) -> list[list[float]]:
        vectors: list[list[float]] = []
        kept = {} if self._keep_alive is None else {"keep_alive": self._keep_alive}
        for start in range(0, len(texts), _EMBED_BATCH):
            batch = list(texts[start : start + _EMBED_BATCH])
            body = {"model": model, "input": batch, **kept}
            answer = await self._server.ask("POST", "/api/embed", missing(model), body, timeout=EMBED_TIMEOUT)
            try:
                vectors.extend(unit_vectors(answer.get("embeddings"), len(batch)))
            except ValueError as exc:
                raise ModelError(f"Ollama at {self._server.url} sent no embeddings of {model} ({exc})") from exc
        return vectors

    async def aclose(self) -> None:
        await self._server.aclose()


def _size(value: Any) -> int | None:
    return value if isinstance(value, int) else None
