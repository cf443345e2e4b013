"""What GET /ready says, as sentences."""

from __future__ import annotations

from typing import Any

import httpx


def reasons(response: httpx.Response) -> list[str]:
    """`part: reason` for every part that is not ready; empty when the answer names none."""
    try:
        return not_ready(response.json())
    except ValueError:
        return []


def not_ready(body: Any) -> list[str]:
    """The same for the decoded answer: `parts` by name, each with `ok` and `reason`."""
    parts: dict[str, Any] = body.get("parts", {}) if isinstance(body, dict) else {}
    return [f"{name}: {part.get('reason') or 'not ready'}" for name, part in parts.items() if not part.get("ok")]
