"""Structured logs: events with fields, one JSON object a line (or coloured text on a terminal).

The runtime binds query, session and respondent once per message; they appear in every event logged on the way.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog
from structlog.contextvars import bind_contextvars, bound_contextvars, merge_contextvars

__all__ = ["bind_contextvars", "bound_contextvars", "configure", "get_logger"]

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure(level: str, style: str, **always: Any) -> None:
    """Sets up logging of this process to stderr; `always` (participant, replica) is in every event."""
    pretty = style == "console" or (style == "auto" and sys.stderr.isatty())
    renderer: Any = structlog.dev.ConsoleRenderer() if pretty else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            merge_contextvars,
            lambda _logger, _name, event: {**always, **event},
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info if not pretty else (lambda _l, _n, event: event),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )


def get_logger() -> Any:
    """The logger of this process; call it at module level."""
    return structlog.get_logger()
