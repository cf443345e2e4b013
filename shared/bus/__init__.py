"""Redis Streams with consumer groups: the only thing that participants share."""

from shared.bus.bell import RING, Bell, open_bell
from shared.bus.consumer import Consumer, Route
from shared.bus.follow import START, Follower, Tail, next_page
from shared.bus.link import Link
from shared.bus.port import FULL, TOGETHER, BusFull, Command, ConnectionLost, Port, Reply, ReplyError, Script
from shared.bus.slots import Delivery, Limit
from shared.bus.streams import Bus, Entry, grouping, order

__all__ = [
    "FULL",
    "RING",
    "START",
    "TOGETHER",
    "Bell",
    "Bus",
    "BusFull",
    "Command",
    "ConnectionLost",
    "Consumer",
    "Delivery",
    "Entry",
    "Follower",
    "Limit",
    "Link",
    "Port",
    "Reply",
    "ReplyError",
    "Route",
    "Script",
    "Tail",
    "grouping",
    "next_page",
    "open_bell",
    "order",
]
