"""The progress of a command: one changing line at a terminal, lines on standard error elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self

from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from services.cli.printable import printable
from services.cli.terminal import Terminal

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
