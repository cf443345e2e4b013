"""Redis Streams with consumer groups: the only thing that participants share."""

from shared.bus.consumer import Consumer, Delivery, Route
from shared.bus.link import Command, ConnectionLost, Link, OutOfMemory, Reply, ReplyError, Script
from shared.bus.streams import Bus, Entry, GroupState, StreamState, order, with_header
from shared.bus.tail import START, Follower, Tail

__all__ = [
    "START",
    "Bus",
    "Command",
    "ConnectionLost",
    "Consumer",
    "Delivery",
    "Entry",
    "Follower",
    "GroupState",
    "Link",
    "OutOfMemory",
    "Reply",
    "ReplyError",
    "Route",
    "Script",
    "StreamState",
    "Tail",
    "order",
    "with_header",
]
