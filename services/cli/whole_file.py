"""A file that is there whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from shared.errors import Local2Error


class FileTrouble(Local2Error):
    """A file cannot be read or written; the text says what to do."""


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """What is written gets its name at the end of the block; what was there before stays until then.

    Readable by its owner alone: conversations are nobody else's business. Raises FileTrouble.
    """
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    try:
        with os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "w+b") as file:
            yield file
        part.replace(path)
    except OSError as exc:
        reason = exc.strerror or exc
        raise FileTrouble(f"{path} cannot be written: {reason}; choose a place that is there and has room") from exc
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
