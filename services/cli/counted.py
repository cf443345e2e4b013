"""Numbers with their noun: the one place that chooses the singular or the plural for the command line."""

from __future__ import annotations


def counted(number: int, one: str, many: str | None = None) -> str:
    """Return `1 turn`, `2 turns`, `1,200 turns`. many: the plural where it is not `one` with an s."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"
