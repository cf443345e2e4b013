"""The commands of a replica's registry entry, and which tools a worker may announce."""

from __future__ import annotations

from dataclasses import asdict

import orjson
import pytest

from shared.bus.keys import REPLICAS, replica_key
from shared.contracts import is_untrusted
from shared.participant.registry import RELEASE, ReplicaInfo, announcing, leaving, may_serve, still_there

INFO = ReplicaInfo("probe", "r1", "ready", 1, 7, release=RELEASE)


def test_registry_entry_expires_with_its_replica() -> None:
    assert announcing(INFO, 900) == [
        ("SET", replica_key("probe", "r1"), orjson.dumps(asdict(INFO)), "PX", 900),
        ("ZADD", REPLICAS, 7, "probe/r1"),
    ]
    assert leaving("probe", "r1") == [("DEL", replica_key("probe", "r1")), ("ZREM", REPLICAS, "probe/r1")]
    # whole seconds, never less than requested
    for ms, seconds in ((1_000, 1), (1_001, 2), (1_999, 2), (2_000, 2), (300, 1)):
        assert still_there("probe", "r1", ms) == ("EXPIRE", replica_key("probe", "r1"), seconds)


@pytest.mark.parametrize(
    ("participant", "name", "may"),
    [
        ("memory", "search_memory", True), ("memory", "web_search", True), ("web_search", "web_search", True),
        ("web_search", "web_fetch", False), ("web_search", "server__tool", False), ("mcp", "server__tool", True),
        ("mcp", "web_search", False), ("mcp", "mcp", False), ("web_x", None, False), ("mcp", None, False),
    ],
)  # fmt: skip
def test_untrusted_worker_may_announce_only_its_own_tools(participant: str, name: str | None, may: bool) -> None:
    assert may_serve(participant, name) is may
    assert is_untrusted(participant) is (participant != "memory")
