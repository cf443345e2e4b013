"""Whose key it is, when the bus cannot be asked."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from services.gateway.keys import ADMIN, Keys, Principal
from services.gateway.settings import GatewaySettings
from shared.errors import BusUnavailable

SECRET = "l2_0123456789abcdef0123456789abcdef"


class Away:
    @property
    def bus(self) -> Any:
        raise BusUnavailable("away")

    @contextlib.asynccontextmanager
    async def reachable(self) -> AsyncIterator[None]:
        raise BusUnavailable("away")
        yield


def keys(data_dir: Path, **settings: Any) -> Keys:
    return Keys(cast(Any, Away()), GatewaySettings(admin_key=SECRET, data_dir=data_dir, **settings))


async def test_the_operator_comes_in_while_the_bus_is_away_and_nobody_else(tmp_path: Path) -> None:
    known = keys(tmp_path)
    found = await known.principal(SECRET)
    assert found == Principal(ADMIN, "admin")
    # not even the administrator's key speaks for others, unless that was said of it
    assert not found.trusted
    assert await known.principal("") is None
    for other in (SECRET[:-1], SECRET + "0", SECRET.upper(), "x"):
        with pytest.raises(BusUnavailable):
            await known.principal(other)
