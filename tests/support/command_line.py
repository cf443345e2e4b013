"""The command line beside a gateway of the test's own process."""

from __future__ import annotations

import asyncio

import pytest
from click.testing import Result
from support.http_gateway import ADMIN_KEY, Site
from typer.testing import CliRunner

from services.cli.app import app


async def local2(monkeypatch: pytest.MonkeyPatch, site: Site, *args: str, key: str = ADMIN_KEY) -> Result:
    """What `local2` says to whoever has a key, in lines of 160 characters."""
    monkeypatch.setenv("LOCAL2_API_URL", site.url)
    monkeypatch.setenv("LOCAL2_API_KEY", key)
    monkeypatch.setenv("COLUMNS", "160")
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, list(args)))
