"""Room on the disk: some stores do not survive that there is none in the middle of a write, and so begin none then.

Chroma holds the interpreter's lock for good after a few such writes, so that the whole process stands still; Ladybug's
next write never returns, and its log cannot be read at the next start.
"""

from __future__ import annotations

import os
from pathlib import Path

# What stays free, in bytes; on a small disk a share of it.
_KEPT = 64 * 1024 * 1024
_SHARE = 20


def no_room(folder: Path) -> str | None:
    """Why nothing may be written to the disk of a folder just now; None when it may be. Raises OSError."""
    about = os.statvfs(folder)
    free = about.f_bavail * about.f_frsize
    if free >= min(_KEPT, about.f_blocks * about.f_frsize // _SHARE):
        return None
    return f"the disk of {folder} is full: {free / 1e6:.0f} MB are left"
