"""The terminal: the output of all commands, and the progress of one."""

from __future__ import annotations

import asyncio
import contextlib
import os
from types import TracebackType
from typing import IO, Any, Self

from rich.console import Console, ConsoleDimensions
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from services.cli.words import printable

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


# Seconds between the updates at a terminal, and between lines of the same step elsewhere.
_TICK, _REPEAT = 1.0, 10.0


class Progress:
    """Call it with a sentence for the present step. step: its name, which stays the same while figures change.

    Without a terminal, a new step is printed at once, the same step again after `_REPEAT` seconds, and the last
    figures of a step when it ends.
    """

    def __init__(self, console: Terminal, errors: Terminal) -> None:
        terminal = next((one for one in (console, errors) if one.is_terminal and not one.is_dumb_terminal), None)
        self._spinner = Spinner("dots")
        self._live = Live(self._spinner, console=terminal, transient=True, refresh_per_second=8) if terminal else None
        self._errors = errors
        self._text = self._step = ""
        self._since = self._printed = 0.0
        self._told = ""
        self._ticking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._ticking = asyncio.create_task(self._tick())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pause()
        if self._ticking is not None:
            self._ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticking

    def __call__(self, text: str, step: str | None = None) -> None:
        now, step = asyncio.get_running_loop().time(), step or text
        if step != self._step:
            self._print_last()
            self._step, self._since = step, now
            self._printed = now - _REPEAT
        self._text = text
        self._show(now)

    def pause(self) -> None:
        """Remove the line at the terminal, for other output; the next call brings it back."""
        self._print_last()
        self._text = self._step = ""
        if self._live is not None:
            self._live.stop()

    def _print_last(self) -> None:
        """Print the last figures of a step, unless they were printed. Do nothing at a terminal."""
        if self._live is None and self._text != self._told:
            self._printed = float("-inf")
            self._show(asyncio.get_running_loop().time())

    def _show(self, now: float) -> None:
        if not self._text:
            return
        seconds = round(now - self._since)
        line = Text(printable(f"{self._text} ({seconds} s)" if seconds else self._text))
        if self._live is not None:
            self._spinner.update(text=line)
            self._live.start()
            self._live.refresh()
        elif now - self._printed >= _REPEAT:
            self._printed, self._told = now, self._text
            self._errors.print(line, style="dim")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK)
            self._show(asyncio.get_running_loop().time())
