"""Structured logs: events with fields, one JSON object a line (or readable text on a terminal).

The runtime binds query, session and respondent once per message; they appear in every event logged on the way.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

__all__ = ["Logger", "bound_ids", "configure", "get_logger", "show_from"]

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


@dataclass(slots=True)
class _Shown:
    """How this process logs. always: in every event."""

    level: int = _LEVELS["info"]
    pretty: bool = True
    always: Mapping[str, Any] = field(default_factory=dict)


_shown = _Shown()
# Tells the ids of what is being handled: asked only when an event is written.
Ids = Callable[[], Mapping[str, str]]
# Of the message being handled, for as long as its task lives: nothing that refers to that task, or both would stay.
bound_ids: ContextVar[Ids] = ContextVar("ids", default=dict)


class Logger:
    """Writes events with their fields to stderr."""

    __slots__ = ()

    def debug(self, event: str, **fields: Any) -> None:
        if _shown.level <= _LEVELS["debug"]:
            _write("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        _write("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        _write("warning", event, fields)

    def error(self, event: str, *, exc_info: BaseException | None = None, **fields: Any) -> None:
        """exc_info: its traceback is shown."""
        _write("error", event, fields, exc_info)

    def exception(self, event: str, **fields: Any) -> None:
        """An error with the traceback of the exception that is being handled."""
        _write("error", event, fields, sys.exc_info()[1])


def _write(level: str, event: str, fields: Mapping[str, Any], exc: BaseException | None = None) -> None:
    if _LEVELS[level] < _shown.level:
        return
    now = datetime.now(UTC)
    told = {**_shown.always, **bound_ids.get()(), **fields}
    trace = "".join(traceback.format_exception(exc)).rstrip() if exc is not None else ""
    if _shown.pretty:
        shown = " ".join(f"{name}={_plain(value)}" for name, value in told.items())
        line = f"{now.astimezone():%H:%M:%S} {level:7} {event}  {shown}".rstrip() + (f"\n{trace}" if trace else "")
    else:
        whole = {"event": event, **told, "level": level, "timestamp": now.isoformat().replace("+00:00", "Z")}
        line = json.dumps({**whole, "exception": trace} if trace else whole, default=repr)
    # who reads the log may be gone; the work goes on
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{line}\n")


def _plain(value: object) -> str:
    return value if isinstance(value, str) and value.isprintable() else repr(value)


def configure(level: str, style: str, **always: Any) -> None:
    """Sets up logging of this process to stderr; `always` (participant, replica) is in every event."""
    show_from(level)
    _shown.pretty = style == "console" or (style == "auto" and sys.stderr.isatty())
    _shown.always = always


def show_from(level: str) -> None:
    """Less severe events are not shown from now on."""
    _shown.level = _LEVELS[level]


def get_logger() -> Logger:
    """The logger of this process."""
    return Logger()
