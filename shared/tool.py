"""A tool: a pydantic model of its arguments, an async function, and one line that makes it a participant."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel

A = TypeVar("A", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """`text` is read by the model; `data` is structured, for clients. A failure is raised as ToolError instead."""

    text: str
    data: Any = None
