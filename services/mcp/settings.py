"""Settings of mcp: the servers whose tools are offered."""

from __future__ import annotations

import re
import shlex
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from shared.participant.settings import Settings

# What stands before the two underscores of a tool's name: so that no two servers can make the same one.
_SERVER = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,22}[A-Za-z0-9-])?")
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class Server(BaseModel):
    """One MCP server: a program that is started here and speaks over its standard input and output, or an address.

    `${NAME}` in a command's arguments, in the address and in a header's value stands for a variable of the environment.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: tuple[str, ...] = Field(default=(), description="Program and arguments, as a list or as one line")
    url: str = Field(default="", pattern=r"^(https?://\S+)?$", description="Address of a server that speaks HTTP")
    allow: tuple[str, ...] = Field(
        default=(), description="Names of the tools that are offered, * for any characters; none named: all of them"
    )
    env: tuple[Variable, ...] = Field(
        default=(), description="Variables of the environment that the program is given beside PATH, HOME and the like"
    )
    headers: dict[str, str] = Field(default={}, description="Sent with every request to the address")

    @field_validator("command", mode="before")
    @classmethod
    def _one_line(cls, value: Any) -> Any:
        return shlex.split(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_of_both(self) -> Server:
        if bool(self.command) == bool(self.url):
            raise ValueError("either command or url is needed, and not both")
        if self.url and self.env:
            raise ValueError("env is for a command; a server with a url is given headers")
        if self.command and self.headers:
            raise ValueError("headers are for a url; a command is given env")
        return self


class McpSettings(Settings):
    runtime: ClassVar[frozenset[str]] = Settings.runtime | {"timeout", "max_bytes", "approved"}

    servers: dict[str, Server] = Field(
        default={}, description="Servers by name: a command or url, or both forms in full (docs/mcp.md)"
    )
    timeout: float = Field(default=30.0, gt=0, le=3_600, description="Seconds that one call of a tool may take")
    start_seconds: float = Field(
        default=60.0, gt=0, le=3_600, description="Seconds until a server has started and told its tools"
    )
    restart_seconds: float = Field(
        default=1.0, gt=0, le=30, description="Pause before a server is started again; it doubles up to 30"
    )
    max_bytes: int = Field(
        default=1_000_000, ge=1_000, le=10_000_000, description="Size of a result's text, beyond which it is cut"
    )
    approved: dict[str, str] = Field(
        default={}, description="Tools that changed and may be offered all the same: name → hash (local2 mcp approve)"
    )

    @field_validator("servers", mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        """A text alone is an address or a command."""
        if not isinstance(value, dict):
            return value
        return {name: _spelt_out(server) for name, server in value.items()}

    @field_validator("servers")
    @classmethod
    def _named(cls, value: dict[str, Server]) -> dict[str, Server]:
        for name in value:
            if not _SERVER.fullmatch(name) or "__" in name:
                raise ValueError(
                    f"a server's name has at most 24 letters, digits, - and single _, and no _ at its ends: {name!r}"
                )
        return value


def _spelt_out(server: Any) -> Any:
    if isinstance(server, str):
        return {"url": server} if re.match("https?://", server) else {"command": server}
    return server
