"""What a participant that calls a model has to know of its backend."""

from __future__ import annotations

from typing import Literal

from pydantic import AliasChoices, Field, SecretStr

from shared.llm.adapter import WiredChatModel
from shared.llm.factory import ClosableEmbeddingModel, open_chat_model, open_embedding_model
from shared.participant.settings import Settings


class BackendSettings(Settings):
    backend: Literal["ollama", "openai", "google_genai"] = Field(default="ollama", description="Kind of model server")
    ollama_host: str = Field(
        default="http://127.0.0.1:11434",
        validation_alias=AliasChoices("LOCAL2_OLLAMA_HOST", "OLLAMA_HOST"),
        description="Address of the Ollama server",
    )
    base_url: str | None = Field(default=None, description="Address of an OpenAI-compatible or Gemini API server")
    api_key: SecretStr | None = Field(
        default=None,
        validation_alias=AliasChoices("LOCAL2_BACKEND_API_KEY", "OPENAI_API_KEY", "GEMINI_API_KEY"),
        description="Key of the model backend",
    )
    keep_alive: str | None = Field(default=None, description="How long Ollama keeps the model loaded, e.g. 30m")
    num_ctx: int = Field(default=32_000, ge=512, description="Context in tokens; the same for all participants")

    @property
    def address(self) -> str | None:
        """Where the backend is; None means its usual address."""
        return self.ollama_host if self.backend == "ollama" else self.base_url

    def chat_model(self) -> WiredChatModel:
        """A chat model of this backend; close it with `aclose`."""
        return open_chat_model(self.backend, base_url=self.address, api_key=self._key(), keep_alive=self.keep_alive)

    def embeddings(self) -> ClosableEmbeddingModel:
        """An embedding model of this backend; close it with `aclose`."""
        return open_embedding_model(
            self.backend, base_url=self.address, api_key=self._key(), keep_alive=self.keep_alive
        )

    def _key(self) -> str | None:
        return self.api_key.get_secret_value() if self.api_key else None
