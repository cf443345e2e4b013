"""Where a command belongs in a cluster, and which commands may be under way together."""

from __future__ import annotations

from typing import Any

import pytest

from shared.bus.hash_slots import KEYLESS_SLOT, slot_of, slot_of_key, stages

# As CLUSTER KEYSLOT of a Redis 7 says.
KNOWN = {"foo": 12182, "bar": 5061, "{foo}bar": 12182, "a{foo}{bar}": 12182}


@pytest.mark.parametrize(("key", "slot"), KNOWN.items())
def test_a_key_has_the_slot_that_redis_gives_it(key: str, slot: int) -> None:
    assert slot_of_key(key) == slot_of_key(key.encode()) == slot


def test_empty_or_open_braces_are_part_of_the_key() -> None:
    for odd in ("{}foo", "foo{", "foo{bar", "}foo{"):
        assert slot_of_key(odd) != slot_of_key("foo")
        assert slot_of_key(odd) != slot_of_key("bar")
    assert slot_of_key("{}{foo}") != slot_of_key("foo")
    assert slot_of_key("{}foo}") != slot_of_key("}foo")
    assert slot_of_key("{a}foo") == slot_of_key("a")


FOO = 12182


@pytest.mark.parametrize(
    ("command", "slot"),
    [
        (("GET", "foo"), FOO),
        (("get", b"foo"), FOO),
        (("SET", 17, "x"), slot_of_key("17")),
        (("XGROUP", "CREATE", "foo", "g", "0"), FOO),
        (("XINFO", "GROUPS", "foo"), FOO),
        (("XREADGROUP", "GROUP", "bar", "c", "COUNT", 1, "STREAMS", "foo", ">"), FOO),
        (("XREAD", "BLOCK", 0, b"STREAMS", "foo", "$"), FOO),
        (("EVALSHA", "abc", 1, "foo", "bar"), FOO),
        (("TIME",), KEYLESS_SLOT),
        (("PING",), KEYLESS_SLOT),
        (("INFO", "memory"), KEYLESS_SLOT),
    ],
)
def test_a_command_goes_where_its_first_key_is(command: tuple[Any, ...], slot: int) -> None:
    assert slot_of(command) == slot


A, B = ("SET", "foo", 1), ("SET", "bar", 1)


@pytest.mark.parametrize(
    ("commands", "wanted"),
    [
        ([], []),
        ([A, A], [[0, 1]]),
        ([A, B], [[0], [1]]),
        ([A, A, B, B, A], [[0, 1], [2, 3], [4]]),
        # reads, and deletions, may change places, but not with each other
        ([("GET", "foo"), ("GET", "bar"), ("XLEN", "foo")], [[0, 1, 2]]),
        ([("DEL", "foo"), ("UNLINK", "bar")], [[0, 1]]),
        ([("GET", "foo"), ("DEL", "bar")], [[0], [1]]),
        ([("GET", "foo"), ("GET", "bar"), ("SET", "bar", 1)], [[0, 1], [2]]),
        # of one slot anything keeps its order
        ([("GET", "foo"), A, ("DEL", "foo")], [[0, 1, 2]]),
        ([("GET", "foo"), A, ("GET", "bar")], [[0, 1], [2]]),
        # an acknowledgement waits for all before it
        ([A, ("XACK", "foo", "g", "1-1")], [[0], [1]]),
        ([("XDEL", "foo", "1-1"), A], [[0, 1]]),
    ],
)
def test_a_stage_ends_where_the_order_could_be_lost(commands: list[Any], wanted: list[list[int]]) -> None:
    assert list(stages(commands)) == wanted
