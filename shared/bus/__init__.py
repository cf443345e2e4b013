"""Redis Streams with consumer groups: the only thing that participants share."""

import sys

if "opentelemetry.sdk.metrics" not in sys.modules:
    # redis-py imports it where it is installed, for metrics of its own that are off: 2 MB in each process.
    sys.modules["opentelemetry.sdk.metrics"] = None  # type: ignore[assignment]
    import shared.bus.redis_connection  # noqa: F401

    del sys.modules["opentelemetry.sdk.metrics"]

from shared.bus.connection import Connection
from shared.bus.consumer import Consumer, Route
from shared.bus.follow import START, Follower, StreamTailer, next_page
from shared.bus.replies import FULL, TOGETHER, BusFull, Command, ConnectionLost, Reply, ReplyError
from shared.bus.scripts import Script
from shared.bus.slots import Delivery, Limit
from shared.bus.streams import Bus, Entry, create_group_command
from shared.bus.subscriber import PUBLISH_ENTRY, JournalSubscriber, open_subscriber
from shared.envelope import order

__all__ = [
    "FULL",
    "PUBLISH_ENTRY",
    "START",
    "TOGETHER",
    "Bus",
    "BusFull",
    "Command",
    "Connection",
    "ConnectionLost",
    "Consumer",
    "Delivery",
    "Entry",
    "Follower",
    "JournalSubscriber",
    "Limit",
    "Reply",
    "ReplyError",
    "Route",
    "Script",
    "StreamTailer",
    "create_group_command",
    "next_page",
    "open_subscriber",
    "order",
]
