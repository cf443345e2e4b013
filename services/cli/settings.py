"""What the command line knows of the stack: where the API is, which key to send, which model is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import AliasChoices, Field, SecretStr

from shared.errors import SettingsError
from shared.llm.defaults import embedding_model
from shared.llm.settings import BackendSettings, JudgeSettings, RespondentModel
from shared.participant.settings import Settings


class GatewayConfig(Settings):
    """The part of the gateway's settings that its clients need to know."""

    whole: ClassVar[bool] = False

    host: str | None = Field(
        default=None,
        min_length=1,
        validation_alias=AliasChoices("LOCAL2_API_HOST", "LOCAL2_GATEWAY_HOST"),
        description="Address on which the gateway listens",
    )
    port: int | None = Field(
        default=None,
        ge=1,
        le=65_535,
        validation_alias=AliasChoices("LOCAL2_API_PORT", "LOCAL2_GATEWAY_PORT"),
        description="Port on which the gateway listens",
    )
    admin_key: SecretStr | None = Field(default=None, description="The operator's key")


class ClientSettings(Settings):
    """Where the gateway answers. The key is LOCAL2_API_KEY, else LOCAL2_ADMIN_KEY, else the one in the data folder.

    `load` also hears what the file and the environment say to the gateway, unless something is said to `cli` itself.
    """

    api_url: str | None = Field(default=None, pattern=r"^https?://[^\s/]+", description="Address of the HTTP API")
    api_host: str = Field(
        default="127.0.0.1",
        min_length=1,
        validation_alias=AliasChoices("LOCAL2_GATEWAY_HOST", "LOCAL2_API_HOST"),
        description="Host of the HTTP API",
    )
    api_port: int = Field(
        default=8765,
        ge=1,
        le=65_535,
        validation_alias=AliasChoices("LOCAL2_GATEWAY_PORT", "LOCAL2_API_PORT"),
        description="Port of the HTTP API",
    )
    api_key: SecretStr | None = Field(default=None, description="Key sent with every request")
    admin_key: SecretStr | None = Field(default=None, description="The operator's key")
    redis_appendfsync: Literal["everysec", "always", "no"] = Field(
        default="everysec", description="How often the embedded Redis syncs its append-only file to the disk"
    )

    @classmethod
    def load(cls, participant: str = "cli", overrides: Mapping[str, Any] | None = None) -> Self:
        own = super().load(participant, overrides)
        gateway = GatewayConfig.load("gateway")
        heard = {
            mine: getattr(gateway, its)
            for mine, its in _OF_THE_GATEWAY.items()
            if its in gateway.model_fields_set and mine not in own.model_fields_set
        }
        return super().load(participant, {**heard, **(overrides or {})}) if heard else own

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
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError) as exc:
            raise SettingsError(f"{self.admin_key_path} cannot be read ({exc}); set LOCAL2_API_KEY") from exc


# Fields of ClientSettings by the gateway's names for the same.
_OF_THE_GATEWAY = {"api_host": "host", "api_port": "port", "admin_key": "admin_key", "data_dir": "data_dir"}


class McpConfig(Settings):
    """The part of mcp's settings that says whether it is needed."""

    whole: ClassVar[bool] = False

    servers: dict[str, Any] = Field(default={}, description="MCP servers by name")


class ExtrasConfig(Settings):
    """The part of any participant's settings that needs an optional package."""

    whole: ClassVar[bool] = False

    files_bucket: str | None = Field(default=None, description="Bucket of memory's files")


class KnowledgeConfig(Settings):
    """The part of knowledge's settings that says where its facts are."""

    whole: ClassVar[bool] = False

    store: str = Field(default="sqlite", description="Store of knowledge")
    store_path: Path | None = Field(default=None, description="SQLite file")

    @property
    def on_server(self) -> bool:
        return "://" in self.store

    @property
    def path(self) -> Path:
        """The file of the embedded database."""
        return self._file.with_suffix(".sqlite") if self._file.suffix == ".lbug" else self._file

    @property
    def old_path(self) -> Path:
        """The file of an older release's graph, which knowledge migrates at its start."""
        return self._file.with_suffix(".lbug")

    @property
    def _file(self) -> Path:
        return self.store_path or self.data_dir / "knowledge.sqlite"


class DrainConfig(Settings):
    """What any participant says of its own end."""

    whole: ClassVar[bool] = False


class ModelConfig(RespondentModel):
    """The part of a respondent's settings that decides which model server is needed."""

    @property
    def named(self) -> bool:
        """Whether somebody has said which server or model is to answer."""
        return bool({"backend", "ollama_host", "model"} & self.model_fields_set)


class MemoryConfig(BackendSettings):
    """The part of memory's settings that decides which model must be there."""

    whole: ClassVar[bool] = False

    embedding_model: str | None = Field(default=None, description="Name of the embedding model")

    @property
    def embedder(self) -> str:
        """The name of the embedding model."""
        return self.embedding_model or embedding_model(self.backend, self.base_url)


class StoreConfig(Settings):
    """The part of memory's settings that says where it keeps what it knows."""

    whole: ClassVar[bool] = False

    chroma_path: Path | None = Field(default=None, description="Folder of the embedded store")
    chroma_url: str | None = Field(default=None, description="Address of a Chroma server")

    @property
    def folder(self) -> Path:
        return self.chroma_path or self.data_dir / "chroma"


class RewardConfig(Settings):
    """The part of reward's settings that says where its database is."""

    whole: ClassVar[bool] = False

    database: Path | None = Field(default=None, description="SQLite file")

    @property
    def path(self) -> Path:
        return self.database or self.data_dir / "preferences.sqlite"


class CriticConfig(JudgeSettings):
    """The part of the critic's settings that decides which model must be there."""

    whole: ClassVar[bool] = False


class SearchConfig(Settings):
    """The part of web_search's settings that decides which search service is asked."""

    whole: ClassVar[bool] = False

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
