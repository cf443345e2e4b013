"""A message and its flat fields: what is written is read back, and nothing malformed gets through."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.envelope import Envelope, Message
from shared.errors import DecodeError

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ENTRY = "1700000000000-3"


def encoded(fields: list[str | bytes]) -> list[bytes]:
    return [part if isinstance(part, bytes) else part.encode() for part in fields]


@given(
    payload=st.binary(),
    texts_=st.lists(texts, min_size=6, max_size=6),
    respondent=st.sampled_from(["A", "B"]),
    deadline=st.none() | st.integers(0, 2**53 - 1),
    attempt=st.integers(1, 99),
)
def test_what_is_written_is_read_back(
    payload: bytes, texts_: list[str], respondent: str, deadline: int | None, attempt: int
) -> None:
    source, correlation, causation, session, user, trace = texts_
    message = Envelope(
        subject="query.received",
        payload=payload,
        source=source,
        correlation_id=correlation,
        causation_id=causation,
        session_id=session,
        user_id=user,
        respondent_id=respondent,
        traceparent=trace,
        deadline=deadline,
        attempt=attempt,
    )
    assert Envelope.parse("query.received", ENTRY, encoded(message.fields())) == replace(message, id=ENTRY)


def test_fields_are_flat_and_readable_and_what_is_not_set_is_left_out() -> None:
    fields = Envelope(subject="s", payload=b"{}", source="gateway/1", deadline=5).fields()
    assert len(fields) % 2 == 0
    assert fields[::2] == ["source", "time", "correlation_id", "session_id", "respondent_id", "deadline", "payload"]
    whole = Envelope(
        "s",
        b"{}",
        causation_id="c",
        user_id="u",
        traceparent="t",
        attempt=2,
    ).fields()
    assert dict(zip(whole[::2], whole[1::2], strict=True)).items() >= {
        ("causation_id", "c"),
        ("user_id", "u"),
        ("traceparent", "t"),
        ("attempt", "2"),
    }


def test_a_payload_alone_is_enough_so_that_any_client_can_write() -> None:
    message = Envelope.parse("s", ENTRY, [b"payload", b"{}"])
    assert message.id == ENTRY
    assert message.time == 1_700_000_000_000
    assert (message.respondent_id, message.attempt, message.deadline) == ("A", None, None)


@pytest.mark.parametrize(
    "fields",
    [
        [],
        [b"id", b"x"],
        [b"payload", b"{}", b"deadline", b"soon"],
        [b"payload", b"{}", b"time", b"1.5"],
        [b"payload", b"{}", b"attempt", b"first"],
        [b"payload", b"{}", b"session_id", b"\xff"],
        [b"payload", b"{}", b"deadline", b"9" * 5000],
        [b"payload", b"{}", b"deadline", b"9" * 400],
        [b"payload", b"{}", b"time", b"-" + b"9" * 16],
        [b"payload", b"{}", b"attempt", b"18446744073709551615"],
    ],
)
def test_malformed_fields_are_a_decode_error(fields: list[bytes]) -> None:
    with pytest.raises(DecodeError):
        Envelope.parse("s", ENTRY, fields)


@given(st.lists(st.tuples(st.sampled_from([b"payload", b"time", b"deadline", b"attempt"]), st.binary())))
def test_any_bytes_are_an_envelope_or_a_decode_error(pairs: list[tuple[bytes, bytes]]) -> None:
    with contextlib.suppress(DecodeError):
        Envelope.parse("s", ENTRY, [part for pair in pairs for part in pair])


def test_a_message_hands_its_ids_on_to_what_it_causes() -> None:
    envelope = Envelope(
        subject="s", payload=b"", id="m1", session_id="s1", user_id="u1", respondent_id="B", traceparent="t", deadline=9
    )
    assert Message(ENTRY, envelope, None).headers() == {
        "correlation_id": ENTRY,
        "causation_id": "m1",
        "session_id": "s1",
        "user_id": "u1",
        "respondent_id": "B",
        "traceparent": "t",
        "deadline": 9,
    }
    known = Envelope(subject="s", payload=b"", correlation_id="1-1")
    assert Message(ENTRY, known, None).headers()["correlation_id"] == "1-1"
