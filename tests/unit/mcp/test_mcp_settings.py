"""Servers in the settings, and what they are given of the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.mcp.secrets import Missing, Secrets
from services.mcp.settings import McpSettings, Server
from shared.errors import SettingsError


def test_a_server_is_a_command_or_an_address_in_short_or_in_full() -> None:
    servers = McpSettings(
        servers={  # type: ignore[arg-type]
            "short": "npx -y 'a server' /data",
            "there": "https://example.com/mcp",
            "full": {"command": ["git-server"], "allow": ["log"], "env": ["GIT_TOKEN"]},
        }
    ).servers
    assert servers["short"].command == ("npx", "-y", "a server", "/data")
    assert servers["there"].url == "https://example.com/mcp"
    assert (servers["full"].allow, servers["full"].env) == (("log",), ("GIT_TOKEN",))


@pytest.mark.parametrize(
    ("servers", "told"),
    [
        ({"a": {}}, "either command or url is needed"),
        ({"a": {"command": "x", "url": "http://x"}}, "either command or url is needed"),
        ({"a": {"url": "ftp://x"}}, "servers.a.url"),
        ({"a": {"url": "http://x", "env": ["A"]}}, "given headers"),
        ({"a": {"command": "x", "headers": {"A": "b"}}}, "given env"),
        ({"a": {"command": "x", "env": ["A B"]}}, "servers.a.env.0"),
        ({"a": {"command": "x", "environ": []}}, "servers.a.environ"),
        ({"a__b": "x"}, "a server's name"),
        ({"a_": "x"}, "a server's name"),
        ({"a b": "x"}, "a server's name"),
        ({"a" * 25: "x"}, "a server's name"),
        ({"a": "unclosed 'quote"}, "servers"),
    ],
)
def test_a_wrong_server_is_told_by_its_place(
    servers: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import yaml

    (tmp_path / "local2.yaml").write_text(yaml.safe_dump({"mcp": {"servers": servers}}))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError) as raised:
        McpSettings.load("mcp")
    assert told in str(raised.value)


def test_values_of_the_environment_are_put_in_and_taken_out_again() -> None:
    server = Server(url="https://example.com/${PLACE}", headers={"Authorization": "Bearer ${TOKEN}"})
    secrets = Secrets(server, {"PLACE": "a", "TOKEN": "tok-123456", "OTHER": "unknown-to-it"})
    assert secrets.put_in(server.url) == "https://example.com/a"
    assert secrets.put_in("Bearer ${TOKEN}") == "Bearer tok-123456"
    assert secrets.masked("a tok-123456, unknown-to-it") == "a [TOKEN], unknown-to-it"
    assert secrets.masked_in({"tok-123456": ["x tok-123456", 1, None]}) == {"[TOKEN]": ["x [TOKEN]", 1, None]}


def test_of_two_values_the_longer_one_is_masked_first() -> None:
    secrets = Secrets(Server(command="x", env=("A", "B")), {"A": "secret", "B": "secret-and-more"})
    assert secrets.masked("secret-and-more, secret") == "[B], [A]"


def test_a_variable_that_is_missing_is_named() -> None:
    with pytest.raises(Missing, match="the environment has no A, B"):
        Secrets(Server(command=("x", "${B}"), env=("A",)), {})
