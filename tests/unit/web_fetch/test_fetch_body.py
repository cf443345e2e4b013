"""Decompression with a limit, measured in bytes of memory."""

from __future__ import annotations

import gzip
import random
import sys
import tracemalloc
import zlib
from typing import Any

import brotli
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.web_fetch.body import MAX_MEMBERS, PIECE, Body
from services.web_fetch.errors import FetchError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PACK = {"": bytes, "gzip": gzip.compress, "deflate": zlib.compress, "br": brotli.compress, "zstd": zstd.compress}


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


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd"])
def test_body_of_a_bomb_ends_at_the_limit(coding: str) -> None:
    bomb = PACK[coding](bytes(50_000_000))
    assert len(bomb) < 60_000
    tracemalloc.start()
    try:
        body = fed(coding, 1_000_000, bomb, bomb)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (len(body.data), body.cut) == (1_000_000, True)
    assert peak < 4_000_000


def test_body_of_zstd_with_a_large_window_is_refused() -> None:
    packer = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27})
    body = packer.compress(b"text" * 100_000) + packer.flush()
    with pytest.raises(FetchError, match=r"^fetch error: the page's compression is broken$"):
        fed("zstd", 100, body)


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd"])
@pytest.mark.parametrize("broken", [b"this is no compression", b"\xff" * 40])
def test_body_with_broken_compression_is_an_error(coding: str, broken: bytes) -> None:
    with pytest.raises(FetchError, match=r"^fetch error: the page's compression is broken$"):
        fed(coding, 100, broken)


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


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1_000])
def test_body_with_several_zstd_frames_is_read_whole(size: int) -> None:
    skippable = b"\x50\x2a\x4d\x18\x03\0\0\0abc"
    wire = zstd.compress(b"one ") + skippable + zstd.compress(b"two") + b"padding"
    assert fed("zstd", 100, *(wire[at : at + size] for at in range(0, len(wire), size))).data == b"one two"


def test_body_with_a_flood_of_empty_frames_is_refused() -> None:
    with pytest.raises(FetchError, match=r"^fetch error: the page's compression has too many members$"):
        fed("zstd", 100, zstd.compress(b"") * (MAX_MEMBERS + 2))


def test_a_flood_of_empty_members_ends() -> None:
    assert fed("gzip", 100, gzip.compress(b"") * MAX_MEMBERS + gzip.compress(b"text")).data == b"text"
    with pytest.raises(FetchError, match=r"^fetch error: the page's compression has too many members$"):
        fed("gzip", 100, gzip.compress(b"") * (MAX_MEMBERS + 2))


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize("pack", [*PACK.values(), raw_deflate], ids=[*PACK, "raw deflate"])
@pytest.mark.parametrize("text", [bytes(1_000), random.Random(1).randbytes(1_000)], ids=["zeros", "random"])
def test_body_of_several_pieces_is_whole(pack: Any, text: bytes) -> None:
    coding = next((name for name, packer in PACK.items() if packer is pack), "deflate")
    for size in (*range(PIECE - 3, PIECE + 270, 7), 3 * PIECE + 5, 9 * PIECE + 77):
        data = (text * (size // 1_000 + 1))[:size]
        body = fed(coding, 1_000_000, pack(data))
        assert (len(body), body.broken_off) == (size, False)


@pytest.mark.parametrize("coding", ["identity, gzip", "gzip, ", ", GZIP, identity"])
def test_a_coding_that_changes_nothing_does_not_count(coding: str) -> None:
    assert fed(coding, 100, gzip.compress(b"text")).data == b"text"


@given(st.binary(max_size=3_000), st.sampled_from([*PACK]), st.integers(1, 4_000), st.integers(1, 500))
def test_any_split_into_chunks_gives_the_same_bytes(data: bytes, coding: str, limit: int, size: int) -> None:
    wire = PACK[coding](data)
    body = fed(coding, limit, *(wire[at : at + size] for at in range(0, len(wire), size)))
    assert body.data == data[:limit]
    assert body.cut == (len(data) > limit)
    assert not body.broken_off
