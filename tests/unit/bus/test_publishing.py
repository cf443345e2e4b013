"""The commands that publish a message."""

import pytest

from shared.bus import Bus
from shared.contracts import ANSWER_DIALOG, DEAD_LETTER, QUERY_CANCEL, TOOL_RESULT, DeadLetter, Outgoing, QueryCancel
from shared.envelope import Envelope
from shared.participant.inbox import inbox_bound


def cuts(bus: Bus, subject: str, size: int, count: int) -> list[int | None]:
    """To how many entries each of so many messages cuts its stream; None where it does not."""
    commands = [bus.publishing(Outgoing(Envelope(subject, b"x" * size))) for _ in range(count)]
    return [command[command.index("MAXLEN") + 2] if "MAXLEN" in command else None for command in commands]


def test_event_stream_is_trimmed_by_first_and_every_32nd_entry() -> None:
    bus = Bus("redis://localhost:1", "tool/1")
    found = cuts(bus, QUERY_CANCEL.name, 10, 65)
    assert [place for place, keep in enumerate(found) if keep is not None] == [0, 32, 64]
    assert found[0] == QUERY_CANCEL.keep
    # what one process publishes in turn is cut all the same
    for _ in range(2):
        for tool in ("a", "b"):
            for _ in range(16):
                found = cuts(bus, f"{TOOL_RESULT.name}.{tool}", 10, 1)
    assert cuts(bus, f"{TOOL_RESULT.name}.a", 10, 1) == [TOOL_RESULT.keep]


@pytest.mark.parametrize(("size", "cut_by"), [(10_000, 16), (100_000, 3), (320_000, 1), (8_000_000, 1)])
def test_large_entries_trim_their_stream_sooner(size: int, cut_by: int) -> None:
    found = cuts(Bus("redis://localhost:1", "tool/1"), f"{TOOL_RESULT.name}.a", size, 2 * cut_by + 1)
    assert [place for place, keep in enumerate(found) if keep is not None] == [0, cut_by, 2 * cut_by]
    assert (found[0] or 0) * size <= 32_000_000


def test_a_message_that_is_published_once_cuts_like_any_other() -> None:
    bus = Bus("redis://localhost:1", "generator/1")
    commands = [bus.publishing(QUERY_CANCEL.of(QueryCancel(query_id="q"), once=f"q{number}")) for number in range(2)]
    assert [command[6:9] == ("MAXLEN", "~", QUERY_CANCEL.keep) for command in commands] == [True, False]
    # so dead letters are bounded, too
    letter = DeadLetter(stream="s", group="g", entry_id="1-1", deliveries=5, reason="why", fields={})
    command = bus.publishing(DEAD_LETTER.of(letter, once="s:g:1-1"))
    assert command[6:9] == ("MAXLEN", "~", DEAD_LETTER.keep)
    assert bus.publishing(Outgoing(Envelope(ANSWER_DIALOG.name, b"{}")))[2] == "MAXLEN"


def test_only_large_answers_bound_an_inbox() -> None:
    assert inbox_bound(999) == ()
    assert inbox_bound(1_000) == ("MAXLEN", "~", 1_000)
    assert inbox_bound(64_000) == ("MAXLEN", "~", 500)
    assert inbox_bound(20_000_000) == ("MAXLEN", "~", 1)
    assert inbox_bound(64_000_000) == ("MAXLEN", "~", 1)
