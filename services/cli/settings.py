"""What the command line knows of the stack: where the API is, which key to send, which model is wanted."""

from __future__ import annotations

from pathlib import Path

from pydantic import AliasChoices, Field, SecretStr

from shared.errors import SettingsError
from shared.settings import Settings


class ClientSettings(Settings):
    """Where the gateway answers. The key is LOCAL2_API_KEY, else LOCAL2_ADMIN_KEY, else the one in the data folder."""

    api_url: str | None = Field(default=None, pattern=r"^https?://[^\s/]+", description="Address of the HTTP API")
    api_host: str = Field(
        default="127.0.0.1",
        min_length=1,
        validation_alias=AliasChoices("LOCAL2_API_HOST", "LOCAL2_GATEWAY_HOST"),
        description="Host of the HTTP API",
    )
    api_port: int = Field(
        default=8765,
        ge=1,
        le=65_535,
        validation_alias=AliasChoices("LOCAL2_API_PORT", "LOCAL2_GATEWAY_PORT"),
        description="Port of the HTTP API",
    )
    api_key: SecretStr | None = Field(default=None, description="Key sent with every request")
    admin_key: SecretStr | None = Field(default=None, description="The operator's key")

    @property
    def base_url(self) -> str:
        if self.api_url:
            return self.api_url.rstrip("/")
        # An address for listening on every interface is not one to connect to.
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.api_host, self.api_host)
        return f"http://[{host}]:{self.api_port}" if ":" in host else f"http://{host}:{self.api_port}"

    @property
    def admin_key_path(self) -> Path:
        return self.data_dir / "admin.key"

    def key(self) -> str | None:
        """The API key to send, or None when there is none."""
        for given in (self.api_key, self.admin_key):
            if given is not None and given.get_secret_value():
                return given.get_secret_value()
        try:
            return self.admin_key_path.read_text(encoding="ascii").strip() or None
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as exc:
            raise SettingsError(f"{self.admin_key_path} cannot be read ({exc}); set LOCAL2_API_KEY") from exc


class ModelWish(Settings):
    """The part of a respondent's settings that decides which model server is needed."""

    backend: str = Field(default="ollama", description="ollama, openai or google_genai")
    model: str = Field(default="gemma4:e4b", description="Name of the model")
    ollama_host: str | None = Field(
        default=None,
        validation_alias=AliasChoices("LOCAL2_OLLAMA_HOST", "OLLAMA_HOST"),
        description="Address of Ollama",
    )
    base_url: str | None = Field(default=None, description="Address of an OpenAI-compatible server")
    backend_api_key: SecretStr | None = Field(
        default=None,
        validation_alias=AliasChoices("LOCAL2_BACKEND_API_KEY", "OPENAI_API_KEY", "GEMINI_API_KEY"),
        description="Key of the model backend",
    )


class SearchWish(Settings):
    """The part of web_search's settings that decides which search service is asked."""

    provider: str | None = Field(default=None, description="searxng, brave, tavily or mock")
    searxng_url: str = Field(
        default="http://localhost:8080",
        validation_alias=AliasChoices("searxng_url", "SEARXNG_URL"),
        description="Address of SearXNG",
    )
    brave_api_key: SecretStr | None = Field(
        default=None, validation_alias=AliasChoices("brave_api_key", "BRAVE_API_KEY"), description="Key of Brave Search"
    )
    tavily_api_key: SecretStr | None = Field(
        default=None, validation_alias=AliasChoices("tavily_api_key", "TAVILY_API_KEY"), description="Key of Tavily"
    )
