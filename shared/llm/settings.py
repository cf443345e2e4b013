"""What a participant that calls a model has to know of its backend."""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, AliasChoices, Field, SecretStr, field_validator

from shared.llm.adapter import WiredChatModel
from shared.llm.address import google_url, ollama_url, openai_url, origin
from shared.llm.factory import ClosableEmbeddingModel, open_chat_model, open_embedding_model
from shared.participant.settings import Settings

# Prometheus 2 7B as Ollama's library has it, and names by which it goes elsewhere, which that library has not.
JUDGE = "ggozad/prometheus2"
_JUDGES = frozenset({"prometheus", "prometheus:7b"})

JudgeName = Annotated[str, Field(min_length=1), AfterValidator(lambda name: JUDGE if name in _JUDGES else name)]

# The backends' own keys by the names that their makers gave them.
_KEYS = {"ollama": "ollama_api_key", "openai": "openai_api_key", "google_genai": "gemini_api_key"}


class BackendSettings(Settings):
    """A key is sent to the backend that it is named for: Ollama gets Ollama's alone."""

    backend: Literal["ollama", "openai", "google_genai"] = Field(default="ollama", description="Kind of model server")
    ollama_host: str = Field(
        default="http://127.0.0.1:11434",
        validation_alias=AliasChoices("LOCAL2_OLLAMA_HOST", "OLLAMA_HOST"),
        description="Address of the Ollama server",
    )
    base_url: str | None = Field(default=None, description="Address of an OpenAI-compatible or Gemini API server")
    backend_api_key: SecretStr | None = Field(
        default=None,
        validation_alias=AliasChoices("LOCAL2_BACKEND_API_KEY", "api_key"),
        description="Key of the server at base_url",
    )
    openai_api_key: SecretStr | None = Field(
        default=None,
        validation_alias=AliasChoices("OPENAI_API_KEY"),
        description="The same for the backend openai, where backend_api_key is not set",
    )
    gemini_api_key: SecretStr | None = Field(
        default=None,
        validation_alias=AliasChoices("GEMINI_API_KEY"),
        description="The same for the backend google_genai, where backend_api_key is not set",
    )
    ollama_api_key: SecretStr | None = Field(
        default=None, validation_alias=AliasChoices("OLLAMA_API_KEY"), description="Key of the Ollama server"
    )
    ca_file: Path | None = Field(
        default=None, description="Certificates (PEM) that the model server's is checked against, beside the usual ones"
    )
    keep_alive: str | None = Field(default=None, description="How long Ollama keeps the model loaded, e.g. 30m")
    num_ctx: int = Field(default=32_000, ge=512, description="Context in tokens; the same for all participants")

    @field_validator("ollama_host")
    @classmethod
    def _of_ollama(cls, value: str) -> str:
        ollama_url(value)
        return value

    @field_validator("base_url")
    @classmethod
    def _of_a_server(cls, value: str | None) -> str | None:
        google_url(value)
        return value

    @field_validator("backend_api_key", "openai_api_key", "gemini_api_key", "ollama_api_key")
    @classmethod
    def _can_be_sent(cls, value: SecretStr | None) -> SecretStr | None:
        # a line's end comes with keys that are read from files
        key = value.get_secret_value().strip() if value else ""
        if not re.fullmatch(r"[\x20-\x7e]*", key):
            raise ValueError("a key has printable ASCII characters only")
        return SecretStr(key) if key else None

    @field_validator("ca_file")
    @classmethod
    def _of_certificates(cls, value: Path | None) -> Path | None:
        if value is not None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(value)
            except OSError as exc:
                reason = "there is no certificate in PEM form in it" if isinstance(exc, ssl.SSLError) else exc.strerror
                raise ValueError(f"{value} cannot be used: {reason}") from None
        return value

    @classmethod
    def settle(cls, for_all: dict[str, Any], for_one: dict[str, Any]) -> dict[str, Any]:
        """A key that is given to all is for the server that is named to all: another one gets its own key or none."""
        values = super().settle(for_all, for_one)
        named = {"backend", "base_url"} & for_all.keys()
        if named and "backend_api_key" not in for_one and _place(for_all) != _place(values):
            values.pop("backend_api_key", None)
        return values

    @property
    def address(self) -> str:
        """Where the backend is."""
        match self.backend:
            case "ollama":
                return ollama_url(self.ollama_host)
            case "openai":
                return openai_url(self.base_url)
            case "google_genai":
                return google_url(self.base_url)

    @property
    def key(self) -> str | None:
        """What the backend is sent."""
        names = [_KEYS[self.backend]] if self.backend == "ollama" else ["backend_api_key", _KEYS[self.backend]]
        found: list[SecretStr | None] = [getattr(self, name) for name in names]
        return next((key.get_secret_value() for key in found if key is not None), None)

    def chat_model(self) -> WiredChatModel:
        """A chat model of this backend; close it with `aclose`."""
        return open_chat_model(
            self.backend, base_url=self.address, api_key=self.key, keep_alive=self.keep_alive, ca_file=self.ca_file
        )

    def embeddings(self) -> ClosableEmbeddingModel:
        """An embedding model of this backend; close it with `aclose`."""
        return open_embedding_model(
            self.backend, base_url=self.address, api_key=self.key, keep_alive=self.keep_alive, ca_file=self.ca_file
        )


class RespondentModel(BackendSettings):
    """The part of the generator's settings that names its model."""

    whole: ClassVar[bool] = False

    model: str = Field(default="gemma4:e4b", min_length=1, description="Model name at the backend")


class JudgeSettings(BackendSettings):
    """The part of the critic's settings that names the judge."""

    # Not LOCAL2_MODEL, which names the respondents' model: a model grades its own answers too well.
    model: JudgeName = Field(
        default=JUDGE,
        validation_alias=AliasChoices("LOCAL2_CRITIC_MODEL"),
        description="The judge's name at the backend; without one, the backends openai and google_genai judge with the "
        "generator's model, where it has the same server",
    )

    @classmethod
    def settle(cls, for_all: dict[str, Any], for_one: dict[str, Any]) -> dict[str, Any]:
        """Merge the layers. The default judge is in Ollama's library only; at another server the generator's model
        judges, if both use the same server."""
        values = super().settle(for_all, for_one)
        if "model" not in values and values.get("backend", "ollama") != "ollama":
            generator = RespondentModel.load("generator")
            if _place(values) == _place({"backend": generator.backend, "base_url": generator.base_url}):
                values["model"] = generator.model
        return values


def _place(values: dict[str, Any]) -> tuple[Any, Any]:
    """Which server the values name, as far as they can be read: what cannot is said by the fields' own checks."""
    backend, url = values.get("backend", "ollama"), values.get("base_url")
    try:
        return backend, origin(google_url(url)) if url else None
    except (ValueError, AttributeError):
        return backend, url
