"""Numbers with their nouns in singular or plural, for all output of the command line."""

from __future__ import annotations


def counted(number: int, one: str, many: str | None = None) -> str:
    """Return `1 turn`, `2 turns`, `1,200 turns`. many: a plural that is not `one` with an s."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"
