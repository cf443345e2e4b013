"""Points in time as people read them."""

from __future__ import annotations

import time
from typing import Any


def ago(ms: Any, now: float | None = None) -> str:
    """`3 min ago` for milliseconds since the epoch, empty for anything else."""
    if not isinstance(ms, int | float):
        return ""
    seconds = max(0.0, (time.time() if now is None else now) - ms / 1000)
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{int(seconds)} s ago"
