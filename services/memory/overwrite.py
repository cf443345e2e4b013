"""Leaves nothing of what was deleted in the files of an embedded store: `python -m services.memory.overwrite FOLDER`.

A deletion frees pages and parts of pages, with the words in them, and the queue of changes keeps the words of changes
until a thousand have come. So the queue's words are removed, of which the records have their own, and the file is
written anew. Its files of vectors are as large as they may become, with whatever lay in memory where no vector is yet:
that is made zero. In a process of its own: Chroma has SQLite linked in, and two copies of it in one process undo each
other's locks on a file (sqlite.org/howtocorrupt.html, 2.2.1).
"""

from __future__ import annotations

import sqlite3
import struct
import sys
from contextlib import closing
from pathlib import Path

from services.memory.damage import DATABASE

# Seconds that Chroma may take for what it has begun.
_PATIENCE = 20.0
# A record's words are written with the change itself; what is read of the queue later is the vector.
_WRITTEN = """
CREATE TEMP TABLE written AS SELECT segments.collection, max_seq_id.seq_id FROM segments
    JOIN max_seq_id ON max_seq_id.segment_id = segments.id WHERE segments.scope = 'METADATA'
"""
# A topic ends with its collection's id, a UUID.
_WORDS = """
UPDATE embeddings_queue SET metadata = NULL WHERE metadata IS NOT NULL
    AND seq_id <= (SELECT written.seq_id FROM written WHERE written.collection = substr(embeddings_queue.topic, -36))
"""


# How an index of vectors begins: version, an offset, room for how many, how many there are, bytes of each.
_HEADER = struct.Struct("<iQQQQ")


def overwrite(folder: Path) -> None:
    """Nobody may write vectors meanwhile. Raises sqlite3.Error, OSError."""
    for header in folder.glob("*/header.bin"):
        _, _, _, count, size = _HEADER.unpack_from(header.read_bytes().ljust(_HEADER.size, b"\0"))
        _zeroed(header.with_name("data_level0.bin"), count * size)
        _zeroed(header.with_name("length.bin"), count * 4)
    with closing(sqlite3.connect(folder / DATABASE, timeout=_PATIENCE, isolation_level=None)) as db:
        db.execute("PRAGMA temp_store = MEMORY")
        db.execute(_WRITTEN)
        db.execute("CREATE INDEX temp.written_collection ON written (collection)")
        db.execute(_WORDS)
        db.execute("DROP TABLE written")
        db.execute("VACUUM")
        # the log beside it has the words of what was changed last, and now all that was written anew
        if db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
            raise sqlite3.OperationalError("somebody reads the database just now")


def _zeroed(file: Path, start: int) -> None:
    """Everything behind a place becomes zero."""
    if (rest := file.stat().st_size - start if file.exists() else 0) > 0:
        with file.open("r+b") as written:
            written.seek(start)
            if any(written.read()):
                written.seek(start)
                written.write(bytes(rest))


if __name__ == "__main__":
    try:
        overwrite(Path(sys.argv[1]))
    except (sqlite3.Error, OSError) as exc:
        sys.exit(f"{sys.argv[1]}: {exc}")
