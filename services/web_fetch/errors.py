"""Why a page could not be fetched; each text is the tool result's `error`."""

from __future__ import annotations

from shared.errors import ToolError


class Blocked(ToolError):
    """The target may not be fetched. The reason never says which address a name leads to."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"blocked: {reason}")


class FetchError(ToolError):
    """The target may be fetched, but that did not work."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"fetch error: {reason}")
