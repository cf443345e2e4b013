"""Journals of real runs give the clients the same bytes as on the day when they were recorded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest
import pytest_asyncio
from golden.replaying import JOURNALS, ODD, Replay, load, states_of
from golden.states import digest
from support.http_gateway import Site, gateway_settings, serving

from shared.bus import Bus

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    async with serving(gateway_settings(server_url, tmp_path_factory.mktemp("golden"))) as site:
        yield site


@pytest.mark.parametrize("path", sorted(JOURNALS.glob("*.json")), ids=lambda path: path.stem)
async def test_recorded_journal_gives_its_recorded_outputs(path: Path, site: Site, server_url: str) -> None:
    entries, outputs = load(path)
    async with Bus(server_url, "golden/1") as bus:
        replay = Replay(site, bus, path.stem, entries)
        await replay.run()
    assert replay.outputs() == outputs, f"see them whole: tests/golden/record.py --show {path.stem} OUTPUT"


async def test_odd_journal_gives_its_state() -> None:
    entries, outputs = load(ODD)
    states = states_of(entries)
    assert orjson.loads(states["state"]) == outputs["state"]
    assert digest(states["states_while_it_runs"]) == outputs["states_while_it_runs"]
