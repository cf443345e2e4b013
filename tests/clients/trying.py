"""What the scripts of this folder share: try a feature, and say in a line of JSON what came of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any


def tried(feature: str, attempt: Callable[[], Any], wanted: Callable[[Any], bool] = bool, way: str = "") -> None:
    """`wanted` says whether the result is right. `way`: which of several that the client has for it."""
    try:
        result = attempt()
        trouble = "" if wanted(result) else f"it gave {result!r}"
    except Exception as exc:
        trouble = f"{type(exc).__name__}: {exc}"
    _say(feature=feature, way=way, trouble=" ".join(trouble.split())[:500])


def not_offered(feature: str, why: str) -> None:
    """The client has nothing of the kind."""
    _say(feature=feature, not_offered=why)


def _say(**values: str) -> None:
    print(json.dumps({"tried": True, **values}), flush=True)


Kinds = type[BaseException] | tuple[type[BaseException], ...]


def raised(kind: Kinds, attempt: Callable[[], Any]) -> Callable[[], bool]:
    """An attempt that must fail this way."""

    def look() -> bool:
        try:
            attempt()
        except kind:
            return True
        return False

    return look


def left(parts: Iterable[Any]) -> bool:
    """Goes away after the first part of a stream."""
    stream = iter(parts)
    next(stream)
    close = getattr(stream, "close", None) or getattr(parts, "close", None)
    if close is not None:
        close()
    return True
