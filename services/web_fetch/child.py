"""The process in which pages are read: it holds nothing worth stealing, and may be killed at any time.

Frames on stdin and stdout: the length of a JSON object, the object, and in requests the page's bytes behind it.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import struct
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO

from services.web_fetch.charset import to_text
from services.web_fetch.extract import extract
from services.web_fetch.parts import part

LENGTH = struct.Struct(">I")
# What the process itself holds is 30 MB of it.
MEMORY = 105 * 1024 * 1024
# Together less than two, with what it takes to start another process.
CPU_SECONDS, PLAIN_CPU_SECONDS = 1.25, 0.5


def frame(message: dict[str, Any], data: bytes = b"") -> bytes:
    head = json.dumps(message).encode()
    return LENGTH.pack(len(head)) + head + data


def read(data: bytes, request: dict[str, Any]) -> dict[str, Any]:
    """The part of the page's text that is asked for."""
    text = to_text(data, request["declared"], request["cut"])
    content = extract(text, request["content_type"], plain=request["plain"])
    whole = content.headed
    offset = min(request["offset"], len(whole))
    shown, after = part(whole, offset, request["max_chars"])
    return {
        "title": content.title,
        "text": shown,
        "chars": len(whole),
        "after": after,
        "cut": request["cut"] or content.cut,
    }


def main() -> None:
    _confine()
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while head := source.read(LENGTH.size):
        request = json.loads(source.read(*LENGTH.unpack(head)))
        data = source.read(request["size"])
        if not request["plain"]:
            _load()
        with _cpu_limit(PLAIN_CPU_SECONDS if request["plain"] else CPU_SECONDS):
            answer = frame(read(data, request))
        del data
        _send(sink, answer)


def _send(sink: BinaryIO, answer: bytes) -> None:
    sink.write(answer)
    sink.flush()


def _confine() -> None:
    """Limits that a page cannot lift; a system that does not know one of them goes without."""
    limits = {
        resource.RLIMIT_DATA: MEMORY,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 32,
    }
    for which, limit in limits.items():
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(which, (limit, limit))


def _load() -> None:
    """What the extractor imports is not on the page's account."""
    import bs4  # noqa: F401
    import trafilatura  # noqa: F401


@contextlib.contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """The signal's default is the end of the process, in the middle of a parser too."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
