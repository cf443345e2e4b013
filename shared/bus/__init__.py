"""Redis Streams with consumer groups: the only thing that participants share."""

from shared.bus.bell import RING, Bell, open_bell
from shared.bus.consumer import Consumer, Delivery, Route
from shared.bus.follow import START, Follower, next_page
from shared.bus.link import Command, ConnectionLost, Link, OutOfMemory, Reply, ReplyError, Script
from shared.bus.streams import Bus, Entry, GroupState, StreamState, order, with_header
from shared.bus.tail import Tail

__all__ = [
    "RING",
    "START",
    "Bell",
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
    "next_page",
    "open_bell",
    "order",
    "with_header",
]
