"""Decompression with a limit, measured in bytes of memory."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.web_fetch.body import MAX_MEMBERS, Body
from services.web_fetch.errors import FetchError


def fed(coding: str, limit: int, *chunks: bytes) -> Body:
    body = Body(coding, limit)
    for chunk in chunks:
        body.feed(chunk)
    return body


def test_a_bomb_in_one_chunk_takes_no_more_memory_than_the_limit_and_a_little() -> None:
    packer = zlib.compressobj(9, wbits=31)
    bomb = b"".join(packer.compress(bytes(1_000_000)) for _ in range(500)) + packer.flush()
    limit = 1_000_000
    tracemalloc.start()
    try:
        body = fed("gzip", limit, bomb)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (len(body.data), body.cut) == (limit, True)
    # The decompressed bytes, their copy in the body, and the compressed input that is left over.
    assert peak < 3 * limit + len(bomb) + 200_000


def test_what_comes_after_the_limit_is_ignored() -> None:
    body = fed("", 5, b"abc", b"defg", b"hij")
    assert (body.data, body.cut) == (b"abcde", True)


def test_a_body_of_exactly_the_limit_is_whole() -> None:
    body = fed("gzip", 5, gzip.compress(b"abcde"))
    assert (body.data, body.cut) == (b"abcde", False)


@pytest.mark.parametrize("rest", [b"\0\0\0", b"trailing garbage"])
def test_padding_after_a_gzip_body_is_ignored(rest: bytes) -> None:
    assert fed("gzip", 100, gzip.compress(b"text") + rest).data == b"text"


def test_all_members_of_a_gzip_body_are_read() -> None:
    assert fed("gzip", 100, gzip.compress(b"one ") + gzip.compress(b"two")).data == b"one two"


def test_a_flood_of_empty_members_ends() -> None:
    assert fed("gzip", 100, gzip.compress(b"") * MAX_MEMBERS + gzip.compress(b"text")).data == b"text"
    with pytest.raises(FetchError, match=r"^fetch error: the page's compression has too many members$"):
        fed("gzip", 100, gzip.compress(b"") * (MAX_MEMBERS + 2))


@pytest.mark.parametrize("coding", ["identity, gzip", "gzip, ", ", GZIP, identity"])
def test_a_coding_that_changes_nothing_does_not_count(coding: str) -> None:
    assert fed(coding, 100, gzip.compress(b"text")).data == b"text"


@given(st.binary(max_size=3_000), st.sampled_from(["", "gzip", "deflate"]), st.integers(1, 4_000), st.integers(1, 500))
def test_any_split_into_chunks_gives_the_same_bytes(data: bytes, coding: str, limit: int, size: int) -> None:
    wire = {"": data, "gzip": gzip.compress(data), "deflate": zlib.compress(data)}[coding]
    body = fed(coding, limit, *(wire[at : at + size] for at in range(0, len(wire), size)))
    assert body.data == data[:limit]
    assert body.cut == (len(data) > limit)
