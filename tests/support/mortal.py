"""Memories and knowledges in processes of their own, some of which die at a chosen step."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from support.forked import Forked
from support.waiting import eventually

from shared.participant.service import Service

_HEARTBEAT = 0.5
_SETTINGS: dict[str, dict[str, Any]] = {
    "memory": {"memory_classify": "rules"},
    "knowledge": {"yield_rest": 0},
}


class Replica:
    """A participant that ends by SIGKILL when it comes to `step` (one of the memory keeper's, or of the knowledge's
    ingest) for the `times`-th time; `-`: never."""

    def __init__(
        self, name: str, url: str, folder: Path, model_url: str, step: str = "-", times: int = 1, **values: Any
    ) -> None:
        settings = {"redis_url": url, "data_dir": folder, "heartbeat": _HEARTBEAT, "drain": 1, "log_level": "error",
                    "ollama_host": model_url, **_SETTINGS[name], **values}  # fmt: skip
        environment = {f"LOCAL2_{name.upper()}": str(value) for name, value in settings.items()}
        arguments = ("support.mortal", name, step, str(times))
        self.process = Forked(*arguments, environment={**os.environ, **environment})

    async def died(self) -> None:
        await eventually(lambda: self.process.poll() is not None, 30, "the replica has died")
        assert self.process.returncode == -signal.SIGKILL

    def kill(self) -> None:
        self.process.kill()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def replica(*args: Any, **values: Any) -> Iterator[Replica]:
    """Killed at the end of the block when it still runs."""
    started = Replica(*args, **values)
    try:
        yield started
    finally:
        started.end()


def _serve(participant: str, step: str, times: int) -> None:
    left = times

    def fault(name: str) -> None:
        nonlocal left
        left -= name == step
        if name == step and left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    service = import_module(f"services.{participant}.service")
    Service(participant, service.app.settings_cls, service.builder(fault)).main()


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))
