"""A process in which something from outside is parsed: it holds nothing worth stealing, and may be killed at any time.

Frames on stdin and stdout: the length of a JSON object, the object, and in requests the bytes to parse behind it; the
object's `size` says how many they are.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

LENGTH = struct.Struct(">I")

# The bytes and the request in, the answer out.
Answer = Callable[[bytes, dict[str, Any]], dict[str, Any]]


def frame(message: dict[str, Any], data: bytes = b"") -> bytes:
    head = json.dumps(message).encode()
    return LENGTH.pack(len(head)) + head + data


def serve(
    answer: Answer,
    *,
    memory: int,
    cpu_seconds: Callable[[dict[str, Any]], float],
    prepare: Callable[[dict[str, Any]], None] = lambda _request: None,
) -> None:
    """Answers requests until stdin ends.

    memory: bytes of data that the process may have. cpu_seconds: how much of the processor a request may take; beyond
    it, the process ends. prepare: what is not on the request's account, such as imports.
    """
    _confine(memory)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while head := source.read(LENGTH.size):
        request = json.loads(source.read(*LENGTH.unpack(head)))
        data = source.read(request["size"])
        prepare(request)
        with _cpu_limit(cpu_seconds(request)):
            said = frame(answer(data, request))
        del data
        _send(sink, said)


def _send(sink: BinaryIO, said: bytes) -> None:
    sink.write(said)
    sink.flush()


def _confine(memory: int) -> None:
    """Limits that nothing can lift; a system that does not know one of them goes without."""
    limits = {
        resource.RLIMIT_DATA: memory,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 32,
    }
    for which, limit in limits.items():
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(which, (limit, limit))


@contextlib.contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """The signal's default is the end of the process, in the middle of a parser too."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
