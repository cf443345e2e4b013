"""The backup's file: what was written comes back, and nothing that is not whole is taken."""

from __future__ import annotations

import gzip
import io
import random
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.participant.backup import FORMAT, BackupError, Header, Reader, Writer, examine

Content = dict[str, list[dict[str, Any]]]

_names = st.sampled_from(["sessions", "settings", "keys", "memories"])
_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text() | st.floats(-1e300, 1e300),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
_contents = st.dictionaries(_names, st.lists(st.dictionaries(st.text(max_size=8), _json, max_size=4), max_size=6))


def made(content: Content, header: Header | None = None) -> bytes:
    writer = Writer()
    parts = [writer.begin(header or Header("0.1.0", 1_700_000_000_000, dict.fromkeys(content, 1), ["memories"]))]
    for name, records in content.items():
        parts += [writer.records(name, records[:2]), writer.records(name, records[2:]), writer.end(name)]
    return b"".join([*parts, writer.complete()])


def read(data: bytes) -> Content:
    reader = Reader(io.BytesIO(data))
    found: Content = {name: [] for name in reader.header.sections}
    for name, record in reader.records():
        found[name].append(record)
    return found


def refused(data: bytes) -> str:
    """The code with which a file is refused."""
    with pytest.raises(BackupError) as caught:
        examine(io.BytesIO(data))
    return caught.value.code


def packed(*lines: Any) -> bytes:
    return gzip.compress(b"".join(orjson.dumps(line) + b"\n" for line in lines))


SMALL: Content = {"settings": [{"participant": "generator"}], "sessions": [{"a": n} for n in range(5)], "keys": []}


@given(_contents)
@settings(max_examples=50, deadline=None)
def test_what_was_written_is_read_back(content: Content) -> None:
    data = made(content)
    assert read(data) == content
    assert examine(io.BytesIO(data)).counts == {name: len(records) for name, records in content.items()}


def test_it_is_ordinary_gzip_and_ordinary_json_lines() -> None:
    lines = [orjson.loads(line) for line in gzip.decompress(made(SMALL)).splitlines()]
    assert lines[0]["local2_backup"] == FORMAT
    assert lines[0]["sections"] == {"settings": 1, "sessions": 1, "keys": 1}
    assert lines[1] == {"section": "settings", "record": {"participant": "generator"}}
    assert (lines[-1]["complete"], lines[-1]["count"]) == (True, 6)


def test_a_file_cut_off_anywhere_is_refused() -> None:
    whole = made(SMALL)
    codes = {refused(whole[:length]) for length in range(len(whole))}
    assert codes <= {"truncated", "corrupt", "not_a_backup"}
    assert refused(whole[:-1]) == "truncated"


@given(st.integers(0, 10_000), st.integers(1, 255))
@settings(max_examples=100, deadline=None)
@example(9, 1)
def test_a_changed_byte_is_refused_or_changes_nothing(place: int, change: int) -> None:
    whole = bytearray(made(SMALL))
    whole[place % len(whole)] ^= change
    try:
        found = read(bytes(whole))
    except BackupError:
        return
    # a few bytes of gzip's own header (time, system) mean nothing
    assert found == SMALL


@given(st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_lines_lost_doubled_or_exchanged_are_refused(rng: random.Random) -> None:
    lines = gzip.decompress(made(SMALL)).splitlines(keepends=True)
    wrong = list(lines)
    first, second = rng.sample(range(len(wrong)), 2)
    match rng.choice(["drop", "double", "swap"]):
        case "drop":
            del wrong[first]
        case "double":
            wrong.insert(second, wrong[first])
        case _:
            wrong[first], wrong[second] = wrong[second], wrong[first]
    assert wrong != lines
    assert refused(gzip.compress(b"".join(wrong))) in ("corrupt", "truncated", "not_a_backup")


HEAD = {"local2_backup": 1, "product": "1", "created": 1, "sections": {}, "without": [], "notes": []}


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "truncated"),
        (b"PK\x03\x04 a zip file", "not_a_backup"),
        (b'{"not": "compressed"}\n', "not_a_backup"),
        (gzip.compress(b"hello\n"), "not_a_backup"),
        (packed({"some": "json"}), "not_a_backup"),
        (packed([1, 2]), "not_a_backup"),
        (packed({**HEAD, "local2_backup": 2, "product": "9.0"}), "newer_format"),
        (packed(HEAD), "truncated"),
        (packed(HEAD, {"complete": True, "count": 0, "sha256": "0" * 64}), "corrupt"),
        (packed(HEAD, {"section": "unannounced", "record": {}}), "corrupt"),
        (packed(HEAD, {"failed": "unavailable", "message": "the bus went away"}), "incomplete"),
        (made(SMALL) + b"more", "corrupt"),
        (made(SMALL) + packed(HEAD), "corrupt"),
    ],
    # the data hold the time of their making: names of tests must be the same in every process
    ids=["empty", "zip", "json", "words", "object", "list", "newer", "head", "digest", "section", "failed", "more",
         "twice"],
)  # fmt: skip
def test_what_is_no_complete_backup_is_refused_with_its_reason(data: bytes, code: str) -> None:
    assert refused(data) == code


def test_a_newer_format_is_told_with_the_version_that_can_read_it() -> None:
    with pytest.raises(BackupError, match=r"format 2.*reads up to 1.*LoCAL2 9\.0 or newer"):
        examine(io.BytesIO(packed({**HEAD, "local2_backup": 2, "product": "9.0"})))


def test_memory_does_not_grow_with_the_file() -> None:
    import tracemalloc

    def file(number: int) -> io.BytesIO:
        writer, out = Writer(), io.BytesIO()
        out.write(writer.begin(Header("1", 1, {"sessions": 1})))
        for page in range(number):
            out.write(writer.records("sessions", _page(page)))
        out.write(writer.end("sessions") + writer.complete())
        out.seek(0)
        return out

    def peak(number: int) -> int:
        content = file(number)
        tracemalloc.start()
        examine(content)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    small, large = peak(10), peak(200)
    assert large < 2 * small + 200_000, (small, large)


def _page(number: int) -> list[dict[str, Any]]:
    return [{"session_id": f"{number}-{n}", "text": "some words of an answer " * 50} for n in range(16)]
