"""A gateway on the bus, without a server and without participants around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from services.gateway.http.gateway import Gateway
from services.gateway.settings import GatewaySettings
from shared.bus import Bus, JournalSubscriber
from shared.participant.service import Context


@pytest.fixture
async def gateway(bus: Bus, redis_url: str, tmp_path: Path) -> Gateway:
    """It writes as `test/1`; whoever is to be live has to be announced before it looks."""
    values: dict[str, Any] = {"admin_key": "an-administrator's-key", "bus_wait": 30.0, "retention": 3_600}
    settings = GatewaySettings(redis_url=redis_url, data_dir=tmp_path, **values)
    made = Gateway(settings)
    made.attach(Context("gateway", settings, bus, "g-1", settings), cast(JournalSubscriber, None))
    return made
