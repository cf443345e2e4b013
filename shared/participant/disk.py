"""Free space on the disk: stores that a full disk harms do not begin a write without room.

After a few failed writes, Chroma holds the interpreter's lock for good, so that the whole process stands still.
"""

from __future__ import annotations

import os
from pathlib import Path

# What stays free, in bytes; on a small disk a share of it.
_KEPT = 64 * 1024 * 1024
_SHARE = 20


def no_room(folder: Path) -> str | None:
    """Return why no store may write to the disk of a folder now; None if it may. Raises OSError."""
    about = os.statvfs(folder)
    free = about.f_bavail * about.f_frsize
    if free >= min(_KEPT, about.f_blocks * about.f_frsize // _SHARE):
        return None
    return f"the disk of {folder} is full: {free / 1e6:.0f} MB are left"
