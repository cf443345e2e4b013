"""A process that has imported what no change concerns, and forks itself for each trial: `python -m mutants.warm`.

Reads one JSON object a line from its input: `{"tests": [ids], "log": path}`. Writes lines of JSON: `{"pid": n}` first,
then `{"starts": id}` and `{"fails": id}` as the tests run, and `{"ends": exit status, "seconds": of a processor that
all its processes took}`. Whatever the trial has left running is killed before that.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from typing import TextIO

import psutil
import pytest

# Slow to import, and none of them starts a thread.
_LIBRARIES = (
    "fastapi httpcore httpx hypothesis jsonschema numpy orjson prometheus_client pydantic_settings pytest_asyncio "
    "redis redis.asyncio typer uvicorn uvloop xdist yaml"
)
_CHILD_SUBREAPER = 36


class _Telling:
    """Says which test runs, and which fails."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def tell(self, **what: object) -> None:
        print(json.dumps(what), file=self._out, flush=True)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.tell(starts=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.tell(fails=report.nodeid)


def _trial(tests: list[str], log: str, out: TextIO) -> int:
    """In the child: runs the tests until one fails. Returns pytest's exit status."""
    os.setsid()
    # what the tests start must not hold the pipe to the one who waits for the end
    telling = _Telling(os.fdopen(os.dup(out.fileno()), "w"))
    into = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (into, 1), (into, 2)):
        os.dup2(source, target)
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    # plugins were imported before pytest could rewrite their assertions
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    return int(pytest.main([*options, *tests], plugins=[telling]))


def main() -> None:
    # whatever a trial leaves behind becomes a child of this process, and can be found
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1)
    for name in _LIBRARIES.split():
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    telling = _Telling(out)
    for line in sys.stdin:
        asked = json.loads(line)
        before = os.times()
        pid = os.fork()
        if pid == 0:
            status = 3
            try:
                status = _trial(asked["tests"], asked["log"], out)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        telling.tell(pid=pid)
        _, status = os.waitpid(pid, 0)
        _tidy()
        after = os.times()
        took = after.children_user + after.children_system - before.children_user - before.children_system
        telling.tell(ends=os.waitstatus_to_exitcode(status), seconds=round(took, 2))


def _tidy() -> None:
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, 0):
                pass


if __name__ == "__main__":
    main()
