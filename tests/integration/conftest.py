"""A gateway in the test's process, and a scripted generator beside it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.http_gateway import FakeGenerator, Site, gateway_settings, generating, serving


@pytest.fixture
async def site(redis_url: str, tmp_path: Path) -> AsyncIterator[Site]:
    async with serving(gateway_settings(redis_url, tmp_path)) as site:
        yield site


@pytest.fixture
async def fake(redis_url: str, tmp_path: Path) -> AsyncIterator[FakeGenerator]:
    async with generating(redis_url, tmp_path) as fake:
        yield fake
