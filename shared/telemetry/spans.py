"""A span, the one that records nothing, and what records spans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import TracebackType
from typing import Protocol, Self

Value = str | int | float | bool | Sequence[str]


class Kind(StrEnum):
    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"
    CONSUMER = "consumer"


class Span:
    """Something that takes time; ends with its block. This one records nothing."""

    __slots__ = ()

    @property
    def traceparent(self) -> str:
        """What a message caused by it carries; empty when nothing is traced."""
        return ""

    def name(self, name: str) -> None:
        """Another name, when it turns out only on the way."""

    def set(self, attributes: Mapping[str, Value | None]) -> None:
        """Attributes; those that are None are left out."""

    def fail(self, kind: str) -> None:
        """Marks it as failed; `kind` is the error's class, not its text."""

    def end(self) -> None:
        """For a span that is not used as a block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


NOTHING = Span()


class Recorder(Protocol):
    """What records spans (see `tracing_sdk.py`)."""

    def span(self, name: str, kind: Kind, parent: str, attributes: Mapping[str, Value | None]) -> Span: ...

    def current(self) -> str: ...

    def annotate(self, attributes: Mapping[str, Value | None]) -> None: ...

    def stop(self, seconds: float) -> bool: ...
