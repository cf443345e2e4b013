"""Opening a model by the name of its backend.

Only the package of the chosen backend is imported: three of them take too much memory in an idle participant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, assert_never

from shared.extras import required_by
from shared.llm.adapter import Wire, WiredChatModel
from shared.llm.observed import ClosableEmbeddingModel as ClosableEmbeddingModel
from shared.llm.observed import ObservedEmbeddings

Backend = Literal["ollama", "openai", "google_genai"]

# Seconds between two checks of a model server. uvicorn, and so vLLM, closes an idle connection after five seconds; a
# shorter pause lets all checks use one connection.
LOOK_SECONDS = 4.0

# Names of OpenTelemetry's GenAI conventions. All servers with OpenAI's protocol have the same name.
PROVIDERS: dict[Backend, str] = {"ollama": "ollama", "openai": "openai", "google_genai": "gcp.gemini"}


def open_chat_model(
    backend: Backend,
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    keep_alive: str | None = None,
    ca_file: Path | None = None,
) -> WiredChatModel:
    """Return a chat model; close it with `aclose`. The first call opens the connection.

    base_url: None: the backend's default address (for Ollama also a host or host:port, as in OLLAMA_HOST).
    ca_file: further trusted certificates in PEM form.
    keep_alive: how long Ollama keeps the model loaded (`5m`, `-1` for ever); other backends ignore it.
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
    """Return an embedding model of the same backends; close it with `aclose`."""
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
