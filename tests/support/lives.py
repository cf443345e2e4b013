"""What is kept must go by itself, unless its family says that it lasts."""

from __future__ import annotations

import redis

from shared.bus.keys import FAMILIES


def unending(raw: redis.Redis) -> list[str]:
    """The keys that nothing will ever remove, though their family expires (shared/bus/keys.py)."""
    found = [key.decode(errors="replace") for key in raw.scan_iter("*") if raw.ttl(key) == -1]
    return [key for key in found if any(family.parts(key) is not None for family in FAMILIES if not family.lasting)]
