"""When older turns are to be summarised, which, and from what the summary is made."""

from __future__ import annotations

from services.generator.compaction import Past, due, material, readable
from services.generator.context import Conversation, fit
from shared.records.sessions import Turn
from shared.records.summaries import Summary


def turn(n: int, size: int = 300) -> Turn:
    return Turn(f"{n}-0", "q" * size, "a" * size, n)


# a turn of 300 + 300 characters is 216 tokens at 3 characters per token; the room is 4096 - 1024
TURNS = [turn(n) for n in range(1, 11)]
NEW = turn(11)


def test_nothing_is_summarised_while_there_is_room() -> None:
    assert due(TURNS, NEW, 2_400, 4_096, 50) is None


def test_near_the_window_all_but_the_newest_turns_are_summarised() -> None:
    # 0.4 of the room are 1228 tokens: five turns
    assert due(TURNS, NEW, 2_500, 4_096, 50) == "6-0"
    # what the server counts as fewer tokens leaves more of them
    assert due([turn(n) for n in range(1, 21)], turn(21), 2_500, 4_096, 50, ratio=6.0) == "11-0"


def test_where_tools_take_much_of_the_context_a_summary_still_makes_room_for_several_turns() -> None:
    # 1500 tokens that are no turns
    told: list[Turn] = []
    summaries = 0
    for number in range(1, 41):
        new = turn(number)
        used = 1_500 + 216 * (len(told) + 1)
        until = due(told, new, used, 4_096, 50)
        told.append(new)
        if until is not None:
            summaries += 1
            told = [one for one in told if one.time > int(until.partition("-")[0])]
    assert 5 <= summaries <= 20


def test_a_context_that_is_full_of_something_else_is_no_reason() -> None:
    assert due(TURNS[:2], NEW, 4_000, 4_096, 50) is None
    assert due([], turn(1, 9_000), 4_000, 4_096, 50) is None


def test_one_giant_turn_leaves_the_newest_alone() -> None:
    assert due(TURNS[:2], turn(11, 9_000), 4_000, 4_096, 50) == "2-0"


def test_before_a_turn_is_left_out_for_its_number_half_of_them_are_summarised() -> None:
    assert due(TURNS[:8], NEW, 500, 32_000, 10) is None
    assert due(TURNS[:9], NEW, 500, 32_000, 10) == "5-0"
    assert due(TURNS[:1], NEW, 500, 32_000, 1) == "1-0"


def test_without_a_known_window_nothing_is_said() -> None:
    assert due(TURNS, NEW, 0, 0, 50) is None


def test_what_a_summary_covers_is_told_by_it() -> None:
    past = Past(TURNS, Summary("7-0", 40, "They met."))
    assert [one.query_id for one in past.after] == ["8-0", "9-0", "10-0"]
    assert Past(TURNS).after == TURNS


def test_a_summary_is_made_from_the_one_before_and_the_turns_after_it() -> None:
    text = material(Summary("1-0", 1, "They met."), [Turn("2-0", "Where?", "In Porto.", 2)], 10_000)
    assert text == "=== SUMMARY SO FAR ===\nThey met.\n\n=== TURNS ===\n\nUser: Where?\nAssistant: In Porto."


def test_summary_is_made_with_the_names_of_attached_files() -> None:
    turns = [Turn("2-0", "Where?", "In Porto.", 2, attachments=({"id": "f", "name": "map.png"}, {"id": "g"}))]
    assert "User: [attached: map.png] [attached: a file] Where?\n" in material(None, turns, 10_000)


def test_long_texts_give_way_so_that_all_turns_are_read() -> None:
    text = material(None, [turn(1, 50_000), Turn("2-0", "Where?", "In Porto.", 2)], 4_000)
    assert len(text) < 4_500
    assert "In Porto." in text
    assert "[…]" in text


def test_no_more_turns_are_read_at_once_than_have_room() -> None:
    """A server cuts the beginning of what is too long for the model: the older turns would be in no summary."""
    turns, before = [turn(n, 2_000) for n in range(100)], Summary("0-0", 9, "They met. " * 40)
    at_once = readable(before, turns, 4_000)
    assert at_once == turns[: len(at_once)]
    assert 5 < len(at_once) < 10
    assert len(material(before, at_once, 4_000)) < 4_300
    # short ones have room
    assert len(readable(None, [turn(n, 5) for n in range(100)], 4_000)) == 100
    # one at least
    assert readable(before, turns, 100) == turns[:1]
    assert readable(None, [], 4_000) == []


def test_what_the_model_sees_is_told_in_counts_and_ids() -> None:
    conversation = Conversation([], [list(one.messages()) for one in TURNS])
    conversation.names = [one.query_id for one in TURNS]
    conversation.summarised, conversation.until = 40, "0-5"
    fitted = conversation.fit([{"role": "user", "content": "x"}], [], 1_600)
    assert 0 < fitted.dropped < 10
    assert conversation.seen(fitted) == {
        "turns": fitted.kept,
        "cut": fitted.dropped,
        "first_turn": f"{fitted.dropped + 1}-0",
        "summarised": 40,
        "summarised_until": "0-5",
    }
    # a history that the client keeps has no ids here
    assert Conversation([], []).seen(fit([], [], [], [], 100)) == {"turns": 0, "cut": 0}
