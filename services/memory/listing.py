"""Who has which engrams, read from Chroma's tables before Chroma opens them: at once, however many users there are.

Asked for a collection, Chroma first makes its index of it, some 20 ms for each user. Only files are read.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from services.memory.catalog import Known
from services.memory.damage import DATABASE

# Each engram with its collection, and the values that the catalog needs.
_ENGRAMS = """
SELECT collections.name, owner.str_value, embeddings.embedding_id, time.int_value, kind.string_value,
    respondent.string_value FROM embeddings
JOIN segments ON segments.id = embeddings.segment_id JOIN collections ON collections.id = segments.collection
JOIN collection_metadata AS owner ON owner.collection_id = collections.id AND owner.key = 'user_id'
JOIN collection_metadata AS what ON what.collection_id = collections.id AND what.key = 'kind'
JOIN embedding_metadata AS time ON time.id = embeddings.id AND time.key = 'time'
JOIN embedding_metadata AS kind ON kind.id = embeddings.id AND kind.key = 'kind'
LEFT JOIN embedding_metadata AS respondent ON respondent.id = embeddings.id AND respondent.key = 'respondent_id'
WHERE what.str_value = 'engrams'
"""
# Up to which change the records of each collection were written, and which was the last one that waited for it.
_APPLIED = """
SELECT collections.name, segments.collection, coalesce(max_seq_id.seq_id, 0) FROM segments
JOIN collections ON collections.id = segments.collection
LEFT JOIN max_seq_id ON max_seq_id.segment_id = segments.id WHERE segments.scope = 'METADATA'
"""
_TOLD = "SELECT topic, max(seq_id) FROM embeddings_queue GROUP BY topic"
# A topic ends with its collection's id, a UUID.
_UUID = 36


@dataclass(frozen=True, slots=True)
class Listing:
    """engrams: of collections that are as they should be. behind: the names of those whose last changes Chroma has
    still to apply, after a crash."""

    engrams: Sequence[Known] = ()
    behind: Sequence[str] = ()


def listing_of(folder: Path, prefix: str) -> Listing | None:
    """What a store has that nobody has open; None when its tables are not those that are known here.

    prefix: of the names of this memory's collections.
    """
    database = folder / DATABASE
    if not database.exists():
        return Listing()
    try:
        with closing(sqlite3.connect(f"file:{quote(str(database))}?mode=ro", uri=True)) as db:
            told = {topic[-_UUID:]: last for topic, last in db.execute(_TOLD)}
            rows = [row for row in db.execute(_APPLIED) if row[0].startswith(f"{prefix}.")]
            behind = {name for name, collection, applied in rows if told.get(collection, 0) > applied}
            engrams = [
                Known(engram_id, user_id, at, kind, respondent != "B")
                for name, user_id, engram_id, at, kind, respondent in db.execute(_ENGRAMS)
                if name.startswith(f"{prefix}.") and name not in behind
            ]
    except sqlite3.Error:
        return None
    return Listing(engrams, sorted(behind))
