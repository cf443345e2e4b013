"""The download of a model, as a bar in a terminal and as lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from shared.llm.ollama_admin import PullProgress

_STEP = 10


class PullView:
    """Call it with every part of a download. `console` None: lines by `say`, one for each tenth."""

    def __init__(self, say: Callable[[str], None], console: Console | None) -> None:
        self._say = say
        self._bar: Progress | None = None
        if console is not None:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = Progress(*columns, console=console, transient=True)
        self._tasks: dict[str, TaskID] = {}
        self._told: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, model: str, part: PullProgress) -> None:
        # The status names the layer; the parts between layers have no size.
        if not part.total:
            return
        name = f"{model}: {part.status}"
        if self._bar is not None:
            self._bar.start()
            if name not in self._tasks:
                self._tasks[name] = self._bar.add_task(name, total=part.total)
            self._bar.update(self._tasks[name], completed=part.completed or 0)
            return
        percent = 100 * (part.completed or 0) // part.total // _STEP * _STEP
        if self._told.get(name) != percent:
            self._told[name] = percent
            self._say(f"{name} {percent} %")
