"""The supervisor with real processes: an embedded Redis, stand-ins for participants and for the demonstration model."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from services.cli.launch.child import Backoff, ChildSpec
from services.cli.launch.log_view import LogView
from services.cli.launch.probes import redis_version
from services.cli.launch.supervisor import StartError, Supervisor, grace
from shared.bus import Bus
from shared.errors import Local2Error

SLEEPER = [sys.executable, "-u", "-c", "import time; print('up'); time.sleep(60)"]
DEMO = """
import http.server, json, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
server = http.server.HTTPServer(("127.0.0.1", port), http.server.SimpleHTTPRequestHandler)
print("loading", flush=True)
print(json.dumps({"url": f"http://127.0.0.1:{server.server_address[1]}", "models": ["tiny-demo"]}), flush=True)
server.serve_forever()
"""
FAST = Backoff(first=0.05, longest=0.2, good=60)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="l2-") as path:
        yield Path(path)


def supervisor(folder: Path, out: io.StringIO | None = None) -> Supervisor:
    return Supervisor(LogView(out or io.StringIO()), folder, grace=3, backoff=FAST)


async def until(fact: Callable[[], object], within: float = 15.0) -> None:
    async with asyncio.timeout(within):
        while not fact():
            await asyncio.sleep(0.02)


async def test_at_the_end_nothing_is_left_running(folder: Path) -> None:
    out = io.StringIO()
    async with supervisor(folder, out) as stack:
        url = await stack.start_redis()
        stack.start([ChildSpec("one", SLEEPER), ChildSpec("two", SLEEPER)])
        await until(lambda: len(stack.pids) == 3 and out.getvalue().count("up") == 2)
        assert "edis" in await redis_version(url) or "alkey" in await redis_version(url)
        pids = list(stack.pids.values())
    assert len(pids) == 3
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []


async def test_probe_of_a_redis_that_refuses_the_password_says_so(folder: Path) -> None:
    async with supervisor(folder) as stack:
        url = (await stack.start_redis()).replace("unix://", "unix://unknown-user:wrong@", 1)
        with pytest.raises(Local2Error, match="username-password"):
            await redis_version(url)


async def test_a_killed_redis_comes_back_on_the_same_url_with_its_data(folder: Path) -> None:
    out = io.StringIO()
    async with supervisor(folder, out) as stack:
        url = await stack.start_redis()
        first = stack.pids["redis"]
        os.kill(first, signal.SIGKILL)
        await until(lambda: stack.pids.get("redis") not in (None, first))
        async with asyncio.timeout(10):
            while True:
                try:
                    await redis_version(url)
                    break
                except Exception:
                    await asyncio.sleep(0.05)
        second = stack.pids["redis"]
    assert "the Redis server died" in out.getvalue()
    assert not psutil.pid_exists(second)


async def test_the_demonstration_model_comes_back_at_the_same_address(folder: Path) -> None:
    async with supervisor(folder) as stack:
        url, model = await stack.start_demo_model([sys.executable, "-u", "-c", DEMO])
        assert model == "tiny-demo"
        first = stack.pids["demo-model"]
        os.kill(first, signal.SIGKILL)
        host, port = url.removeprefix("http://").split(":")

        def answers() -> bool:
            with socket.socket() as probe:
                return stack.pids.get("demo-model") not in (None, first) and probe.connect_ex((host, int(port))) == 0

        await until(answers)


async def test_a_participant_that_cannot_start_stops_the_run_with_its_own_words(folder: Path) -> None:
    code = "import sys; sys.exit('local2: settings of web_fetch: timeout: must be greater than 0')"
    async with supervisor(folder) as stack:
        stack.start([ChildSpec("web_fetch", [sys.executable, "-c", code]), ChildSpec("other", SLEEPER)])
        with pytest.raises(StartError, match="web_fetch does not start: local2: settings of web_fetch: timeout"):
            await stack.wait_until_ready("http://127.0.0.1:9")


async def test_a_demonstration_model_that_is_not_installed_stops_the_run_with_the_command(folder: Path) -> None:
    code = "import sys; print('needs xllamacpp; run: pip install xllamacpp', file=sys.stderr); sys.exit(2)"
    async with supervisor(folder) as stack:
        with pytest.raises(StartError, match=r"demo-model does not start: .*pip install xllamacpp"):
            await stack.start_demo_model([sys.executable, "-c", code])


async def test_it_is_ready_when_the_gateway_says_so_and_tells_before_what_is_missing(
    folder: Path, loopback_gateway: object, json_answer: Callable[..., bytes]
) -> None:
    answers = [
        json_answer(
            {"status": "not ready", "parts": {"bus": {"ok": True}, "model": {"ok": False, "reason": "asleep"}}}, 503
        ),
        json_answer({"status": "ready", "parts": {}}, 200),
    ]

    async def play(_heard: object, writer: asyncio.StreamWriter) -> None:
        writer.write(answers.pop(0))

    loopback_gateway.play = play  # type: ignore[attr-defined]
    out = io.StringIO()
    async with supervisor(folder, out) as stack:
        await stack.wait_until_ready(f"http://127.0.0.1:{loopback_gateway.port}", quiet=0)  # type: ignore[attr-defined]
    assert "not ready yet: model: asleep" in out.getvalue()
    assert answers == []


def test_the_time_to_stop_is_longer_than_a_participant_takes() -> None:
    from shared.participant.service import LEAVING_SECONDS
    from shared.participant.settings import Settings

    # The participant gives up after this; the rest is its last words and the end of its interpreter.
    for drain in (0.0, Settings.model_fields["drain"].default, 60.0):
        assert grace(drain) >= drain + LEAVING_SECONDS + 2
    assert Supervisor(LogView(io.StringIO()), Path()).grace == grace(Settings.model_fields["drain"].default)


async def test_the_embedded_redis_syncs_as_it_is_told(folder: Path) -> None:
    async with supervisor(folder) as stack:
        url = await stack.start_redis("always")
        async with Bus(url, "test") as bus:
            assert dict([await bus.link.call("CONFIG", "GET", "appendfsync")]) == {b"appendfsync": b"always"}
