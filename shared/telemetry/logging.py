"""Structured logs: events with fields, one JSON object a line (or coloured text on a terminal).

The runtime binds query, session and respondent once per message; they appear in every event logged on the way.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, MutableMapping
from contextvars import ContextVar, Token
from typing import Any

import structlog
from structlog.contextvars import bind_contextvars, bound_contextvars, merge_contextvars

__all__ = ["BoundIds", "bind_contextvars", "bound_contextvars", "configure", "get_logger"]

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


_ids: ContextVar[Mapping[str, str]] = ContextVar("ids", default={})  # noqa: B039


class BoundIds:
    """The ids of the message being handled, in every event logged inside the block.

    One variable for all of them: structlog's own has one for each, which costs more than the message's decoding.
    """

    __slots__ = ("_bound", "_token")

    def __init__(self, bound: Mapping[str, str]) -> None:
        self._bound = bound

    def __enter__(self) -> None:
        self._token: Token[Mapping[str, str]] = _ids.set(self._bound)

    def __exit__(self, *_exc: object) -> None:
        _ids.reset(self._token)


def _with_ids(_logger: Any, _name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {**_ids.get(), **event}


def configure(level: str, style: str, **always: Any) -> None:
    """Sets up logging of this process to stderr; `always` (participant, replica) is in every event."""
    pretty = style == "console" or (style == "auto" and sys.stderr.isatty())
    renderer: Any = structlog.dev.ConsoleRenderer() if pretty else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            merge_contextvars,
            _with_ids,
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
