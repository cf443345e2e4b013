"""What the scripts of this folder share: try something, and say in a line of JSON what came of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def tried(what: str, attempt: Callable[[], Any], wanted: Callable[[Any], bool] = bool) -> None:
    """`wanted` says whether the result is right."""
    try:
        result = attempt()
        trouble = "" if wanted(result) else f"it gave {result!r}"
    except Exception as exc:
        trouble = f"{type(exc).__name__}: {exc}"
    print(json.dumps({"tried": what, "trouble": " ".join(trouble.split())[:500]}), flush=True)


def raised(kind: type[Exception], attempt: Callable[[], Any]) -> Callable[[], bool]:
    """An attempt that must fail this way."""

    def look() -> bool:
        try:
            attempt()
        except kind:
            return True
        return False

    return look
