"""Where commands print: the one way from their texts to a terminal, a pipe or a file."""

from __future__ import annotations

import os
from typing import IO, Any

from rich.console import Console, ConsoleDimensions
from rich.text import Text

from services.cli.printable import printable

# A row of a table stays one line for the program behind a pipe.
_PIPE = 1_000


class Terminal(Console):
    """Text is printed as it is: what users, models and pages write is never read as markup, as an emoji's name or as a
    number to be coloured, and has no control characters. Lines are broken by the terminal alone; tables fit its width,
    and in a pipe each row is a line (COLUMNS says otherwise).
    """

    def __init__(self, *, stderr: bool = False, file: IO[str] | None = None, width: int | None = None) -> None:
        super().__init__(stderr=stderr, file=file, width=width, markup=False, emoji=False, highlight=False)
        self._width = width

    @property  # type: ignore[misc]  # Console's has a setter, which nobody needs here
    def size(self) -> ConsoleDimensions:
        """See Console.size: of what is printed to now, not of what was there when this was made."""
        columns = os.environ.get("COLUMNS", "")
        width = self._width or (int(columns) if columns.isdecimal() else 0)
        if not width and not self.file.isatty():
            width = _PIPE
        there = super().size
        return ConsoleDimensions(width, there.height) if width else there

    def render_str(self, text: str, **options: Any) -> Text:
        """See Console.render_str; markup is asked for nowhere."""
        return super().render_str(printable(text), **{**options, "markup": False, "emoji": False, "highlight": False})

    def print(self, *objects: Any, **options: Any) -> None:
        """See Console.print. A line is as long as it is; a table is as wide as it may be."""
        if all(isinstance(one, str | Text) for one in objects):
            options.setdefault("soft_wrap", True)
        super().print(*objects, **options)


console = Terminal()
errors = Terminal(stderr=True)
