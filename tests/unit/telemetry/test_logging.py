"""What a log line says, and that it never comes into the way of the work."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest

from shared.telemetry.logging import Ids, bound_ids, configure, get_logger

log = get_logger()


@contextmanager
def bound(ids: Ids) -> Iterator[None]:
    token = bound_ids.set(ids)
    yield
    bound_ids.reset(token)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    configure("warning", "json")


def test_an_event_is_a_json_line_with_its_fields_and_the_ids_of_the_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure("info", "json", participant="web_fetch")
    log.debug("not.shown")
    with bound(lambda: {"query_id": "1-1"}), bound(lambda: {"query_id": "7-0", "session_id": "s"}):
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


def test_ids_are_asked_for_when_an_event_is_written_and_each_task_has_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure("info", "json")
    asked: list[str] = []

    def ids() -> dict[str, str]:
        asked.append("once")
        return {"query_id": "7-0"}

    async def handled(query_id: str) -> None:
        with bound(lambda: {"query_id": query_id}):
            await asyncio.sleep(0)
            log.info("handled", expected=query_id)

    async def both() -> None:
        await asyncio.gather(handled("1-0"), handled("2-0"))

    with bound(ids):
        log.debug("not.shown")
        assert asked == []
        log.info("shown")
        assert asked == ["once"]
        asyncio.run(both())
        assert asked == ["once"]
    shown, *others = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert shown["query_id"] == "7-0"
    assert [(one["query_id"], one["expected"]) for one in others] == [("1-0", "1-0"), ("2-0", "2-0")]


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
