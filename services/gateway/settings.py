"""Settings of the gateway."""

from __future__ import annotations

import ipaddress
import re
from typing import ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import AliasChoices, Field, SecretStr, model_validator

from shared.participant.settings import Settings, kept_days


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def names_loopback(address: str) -> bool:
    """Whether an address, or a host behind two slashes, names this machine; what cannot be read names none."""
    try:
        host = urlsplit(address).hostname
    except ValueError:
        return False
    return host is not None and is_loopback(host)


KEY_RULE = "at least 8 printable characters without spaces"


def is_key(text: str) -> bool:
    """Whether it can be sent as a key at all, and is no key by accident."""
    return re.fullmatch(r"[\x21-\x7e]{8,}", text) is not None


class GatewaySettings(Settings):
    runtime: ClassVar[frozenset[str]] = Settings.runtime | {
        "max_backlog", "max_session_backlog", "deadline_seconds", "client_gone_seconds", "keep_days_sessions",
    }  # fmt: skip

    expects: list[str] = Field(
        default=[],
        description="Participants with tools that are started together with this one: for a minute it is not ready "
        "without them, so that the first question has all tools",
    )
    host: str = Field(
        default="127.0.0.1",
        validation_alias=AliasChoices("LOCAL2_API_HOST", "LOCAL2_GATEWAY_HOST"),
        description="Address to listen on",
    )
    port: int = Field(
        default=8765,
        ge=0,
        le=65_535,
        validation_alias=AliasChoices("LOCAL2_API_PORT", "LOCAL2_GATEWAY_PORT"),
        description="TCP port to listen on; 0 takes a free one",
    )
    auth: Literal["on", "off"] = Field(default="on", description="off: no API keys; only on a loopback address")
    admin_key: SecretStr | None = Field(
        default=None, description="The administrator's API key; else one is generated and kept in the data folder"
    )
    mcp_origins: list[str] = Field(
        default=[],
        validation_alias=AliasChoices("LOCAL2_MCP_ORIGINS", "LOCAL2_GATEWAY_MCP_ORIGINS"),
        description="Origins (https://host) of web pages that may use /mcp beside those of this machine",
    )
    max_backlog: int = Field(default=1_000, ge=1, description="Unfinished queries above which new ones are refused")
    max_session_backlog: int = Field(default=100, ge=1, description="The same for the queries of one session")
    deadline_seconds: float = Field(
        default=900.0, gt=0, le=86_400, description="Seconds in which a query must be answered"
    )
    client_gone_seconds: float = Field(
        default=3.0,
        ge=0,
        le=3_600,
        description="Seconds after which a run of OpenAI's API ends whose client has gone; 0: never",
    )
    keep_days_sessions: int = kept_days("Sessions that nobody has used for so many days are deleted, but pinned ones")
    bus_wait: float = Field(default=3.0, gt=0, description="Seconds that a request waits for the bus before it fails")
    tool_timeout: float = Field(
        default=30.0,
        gt=0,
        description="Seconds that a tool call over HTTP may take. A value that is set bounds every tool; left at its "
        "default, a tool may take the longer time that it announces",
    )
    restore_max_bytes: int = Field(
        default=16 * 1024**3,
        ge=1,
        description="Largest backup that may be sent to be restored; it is kept in data_dir meanwhile",
    )
    client_seconds: float = Field(
        default=30.0,
        gt=0,
        description="Seconds of silence after which a request's body is refused, and of waiting for it until it must "
        "come with 8 kB/s",
    )
    max_connections: int = Field(
        default=8_192,
        ge=1,
        description="Open connections above which requests get 503; the limit of open files is raised to fit",
    )
    max_header_bytes: int = Field(
        default=98_304,
        ge=8_192,
        description="Bytes that the URL and the headers of a request may have together before their end has come",
    )
    keep_alive_seconds: int = Field(
        default=75, ge=1, description="Seconds after which a connection without a further request is closed"
    )
    keepalive: float = Field(default=15.0, gt=0, description="Seconds of silence after which a stream says it lives")
    follow_seconds: float = Field(
        default=120.0, gt=0, description="Seconds that a followed stream waits for the critique after the answer"
    )

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        if self.auth == "off" and not is_loopback(self.host):
            raise ValueError(
                f"auth is off, but the host {self.host} is not a loopback address: anybody could use this assistant; "
                "set LOCAL2_AUTH=on, or LOCAL2_API_HOST=127.0.0.1"
            )
        if self.admin_key is not None and not is_key(self.admin_key.get_secret_value()):
            raise ValueError(f"LOCAL2_ADMIN_KEY must be {KEY_RULE}")
        return self
