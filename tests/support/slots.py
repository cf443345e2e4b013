"""Slots of entries that are in no Redis."""

from __future__ import annotations

from shared.bus.slots import Delivery


async def uncounted(_delivery: Delivery, _deliveries: int) -> None:
    """Store no number of deliveries."""


async def nothing_to_end() -> bool:
    """End no read."""
    return False
