"""What cannot be understood is left aside, and said: once, however often it is read again."""

from __future__ import annotations

import zlib

from shared.telemetry.logging import get_logger

log = get_logger()

# So many are remembered as said; whoever writes more nonsense than that hears of some of it again.
_MOST = 1_000
_said: dict[tuple[str, str, int], None] = {}


def not_understood(place: str, entry: str, reason: str, value: bytes = b"") -> None:
    """One line in the log. The value itself is not shown: it may be anybody's words.

    place: the stream or key that it stands in. entry: its id or name there. value: tells another one in the same
    place apart.
    """
    known = (place, entry, zlib.crc32(value))
    if known in _said:
        return
    _said[known] = None
    if len(_said) > _MOST:
        del _said[next(iter(_said))]
    log.warning("bus.not_understood", stream=place[:200], entry_id=entry[:200], reason=reason[:300])
