"""Read the Lua scripts of the records."""

from __future__ import annotations

from pathlib import Path

from shared.bus import PUBLISH_ENTRY, Script

_FOLDER = Path(__file__).parent / "scripts"


def script(name: str, *functions: str) -> Script:
    """Return the script `name`, behind the files that define the functions that it calls."""
    files = [PUBLISH_ENTRY if one == "publish_entry" else _FOLDER / f"{one}.lua" for one in functions]
    return Script.read(*files, _FOLDER / f"{name}.lua")
