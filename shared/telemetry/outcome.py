"""How something ended, as counters and spans have it."""

from __future__ import annotations

from typing import Literal

# How a handled message, a tool call or a model call ended.
Outcome = Literal[
    "ok", "error", "timeout", "cancelled", "retry", "dead", "lost", "unavailable", "unknown", "refused", "interrupted"
]
