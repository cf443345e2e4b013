"""The one place that knows which adapter belongs to which backend.

A backend's package is imported only when it is chosen: an idle participant should not carry three of them in memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, assert_never

from shared.extras import required_by
from shared.llm.adapter import Wire, WiredChatModel
from shared.llm.observed import ClosableEmbeddingModel as ClosableEmbeddingModel
from shared.llm.observed import ObservedEmbeddings

Backend = Literal["ollama", "openai", "google_genai"]

# Between two looks at a participant's model server: less than the five seconds after which uvicorn, and vLLM with it,
# closes an idle connection, so that one connection serves all of them.
LOOK_SECONDS = 4.0

# As OpenTelemetry's GenAI conventions call them; a server that speaks OpenAI's protocol is not told apart.
PROVIDERS: dict[Backend, str] = {"ollama": "ollama", "openai": "openai", "google_genai": "gcp.gemini"}


def open_chat_model(
    backend: Backend,
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    keep_alive: str | None = None,
    ca_file: Path | None = None,
) -> WiredChatModel:
    """A chat model; close it with `aclose`. No connection is made before the first call.

    base_url: None means the backend's usual address (for Ollama also a host or host:port, as in OLLAMA_HOST).
    ca_file: certificates in PEM form that the server's is checked against, beside the usual ones.
    keep_alive: how long Ollama keeps the model loaded (`5m`, `-1` for ever); other backends have no such thing.
    """
    wire: Wire
    match backend:
        case "ollama":
            from shared.llm.ollama import OllamaWire

            wire = OllamaWire(base_url, api_key, keep_alive, ca_file)
        case "openai":
            from shared.llm.openai_or_ollama import CompatibleWire

            wire = CompatibleWire(base_url, api_key, keep_alive, ca_file)
        case "google_genai":
            with required_by("LOCAL2_BACKEND=google_genai", "google-genai"):
                from shared.llm.google_genai import GoogleWire

            wire = GoogleWire(base_url, api_key, ca_file)
        case _:
            assert_never(backend)
    return WiredChatModel(wire, PROVIDERS[backend])


def open_embedding_model(
    backend: Backend,
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    keep_alive: str | None = None,
    ca_file: Path | None = None,
) -> ClosableEmbeddingModel:
    """An embedding model over the same backends; close it with `aclose`."""
    model: ClosableEmbeddingModel
    match backend:
        case "ollama":
            from shared.llm.ollama_admin import OllamaEmbeddings

            model = OllamaEmbeddings(base_url, api_key, keep_alive, ca_file)
        case "openai":
            from shared.llm.openai import OpenAIEmbeddings

            model = OpenAIEmbeddings(base_url, api_key, ca_file)
        case "google_genai":
            with required_by("LOCAL2_BACKEND=google_genai", "google-genai"):
                from shared.llm.google_genai import GoogleEmbeddings

            model = GoogleEmbeddings(base_url, api_key, ca_file)
        case _:
            assert_never(backend)
    return ObservedEmbeddings(PROVIDERS[backend], model)
