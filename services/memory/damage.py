"""Whether an embedded store is what it was, at a look that costs next to nothing. Only files are read."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from shared.participant.store_marker import sqlite_damage, sqlite_missing, was_created

DATABASE = "chroma.sqlite3"
# Of one collection's vectors; the links are empty while there are few.
_FILES = ("header.bin", "data_level0.bin", "length.bin", "index_metadata.pickle")
# Collections whose vectors are in a folder: of those alone it is known up to which change they were written there.
_WRITTEN = """
SELECT segments.id, collections.name FROM max_seq_id JOIN segments ON segments.id = max_seq_id.segment_id
JOIN collections ON collections.id = segments.collection WHERE segments.scope = 'VECTOR'
"""


def damage_of(folder: Path) -> str | None:
    """What is missing of a store that has been there; None when nothing is, and for a folder that is new."""
    database = folder / DATABASE
    if (what := sqlite_missing(database)) is not None:
        return f"{what} from {folder}" if was_created(folder) else None
    try:
        with closing(sqlite3.connect(f"file:{quote(str(database))}?mode=ro", uri=True)) as db:
            written = db.execute(_WRITTEN).fetchall()
    except sqlite3.Error as exc:
        # another version's tables are read by that version
        return f"{DATABASE}: {exc}" if sqlite_damage(exc) else None
    for segment, name in written:
        for file in (folder / segment / part for part in _FILES):
            if not file.exists() or not file.stat().st_size:
                return f"{file.relative_to(folder)}, with vectors of {name}, is {'empty' if file.exists() else 'gone'}"
    return None
