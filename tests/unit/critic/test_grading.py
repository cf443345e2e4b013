"""What a judge's words mean: read exactly, or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.critic.grading import (
    Verdict,
    absolute_prompt,
    decide,
    feedback_of,
    parse_score,
    parse_winner,
    relative_prompt,
    unswap,
)

SCORES: dict[str, list[tuple[str, int | None]]] = {
    "as asked for": [
        ("Feedback: The response is correct. [RESULT] 5", 5),
        ("The response is mostly correct. [RESULT] 4", 4),
        ("[RESULT] 1", 1),
        ("Good.\n\n[RESULT] 3\n", 3),
        ("Good. [RESULT]2", 2),
        ("Good. [RESULT]\n\n4", 4),
        ("Good. [RESULT] 4.", 4),
        ("Good. [RESULT] 4</s>", 4),
    ],
    "case, brackets, emphasis": [
        ("Good. [Result] 3", 3),
        ("good. [result] 3", 3),
        ("Good. [ RESULT ] 3", 3),
        ("Good. [RESULT] (5)", 5),
        ("Good. [RESULT] [4]", 4),
        ("Good. [RESULT] <4>", 4),
        ("Good. [RESULT] {4}", 4),
        ("Good. (RESULT) 4", 4),
        ("Good. [RESULT: 4]", 4),
        ("Good. [RESULT 4]", 4),
        ("Good. **[RESULT]** 4", 4),
        ("Good. [RESULT] **4**", 4),
        ("Good. **[RESULT] 4**", 4),
        ("Good. [**RESULT**] __4__", 4),
        ("Good. `[RESULT] 2`", 2),
        (r"Good. \[RESULT\] 2", 2),
        ("## Feedback\nGood.\n## [RESULT] 2", 2),
        ("Good.【RESULT】4", 4),
        ("Good. **Result:** 4", 4),
        ("Good.\nRESULT: 4", 4),
        ("Good. Final result: 4", 4),
    ],
    "colons, labels, scales": [
        ("Good. [RESULT]: 4", 4),
        ("Good. [RESULT] : 4", 4),
        ("Good. [RESULT] = 4", 4),
        ("Good. [RESULT] - 4", 4),
        ("Good. [RESULT] Score: 2", 2),
        ("Good. [RESULT] Score 2", 2),
        ("Good. [RESULT] (Score: 2)", 2),
        ("Good. [RESULT] **Score:** 2/5", 2),
        ("Good. [RESULT] score of 1", 1),
        ("Good. [RESULT] Result: 4", 4),
        ("Good. [RESULT] Overall score: 4", 4),
        ("Good. [RESULT] 4/5", 4),
        ("Good. [RESULT] 4 / 5", 4),
        ("Good. [RESULT] 5 out of 5", 5),
        ("Good. [RESULT] 4 (out of 5)", 4),
        ("Good. [RESULT] 4.0", 4),
        ("Good. [RESULT] 4.0/5", 4),
        ("Good. [RESULT] 4 because the date is missing", 4),
        ("Good. [RESULT] 4, because the date is missing", 4),
        ("Good. [RESULT] 4 (accuracy 5, style 3)", 4),
        ("Good. [RESULT] 4 - solid work", 4),
        ("Good. [RESULT] 4\n\n1. It names the city.\n2. It is short.", 4),
        ("Good. [SCORE] 4", 4),
    ],
    "several numbers and markers: the last result counts": [
        ("It names 3 of 7 reasons and 2 dates. [RESULT] 3", 3),
        ("Score 5 would need sources. [RESULT] 4", 4),
        ("[RESULT] 2 was my first thought, but the source supports it. [RESULT] 4", 4),
        ("Format: [RESULT] (an integer number between 1 and 5)\nGood. [RESULT] 4", 4),
        ("Good. [RESULT] 4\nOutput format: [RESULT] (an integer number between 1 and 5)", 4),
        ("Feedback: weak. [RESULT] 2\n\n###Feedback: good. [RESULT] 5", 5),
    ],
    "other languages and digits": [
        ("Die Antwort ist richtig. [RESULT] 5", 5),
        ("La réponse est correcte mais courte. [RESULT] 4 sur 5", 4),
        ("Die Antwort ist lückenhaft. [RESULT] 3 von 5", 3),
        ("La respuesta es incorrecta. [RESULT] 1 de 5", 1),
        ("回答は正確です。[RESULT] ４", 4),
        ("回答很好。[RESULT] 4分", 4),
        ("Ответ верный. [RESULT] 5 из 5", 5),
    ],
    "no whole grade from 1 to 5": [
        ("Good. [RESULT] 0", None),
        ("Good. [RESULT] 6", None),
        ("Good. [RESULT] 10", None),
        ("Good. [RESULT] 45", None),
        ("Good. [RESULT] -1", None),
        ("Good. [RESULT] 3.5", None),
        ("Good. [RESULT] 3,5", None),
        ("Good. [RESULT] 4½", None),
        ("Good. [RESULT] 4 ½", None),
        ("Good. [RESULT] 3-4", None),
        ("Good. [RESULT] 3 - 4", None),
        ("Good. [RESULT] 3 to 4", None),
        ("Good. [RESULT] 3 or 4", None),
        ("Good. [RESULT] 3, 4", None),
        ("Good. [RESULT] 3/4", None),
        ("Good. [RESULT] 4/10", None),
        ("Good. [RESULT] 4 out of 10", None),
        ("Gut. [RESULT] 4 von 10", None),
        ("Good. [RESULT] 4%", None),
        ("Good. [RESULT] 4+", None),
        ("Good. [RESULT] 4th", None),
        ("Good. [RESULT] four", None),
        ("Good. [RESULT] A", None),
        ("Good. [RESULT] N/A", None),
        ("Good. [RESULT] 4 then again [RESULT] 9", None),
    ],
    "other scales in words, bounds, doubts, what would be": [
        ("Good. [RESULT] 4 out of ten", None),
        ("Good. [RESULT] 4 (out of a possible 10)", None),
        ("Good. [RESULT] 4 on a scale of 1 to 10", None),
        ("Good. [RESULT] 4 on a scale of 1 to 5", 4),
        ("Good. [RESULT] 4 because it lists 8 out of 10 cities", 4),
        ("Good. [RESULT] 4/5.0", 4),
        ("Good. [RESULT] 4/5.5", None),
        ("Good. [RESULT] >3", None),
        ("Good. [RESULT] < 4", None),
        ("Good. [RESULT] < 4 >", 4),
        ("Good. [RESULT] -> 4", 4),
        ("Good. <score>4</score>", 4),
        ("Good. [RESULT] 4?", None),
        ("Good. [RESULT] 3 (or 4)", None),
        ("Good. [RESULT] 3, maybe even a 4", None),
        ("Good. [RESULT] (3) 4", None),
        ("Good. [RESULT] 4_5", None),
        ("Good. [RESULT] 5 would be too much", None),
        ("It would be [RESULT] 5 if it had dates. [RESULT] 3", 3),
        ("Good. [RESULT] ### 4", 4),
    ],
    "truncated, or no result at all": [
        ("", None),
        ("The response is corr", None),
        ("Good. [RESULT]", None),
        ("Good. [RESULT", None),
        ("Good. [RES", None),
        ("The response deserves a 4.", None),
        ("I would give this response 4 out of 5.", None),
        ("I would give it a score of 4", None),
        ("The score is definitely not 3.", None),
        ("I rate this a perfect 10!", None),
        ("A response with score 5 cites its sources; this one does not.", None),
        ("Score 3: The main statement is right, yet details are wrong.", None),
        ("The results: 4 cities are named.", None),
        ("The response (result 3 of the search) is stale.", None),
        ("Score: 2.5", None),
        # what is marked as the result cannot be read: nothing else is taken for it
        ("[RESULT] unclear\nScore: 4", None),
    ],
    "nothing marked but a label that stands alone at the end": [
        ("The main point is right.\nScore: 3", 3),
        ("The main point is right. Score: 3/5", 3),
        ("The main point is right. (Score 5)", 5),
        ("The main point is right.\n**Score: 3**", 3),
        ("I considered a score: 3", None),
    ],
    "headings, with what stands behind them too": [
        ("###Feedback: Right, and short.\n###Score: 4", 4),
        ("Right, and short.\n## Score: 4", 4),
        ("## **Score:** 4/5\n\n## Feedback\nRight, and short.", 4),
        ("### Final Score: 2", 2),
        ("###Score: 4.5", None),
        ("###Score: 3-4", None),
        ("###Score: 7", None),
        ("### Score Rubrics:\nScore 1: wrong.\nScore 5: right.", None),
    ],
    "a last sentence that says it": [
        ("The answer is right and short. Therefore, it earns a score of 5.", 5),
        ("It names the city … so the response is given an overall score of 4 out of 5.", 4),
        ("It is partly right, thus a score of 3", 3),
        ("It would earn a score of 5.", None),
        ("It does not earn a score of 5.", None),
        ("It lacks sources for a score of 5.", None),
        ("This is better than a score of 2.", None),
        ("It earns a score of 4 or a score of 5.", None),
        ("It earns a score of 9.", None),
        ("It earns a score of 4.5", None),
        ("A score of 5. That needs sources.", None),
    ],
    "what is thought is not said": [
        ("<think>At first sight [RESULT] 5", None),
        ("<think>It may deserve more. Score: 4", None),
        ("<think>At first sight [RESULT] 5</think>", None),
        ("<think>At first sight [RESULT] 5</think>It is wrong. [RESULT] 1", 1),
        ("At first sight [RESULT] 5</think>\nIt is wrong. [RESULT] 1", 1),
        ("It is wrong. [RESULT] 1 <think>Or is it [RESULT] 5", 1),
        ("<Thinking>At first sight:\n\n[RESULT] 5\n\nNo.\n</THINKING>\nIt is wrong. [RESULT] 1", 1),
        ("It is wrong. [RESULT] 1\n<THINK>Or is it\n[RESULT] 5", 1),
    ],
}


@pytest.mark.parametrize("kind", SCORES)
def test_a_grade_is_read_exactly_or_not_at_all(kind: str) -> None:
    assert [(text, parse_score(text)) for text, _ in SCORES[kind]] == SCORES[kind]


@given(st.text())
def test_no_text_breaks_the_reading_or_gives_a_grade_off_the_scale(text: str) -> None:
    assert parse_score(text) in (None, 1, 2, 3, 4, 5)
    assert parse_winner(text) in (None, "A", "B", "tie")
    feedback_of(text)


PROSE = st.text(st.characters(exclude_characters="[](){}<>【】「」:=：＝"), max_size=200)


@given(PROSE, st.integers(min_value=0, max_value=10**9))
def test_numbers_in_prose_are_no_grade(words: str, number: int) -> None:
    assert parse_score(f"{words} {number} {words}") is None


@given(
    PROSE,
    st.sampled_from("12345"),
    st.sampled_from(["[RESULT] {}", "**[RESULT]** {}", "[RESULT]: {}/5", "[Result] ({})"]),
)
def test_a_marked_grade_is_found_behind_any_prose(words: str, grade: str, form: str) -> None:
    assert parse_score(f"{words} {form.format(grade)}") == int(grade)


@given(st.integers(), st.sampled_from(["[RESULT] {}", "[RESULT] {}/5", "[RESULT] Score: {}"]))
def test_a_number_off_the_scale_is_never_cut_to_a_grade(number: int, form: str) -> None:
    assert parse_score(form.format(number)) == (number if 1 <= number <= 5 else None)


WINNERS: list[tuple[str, str | None]] = [
    ("Response A is better. [RESULT] A", "A"),
    ("Prefer Response B. [RESULT] B", "B"),
    ("Response A. [RESULT] B", "B"),
    ("Fine. [RESULT]: B", "B"),
    ("Fine. [RESULT: B]", "B"),
    ("Fine. [RESULT] (A)", "A"),
    ("Fine. **[RESULT] A**", "A"),
    ("Fine. [RESULT] Response B", "B"),
    ("Fine. [RESULT] Response B.", "B"),
    ("Fine. [RESULT] B overall", "B"),
    ("Fine. [Result] b", "B"),
    ("Fine. [RESULT] A is better", "A"),
    ("Fine. [RESULT] A because it names the source", "A"),
    ("Fine. [RESULT] B because it names the source", "B"),
    ("Fine. [RESULT] A\n\nB was longer.", "A"),
    ("Fine.\nResult: B", "B"),
    ("Both are clear... [Response B]", "B"),
    ("Both are clear... [Response A]", "A"),
    # what is marked as the result cannot be read: nothing else is taken for it
    ("[RESULT] undecided, leaning to [Response B]", None),
    ("First [RESULT] A, on reflection [RESULT] B", "B"),
    ("Fine. [RESULT] tie", "tie"),
    ("Fine. [RESULT] Both", "tie"),
    ("Fine. [RESULT] b", "B"),
    ("Fine. [RESULT] b.", "B"),
    ("Fine. [RESULT] b side effects were left out of both", None),
    ("Fine. [RESULT] a good answer, all in all", None),
    ("Fine. [RESULT] A good answer, all in all", None),
    ("Fine. [RESULT] A or B", None),
    ("Fine. [RESULT] (A or B)", None),
    ("Fine. [RESULT] A/B", None),
    ("Fine. [RESULT] A = B", None),
    ("Fine. [RESULT] A better answer would cite", None),
    ("Fine. [RESULT] a close call", None),
    ("Fine. [RESULT] A < B", None),
    ("Fine. [RESULT] A > B", "A"),
    ("Fine. [RESULT] A</s>", "A"),
    ("Fine. [RESULT] A? B?", None),
    ("Fine. [RESULT] A is worse than B", None),
    ("Fine. [RESULT] Response A is slightly worse", None),
    ("Fine. [RESULT] B is not better", None),
    ("Fine. [RESULT] B because A is worse", "B"),
    ("Fine. [RESULT] C", None),
    ("Fine. [RESULT] Alpha", None),
    ("Fine. [RESULT] 4", None),
    ("Fine. [RESULT]", None),
    ("Response B Response A", None),
    ("After careful consideration, I select Response B.", None),
    ("The better one is obviously B... or is it A?", None),
    ("", None),
]


def test_a_winner_is_read_exactly_or_not_at_all() -> None:
    assert [(text, parse_winner(text)) for text, _ in WINNERS] == WINNERS


@pytest.mark.parametrize(
    ("first_said", "second_said", "winner"),
    [
        ("A", "B", "A"),
        ("B", "A", "B"),
        ("A", "A", "tie"),
        ("B", "B", "tie"),
        ("tie", "A", "tie"),
        ("tie", "tie", "tie"),
    ],
)
def test_only_what_both_orders_agree_on_is_a_win(first_said: Verdict, second_said: Verdict, winner: Verdict) -> None:
    assert decide(first_said, unswap(second_said)) == winner


def test_the_feedback_is_what_stands_before_the_verdict() -> None:
    assert feedback_of("Feedback: Right, but long. [RESULT] 4") == "Right, but long."
    assert feedback_of("Right.\n**[RESULT]** 4") == "Right."
    assert feedback_of("**Feedback:** Right.\n\n**[RESULT]** 4") == "Right."
    assert feedback_of("### Feedback:\nRight.\n[RESULT]: (4)") == "Right."
    assert feedback_of("Nothing marked") == "Nothing marked"


def test_a_reference_changes_the_template() -> None:
    plain = absolute_prompt("Q?", "An answer.", "[Is it right?]\nScore 1: no")[1]["content"]
    with_reference = absolute_prompt("Q?", "An answer.", "[Is it right?]\nScore 1: no", "The facts.")[1]["content"]
    assert "###Reference Answer" not in plain
    assert "###Reference Answer (Score 5):\nThe facts.\n" in with_reference
    assert plain.endswith("###Feedback: ")


def test_braces_in_an_answer_are_not_taken_for_placeholders() -> None:
    user = relative_prompt("{rubric}", "{response_B} {x}", "{instruction}", "[Which?]")[1]["content"]
    assert "###Instruction:\n{rubric}\n" in user
    assert "###Response A:\n{response_B} {x}\n" in user
    assert "###Response B:\n{instruction}\n" in user


def test_feedback_is_what_was_said_before_the_heading_and_not_what_was_thought() -> None:
    assert feedback_of("<think>Hm. [RESULT] 1</think>###Feedback: It is right.\n###Score: 4") == "It is right."
    assert parse_winner("<think>[RESULT] A") is None
    assert parse_winner("<think>[RESULT] A</think>[RESULT] B") == "B"
