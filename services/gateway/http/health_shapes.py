"""Alive, and able to answer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from services.gateway.http.shape import Shape


class Alive(Shape):
    status: Literal["ok"]


class PartState(Shape):
    """One part of the stack. What stands beside `ok` and `reason` belongs to the part."""

    ok: bool
    reason: str | None = Field(default=None, description="Why not; null while it works")
    readable: bool = Field(default=False, description="bus: whether it answers questions at least")
    replicas: int = Field(default=0, description="generator, memory: how many are ready")
    missing: list[str] = Field(default=[], description="tools: whom a stack that starts still waits for")
    backend: str | None = Field(default=None, description="model: its backend")
    model: str | None = Field(default=None, description="model: its name")
    demo: bool = Field(default=False, description="model: whether it is the small demonstration model")
    facts: dict[str, Any] = Field(default={}, description="model: its server, its window, what it can do")
    note: str = ""


class Readiness(Shape):
    status: Literal["ready", "not ready"]
    parts: dict[str, PartState]
