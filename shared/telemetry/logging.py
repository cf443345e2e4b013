"""Structured logs on stderr by structlog: one JSON object for each event, or readable text on a terminal.

The runtime binds query, session and respondent once for each message; every event of its task has them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any


@contextlib.contextmanager
def _hidden(*packages: str) -> Iterator[None]:
    """Make imports of packages that are not loaded yet fail: None in `sys.modules` raises ImportError."""
    hidden = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


# perf: structlog imports these for its own tracebacks where they are installed: 5 MB and 60 ms in each participant
with _hidden("rich", "better_exceptions"):
    import structlog
    from structlog.contextvars import bind_contextvars, merge_contextvars
    from structlog.dev import Column, ConsoleRenderer, KeyValueColumnFormatter, plain_traceback
    from structlog.processors import JSONRenderer, TimeStamper, add_log_level, format_exc_info
    from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

__all__ = ["bind_ids", "configure", "get_logger", "show_from"]


class _Stderr:
    """Writes events to the stderr of the moment."""

    def msg(self, line: str) -> None:
        # the reader of the log may be gone; the work goes on
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{line}\n")

    debug = info = warning = error = critical = exception = msg


def configure(level: str, style: str, **always: Any) -> None:
    """Set up the logging of this process.

    level: the least severe events that are written. style: json, console, or auto: console on a terminal.
    always: fields of every event (participant).
    """
    console = style == "console" or (style == "auto" and sys.stderr.isatty())
    structlog.configure(
        processors=[merge_contextvars, partial(_add_fields, always), add_log_level, *(_CONSOLE if console else _JSON)],
        logger_factory=_Stderr,
        # the level of a running process can be changed
        cache_logger_on_first_use=False,
    )
    show_from(level)


def show_from(level: str) -> None:
    """Write no events that are less severe than `level` from now on."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(level))


def get_logger() -> FilteringBoundLogger:
    """Return the logger of this process."""
    logger: FilteringBoundLogger = structlog.get_logger()
    return logger


def bind_ids(ids: Mapping[str, str]) -> None:
    """Add these fields to every event of the current task and of the tasks that it starts."""
    bind_contextvars(**ids)


def _add_fields(fields: Mapping[str, Any], _logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    return {"event": event["event"], **fields, **event}


def _printable(value: object) -> str:
    return value if isinstance(value, str) and value.isprintable() else repr(value)


def _column(width: int = 0) -> KeyValueColumnFormatter:
    return KeyValueColumnFormatter(None, "", "", _printable, width=width)


_JSON: list[Processor] = [TimeStamper(fmt="iso"), format_exc_info, JSONRenderer(default=repr)]
_CONSOLE: list[Processor] = [
    TimeStamper(fmt="%H:%M:%S", utc=False),
    ConsoleRenderer(
        columns=[
            Column("timestamp", _column()),
            Column("level", _column(width=7)),
            Column("event", _column()),
            Column("", KeyValueColumnFormatter("", "", "", _printable)),
        ],
        exception_formatter=plain_traceback,
        sort_keys=False,
    ),
]

# what is logged before a process is configured, and in a process that never is, goes to stderr too
configure("info", "console")
