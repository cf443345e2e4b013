"""Processes of the tests, forked from one that has imported everything: a start costs a tenth of what it would cost
otherwise.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import forkserver
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
PARTICIPANTS = ("critic", "gateway", "generator", "knowledge", "mcp", "memory", "reward", "web_fetch", "web_search")
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(
    [
        "support.apps",
        "support.mortal",
        "shared.testing.model_server",
        *(f"services.{name}.service" for name in PARTICIPANTS),
    ]
)


class Forked:
    """`python -m MODULE ARGUMENTS` in the root of the tree, with the methods of `subprocess.Popen`.

    log: where its output goes; None: where ours does.
    """

    def __init__(self, module: str, *arguments: str, environment: Mapping[str, str], log: Path | None = None) -> None:
        _start_forkserver()
        given = (module, arguments, {**environment, "PYTHONPATH": _path()}, log)
        self._process = _forks.Process(target=_run, args=given, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (status := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _path() -> str:
    return os.pathsep.join([str(TESTS), str(ROOT)])


def _start_forkserver() -> None:
    # it finds what it imports by this variable alone
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = _path()
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _run(module: str, arguments: tuple[str, ...], environment: Mapping[str, str], log: Path | None) -> None:
    if log is not None:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
