"""What a client sends, beside what a session holds."""

from __future__ import annotations

import unicodedata

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.gateway.queries.history import Change, Said, begins, change, queries_of, same, turns_of
from shared.bus import order
from shared.contracts import ChatToolCall, ChatTurnMessage
from shared.records.sessions import Turn

# a busy machine is slow at making examples
patiently = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
NOW = 1_700_000_000_000
WORDS = st.sampled_from(["Hello.", "Paris", "What is it?", "It is 3.", "ü", "One\n\nTwo"])
SAID = st.lists(st.builds(Said, WORDS, WORDS), max_size=6)


@st.composite
def held_turns(draw: st.DrawFn) -> list[Turn]:
    """Turns as queries left them, and as changes did."""
    turns: list[Turn] = []
    for number, said in enumerate(draw(SAID)):
        turns.append(Turn(f"{NOW - 1000 + number}-0", said.query, said.answer, NOW))
    for said in draw(st.lists(SAID, max_size=2)):
        turns = applied(turns, change(turns, said, NOW))
    return turns


def applied(held: list[Turn], change: Change) -> list[Turn]:
    kept = {turn.query_id: turn for turn in held if turn.query_id not in change.gone}
    # a turn that is there already would not be written
    assert not kept.keys() & {turn.query_id for turn in change.added}
    return sorted([*kept.values(), *change.added], key=lambda turn: order(turn.query_id))


def messages(*said: tuple[str, str]) -> list[ChatTurnMessage]:
    return [ChatTurnMessage(role=role, content=content) for role, content in said]  # type: ignore[arg-type]


@patiently
@given(held_turns(), SAID)
def test_a_session_holds_what_its_client_sends_and_keeps_what_is_the_same(held: list[Turn], sent: list[Said]) -> None:
    needed = change(held, sent, NOW)
    after = applied(held, needed)
    assert [(turn.query, turn.answer) for turn in after] == [(said.query, said.answer) for said in sent]
    assert all(order(turn.query_id) < (NOW, 0) for turn in after)
    # the same once more changes nothing
    assert not change(after, sent, NOW)
    # what is the same at the beginning stays as it is
    front = 0
    while front < min(len(held), len(sent)) and same(held[front], sent[front]):
        assert after[front] == held[front]
        front += 1


@patiently
@given(held_turns(), st.data())
def test_a_turn_that_goes_takes_no_other_with_it(held: list[Turn], data: st.DataObject) -> None:
    if not held:
        return
    place = data.draw(st.integers(0, len(held) - 1))
    sent = [Said(turn.query, turn.answer) for turn in held]
    del sent[place]
    needed = change(held, sent, NOW)
    assert len(needed.gone) == 1
    assert not needed.added


@patiently
@given(held_turns(), st.data())
def test_a_session_begins_with_every_beginning_of_it(held: list[Turn], data: st.DataObject) -> None:
    some = held[: data.draw(st.integers(0, len(held)))]
    assert begins(held, [Said(turn.query, turn.answer) for turn in some])
    assert not begins(held, [Said("other", "one") for _ in range(len(held) + 1)])


def test_an_edited_answer_in_the_middle_is_put_between_its_neighbours() -> None:
    held = [Turn(f"{NOW - 10 + n}-0", f"q{n}", f"a{n}", NOW) for n in range(3)]
    needed = change(held, [Said("q0", "a0"), Said("q1", "better"), Said("q2", "a2")], NOW)
    assert needed.gone == [held[1].query_id]
    (added,) = needed.added
    assert order(held[0].query_id) < order(added.query_id) < order(held[2].query_id)
    assert (added.query, added.answer, added.time) == ("q1", "better", NOW - 10)


def test_where_there_is_no_room_between_two_turns_those_behind_are_written_anew() -> None:
    held = [Turn(f"{NOW}-{1_000_000_000 + n}", f"q{n}", f"a{n}", NOW) for n in range(2)]
    needed = change(held, [Said("q0", "a0"), Said("x", "y"), Said("q1", "a1")], NOW + 1)
    assert [turn.query for turn in applied(held, needed)] == ["q0", "x", "q1"]
    assert needed.gone == [held[1].query_id]


def test_what_clients_do_to_texts_makes_no_difference() -> None:
    folded = '<details type="reasoning" done="true">\n<summary>Thought</summary>\n> Hm.\n</details>\n'
    asked = "### Task:\nAnswer.\n<context>\nfile\n</context>\n\nWhat is it?  "
    (said,) = turns_of(messages(("user", asked), ("assistant", f"{folded}It  is 3.\n")))
    assert same(said, Turn("1-0", "What is it?", "It is 3.", 1))
    assert same(Said(unicodedata.normalize("NFD", "ü"), "x"), Said("ü", " x"))
    assert not same(Said("a", "b"), Said("a", "c"))


def test_turns_of_a_history_have_their_files() -> None:
    shown = ChatTurnMessage(role="user", content="What is it?", attachments=["f1", "f2", "f1"])
    sent = turns_of([shown, *messages(("assistant", "A square."), ("user", "And?"), ("assistant", "Red."))])
    assert [said.attachments for said in sent] == [("f1", "f2"), ()]
    found = change([], sent, 1_700_000_000_000)
    assert [turn.attachments for turn in found.added] == [({"id": "f1"}, {"id": "f2"}), ()]
    # The same words with other files change nothing.
    assert not change(found.added, [Said(said.query, said.answer) for said in sent], 1_700_000_000_000)


def test_the_turns_of_a_history_are_questions_with_the_last_that_was_said_to_them() -> None:
    call = ChatToolCall(id="call_1700000000000_3_0_0", name="clock", args={})
    history = [
        *messages(("system", "Be brief."), ("user", "unanswered"), ("user", "What time is it?")),
        ChatTurnMessage(role="assistant", content="I look.", tool_calls=[call]),
        ChatTurnMessage(role="tool", content="noon", tool_call_id=call.id),
        *messages(
            ("assistant", "Noon."), ("system", "More."), ("user", "Thanks."), ("assistant", " "), ("user", "Bye")
        ),
    ]
    assert turns_of(history) == [Said("What time is it?", "Noon.")]
    assert queries_of(history) == {"1700000000000-3"}
    other = ChatTurnMessage(role="assistant", tool_calls=[ChatToolCall(id="call_x", name="clock", args={})])
    assert queries_of([other]) == set()
    assert turns_of([]) == []
