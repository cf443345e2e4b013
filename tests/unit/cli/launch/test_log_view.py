"""One readable view of everybody's logs."""

from __future__ import annotations

import io
import json

from services.cli.launch.log_view import LogView, readable


def line(**event: object) -> str:
    return json.dumps({"timestamp": "2026-01-02T03:04:05Z", "level": "info", "participant": "x", **event})


def test_a_json_event_becomes_a_line_with_its_fields_and_without_what_the_prefix_says() -> None:
    text, level = readable(line(event="tool.completed", tool="web_search", ms=12, note="two words", list=[1]))
    assert text.split(" ", 1)[1] == 'tool.completed  tool=web_search ms=12 note="two words" list=[1]'
    assert level == "info"


def test_a_traceback_stays_readable_and_every_line_carries_the_name() -> None:
    out = io.StringIO()
    view = LogView(out)
    view.write("gateway", line(event="http.failed", level="error", exception="Traceback:\n  boom"))
    first, second, third = out.getvalue().splitlines()
    assert first.startswith("gateway       | ")
    assert "ERROR http.failed" in first
    assert (second, third) == ("gateway       | Traceback:", "gateway       |   boom")


def test_what_is_not_json_passes_through_without_control_characters() -> None:
    assert readable("plain \x1b[31mred") == ("plain [31mred", "")
    assert readable('["a", 1]') == ('["a", 1]', "")
    assert readable('{"no": "event"}') == ('{"no": "event"}', "")


def test_colours_are_only_written_where_they_are_understood() -> None:
    plain, tinted = io.StringIO(), io.StringIO()
    LogView(plain).write("a", line(event="x", level="warning"))
    LogView(tinted, colour=True).write("a", line(event="x", level="warning"))
    assert "\x1b" not in plain.getvalue()
    assert "\x1b[33m" in tinted.getvalue()


def test_the_last_line_of_each_participant_is_kept_for_the_reason_of_its_end() -> None:
    view = LogView(io.StringIO())
    view.write("web_search", "first")
    view.write("web_search", "local2: settings of web_search: timeout: too small")
    view.write("gateway", "other")
    assert view.last["web_search"] == "local2: settings of web_search: timeout: too small"
