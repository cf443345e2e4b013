"""A gateway on the bus, without a server and without participants around it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from support.proxy import Proxy

from services.gateway.http.gateway import Gateway
from services.gateway.settings import GatewaySettings
from shared.bus import Bus, JournalSubscriber
from shared.participant.service import Context


@pytest.fixture
def attached(redis_url: str, tmp_path: Path) -> Callable[[Bus], Gateway]:
    """Makes a gateway of a bus."""

    def attach(bus: Bus) -> Gateway:
        values: dict[str, Any] = {"admin_key": "an-administrator's-key", "bus_wait": 30.0, "retention": 3_600}
        settings = GatewaySettings(redis_url=redis_url, data_dir=tmp_path, **values)
        made = Gateway(settings)
        made.attach(Context("gateway", settings, bus, "g-1", settings), cast(JournalSubscriber, None))
        return made

    return attach


@pytest.fixture
async def gateway(bus: Bus, attached: Callable[[Bus], Gateway]) -> Gateway:
    """It writes as `test/1`; whoever is to be live has to be announced before it looks."""
    return attached(bus)


@pytest.fixture
async def proxy(redis_url: str) -> AsyncIterator[Proxy]:
    """The way of `gateway_behind_proxy` to Redis."""
    async with Proxy(redis_url) as opened:
        yield opened


@pytest.fixture
async def gateway_behind_proxy(proxy: Proxy, attached: Callable[[Bus], Gateway]) -> AsyncIterator[Gateway]:
    """A second gateway on the bus. A test sees its commands, and can act between them, by `proxy.before`."""
    async with Bus(proxy.url, "test/2") as bus:
        yield attached(bus)
