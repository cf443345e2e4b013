"""Memories and knowledges in processes of their own, some of which die at a chosen step.

They are forked from one process that has imported everything: a start costs a tenth of what it would cost otherwise.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping
from importlib import import_module
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from support.services import TESTS
from support.waiting import eventually

from shared.participant.service import Service

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload([__name__, "services.memory.service", "services.knowledge.service"])
_HEARTBEAT = 0.5
_SETTINGS: dict[str, dict[str, Any]] = {
    "memory": {"memory_classify": "rules"},
    "knowledge": {"yield_rest": 0, "store_buffer": 32 * 1024 * 1024},
}


class Replica:
    """A participant that ends by SIGKILL when it comes to `step` (one of the memory keeper's, or of the knowledge's
    ingest) for the `times`-th time; `-`: never."""

    def __init__(
        self, name: str, url: str, folder: Path, model_url: str, step: str = "-", times: int = 1, **values: Any
    ) -> None:
        settings = {"redis_url": url, "data_dir": folder, "heartbeat": _HEARTBEAT, "drain": 1, "log_level": "error",
                    "ollama_host": model_url, **_SETTINGS[name], **values}  # fmt: skip
        _start_forkserver()
        environment = {f"LOCAL2_{name.upper()}": str(value) for name, value in settings.items()}
        self.process = _forks.Process(target=_serve, args=(name, step, times, environment))
        self.process.start()

    async def died(self) -> None:
        await eventually(lambda: not self.process.is_alive(), 30, "the replica has died")
        assert self.process.exitcode == -signal.SIGKILL

    def kill(self) -> None:
        self.process.kill()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()


@contextlib.contextmanager
def replica(*args: Any, **values: Any) -> Iterator[Replica]:
    """Killed at the end of the block when it still runs."""
    started = Replica(*args, **values)
    try:
        yield started
    finally:
        started.end()


def _start_forkserver() -> None:
    # it finds what it imports by this variable alone
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _serve(participant: str, step: str, times: int, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    left = times

    def fault(name: str) -> None:
        nonlocal left
        left -= name == step
        if name == step and left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    service = import_module(f"services.{participant}.service")
    Service(participant, service.app.settings_cls, service.builder(fault)).main()
