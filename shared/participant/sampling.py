"""A sample of the queries, the same for every participant that takes one."""

from __future__ import annotations

import zlib


def one_in(n: int, query_id: str) -> bool:
    """True for one query in `n`. Every fourth is also one of every second: who judges it finds both answers."""
    return zlib.crc32(query_id.encode()) % n == 0
