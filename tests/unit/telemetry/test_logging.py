"""What a log line says, and that it never comes into the way of the work."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from structlog.contextvars import bound_contextvars

from shared.telemetry.logging import bind_ids, configure, get_logger, show_from

log = get_logger()
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    configure("warning", "json")


def test_an_event_is_a_json_line_with_its_fields_and_the_ids_of_the_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure("info", "json", participant="web_fetch")
    log.debug("not.shown")
    with bound_contextvars(query_id="1-1"), bound_contextvars(query_id="7-0", session_id="s"):
        log.info("tool.completed", tool="web_fetch", path=Path("/x"), odd="\ud800\n", raw=b"\xff")
    log.warning("after")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert datetime.fromisoformat(first.pop("timestamp")).utcoffset() is not None
    ids = {"query_id": "7-0", "session_id": "s"}
    odd = {"path": repr(Path("/x")), "odd": "\ud800\n", "raw": "b'\\xff'"}
    what = {"event": "tool.completed", "participant": "web_fetch", "level": "info", "tool": "web_fetch"}
    assert first == what | ids | odd
    assert second["level"] == "warning"
    assert "query_id" not in second


async def test_each_task_logs_its_own_ids(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", "json")

    async def handled(query_id: str) -> None:
        bind_ids({"query_id": query_id})
        await asyncio.sleep(0)
        log.info("handled", expected=query_id)
        await asyncio.create_task(nested(query_id))

    async def nested(query_id: str) -> None:
        log.info("nested", expected=query_id)

    await asyncio.gather(handled("1-0"), handled("2-0"))
    log.info("outside")
    *inside, outside = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert len(inside) == 4
    assert all(one["query_id"] == one["expected"] for one in inside)
    assert "query_id" not in outside


def test_level_of_a_running_process_can_be_changed(capsys: pytest.CaptureFixture[str]) -> None:
    configure("warning", "json")
    log.info("hidden")
    show_from("debug")
    log.debug("shown")
    show_from("error")
    log.warning("hidden")
    assert [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()] == ["shown"]


def test_stdout_stays_free_of_events_in_an_unconfigured_process() -> None:
    program = "from shared.telemetry.logging import get_logger; get_logger().info('it.happened', what='x')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == ""
    assert "it.happened what=x" in done.stderr


@pytest.mark.parametrize("style", ["json", "console"])
def test_participant_logs_a_lost_bus_without_rich(style: str, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "LOCAL2_REDIS_URL": "redis://127.0.0.1:9",
        "LOCAL2_DATA_DIR": str(tmp_path),
        "LOCAL2_LOG_FORMAT": style,
    }
    # Python itself lists the modules that a process loads
    command = [sys.executable, "-X", "importtime", "-m", "services.web_search"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "bus.connection_lost" in line:
                break
        process.terminate()
        process.stderr.read()
    event = lines.pop()
    assert ("participant=web_search" in event) if style == "console" else json.loads(event)["participant"]
    assert any(line.endswith(" structlog\n") for line in lines)
    assert not [line for line in lines if re.search(r"\b(rich|better_exceptions|pygments)\.", line)]


@pytest.mark.parametrize("style", ["json", "console"])
def test_an_exception_comes_with_its_traceback(style: str, capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", style)
    try:
        raise ValueError("deep inside")
    except ValueError as exc:
        log.exception("it.failed", number=1)
        log.error("http.failed", exc_info=exc)
    told = capsys.readouterr().err
    assert told.count("Traceback (most recent call last)") == 2
    assert told.count("ValueError: deep inside") == 2
    if style == "json":
        assert all(json.loads(line)["level"] == "error" for line in told.splitlines())


def test_a_readable_line_carries_no_control_characters_of_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", "auto")
    assert not sys.stderr.isatty()
    configure("info", "console")
    log.info("event", text="\x1b[31mred\nnext")
    assert capsys.readouterr().err.count("\n") == 1
    log.info("event", text="\x1b[31mred")
    assert "\x1b" not in capsys.readouterr().err


def test_nobody_who_reads_the_log_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    log.error("into.nowhere")
