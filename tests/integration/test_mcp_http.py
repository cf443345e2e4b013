"""A server of MCP behind an address: a genuine one of the SDK, over streamable HTTP, in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from support.forked import TESTS
from support.http_stack import free_port
from support.mcp_asking import SECRET, Asker, asking, change, mcp_settings
from support.services import announced, running
from support.waiting import eventually

from services.mcp.service import app
from shared.bus.keys import MCP_PINS, settings_key
from shared.participant.settings import Settings


class RemoteServer:
    """`folder`: see `support.mcp_server`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> dict[str, Any]:
        """It, in the participant's settings."""
        return {
            "url": f"http://127.0.0.1:{self.port}/mcp",
            "headers": {"Authorization": "Bearer ${MCP_SERVER_SECRET}"},
        }

    def start(self) -> None:
        paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
        given = {"PYTHONPATH": paths, "MCP_SERVER_FOLDER": str(self.folder), "MCP_SERVER_SECRET": SECRET}
        command = [sys.executable, "-m", "support.mcp_server", str(self.port)]
        self._process = subprocess.Popen(command, env={**os.environ, **given})

    async def up(self) -> None:
        async def answers() -> bool:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.close()
                await writer.wait_closed()
                return True
            return False

        await eventually(answers, 30, "the server listens", every=0.05)

    def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
            self._process.wait()


@pytest.fixture(scope="module")
def running_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteServer]:
    one = RemoteServer(tmp_path_factory.mktemp("server"))
    one.start()
    try:
        yield one
    finally:
        one.kill()


@pytest.fixture
async def remote(running_server: RemoteServer, monkeypatch: pytest.MonkeyPatch) -> RemoteServer:
    """One for all tests of this file, as it is at its start."""
    monkeypatch.setenv("MCP_SERVER_SECRET", SECRET)
    for name in ("calls", "cancelled", "key"):
        (running_server.folder / name).unlink(missing_ok=True)
    await running_server.up()
    return running_server


@pytest.fixture
async def asker(settings: Settings, raw: redis.Redis) -> AsyncIterator[Asker]:
    raw.delete(MCP_PINS, settings_key("mcp"))
    async with asking(settings) as one:
        yield one


@asynccontextmanager
async def connecting(settings: Settings, remote: RemoteServer, **values: Any) -> AsyncIterator[None]:
    """The participant with the server's address."""
    async with running(app, mcp_settings(settings, servers={"far": remote.address}, **values)):
        await announced(settings.redis_url, "mcp")
        yield


async def is_ready(asker: Asker) -> bool:
    return bool((await asker.fact())["state"] == "ready")


async def reason(asker: Asker) -> str:
    return str((await asker.fact())["reason"] or "")


async def test_its_tools_are_offered_and_run_and_what_is_too_large_is_refused(
    asker: Asker, settings: Settings, remote: RemoteServer
) -> None:
    async with connecting(settings, remote):
        await eventually(lambda: is_ready(asker), timeout=30, what="the server is connected")
        offered = await asker.offered()
        assert offered["far__add"]["description"] == "Add two numbers. Key [MCP_SERVER_SECRET]"
        done = await asker.call("far__add", a=2, b=40)
        assert (done.result, done.error, done.data["structured"]) == ("42", None, {"sum": 42})
        failed = await asker.call("far__fail", text="a.txt")
        assert failed.error == "no such file: a.txt [MCP_SERVER_SECRET]"
        flood = await asker.call("far__flood")
        assert flood.data["truncated"] is True
        assert len(flood.result) < 1_000_200
        for text in ("whole", "events"):
            deluge = await asker.call("far__deluge", text=text, timeout=30)
            assert deluge.error == "mcp server far is away: it sent more than 16 MB in one answer"
        # the next one does not notice
        assert (await asker.call("far__echo", text="still there")).result == "echo: still there"
    assert await asker.offered() == {}


async def test_one_that_dies_is_away_and_comes_back_with_its_tools(
    asker: Asker, settings: Settings, remote: RemoteServer
) -> None:
    async with connecting(settings, remote):
        await eventually(lambda: is_ready(asker), timeout=30, what="the server is connected")
        calling = asyncio.create_task(asker.call("far__hang"))
        await eventually(lambda: (remote.folder / "calls").exists(), what="the call is running")
        remote.kill()
        assert (await calling).error == "mcp server far is away"

        async def gone() -> bool:
            return not await asker.offered()

        await eventually(gone, timeout=20, what="its tools are withdrawn")
        assert (await asker.call("far__echo", text="x")).error in ("tool unavailable", "mcp server far is away")
        assert await reason(asker)
        remote.start()
        await eventually(lambda: is_ready(asker), timeout=60, what="the server is back")
        assert (await asker.call("far__echo", text="again")).result == "echo: again"


async def test_one_that_refuses_the_key_is_away_with_that_reason(
    asker: Asker, settings: Settings, remote: RemoteServer
) -> None:
    (remote.folder / "key").write_text("another key")
    async with connecting(settings, remote):

        async def refused() -> bool:
            return await reason(asker) == "it answers with status 401: look at the key in its headers"

        await eventually(refused, timeout=30, what="the refusal is told")
        assert (await asker.fact())["state"] == "away"
        assert await asker.offered() == {}
        (remote.folder / "key").unlink()
        await eventually(lambda: is_ready(asker), timeout=60, what="the key is taken")


async def test_one_that_is_slow_ends_with_its_time_out_and_is_told(
    asker: Asker, settings: Settings, raw: redis.Redis, remote: RemoteServer
) -> None:
    async with connecting(settings, remote):
        await eventually(lambda: is_ready(asker), timeout=30, what="the server is connected")
        await change(asker.context.bus, raw, timeout=0.25)

        async def in_time() -> bool:
            late = await asker.call("far__hang")
            return late.error == "timeout after 0.25s: mcp server far has not answered"

        await eventually(in_time, what="the time-out counts")
        await eventually(lambda: (remote.folder / "cancelled").exists(), what="the server was told")
        assert (await asker.call("far__echo", text="quick", timeout=30)).error is None
