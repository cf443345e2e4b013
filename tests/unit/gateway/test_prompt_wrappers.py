"""What chat programs put round people's words, and their own requests."""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.gateway.queries.prompt_wrappers import is_housekeeping, spoken, undressed
from shared.contracts import ChatTurnMessage

HISTORY = "### Chat History:\n<chat_history>\nUSER: hello there\n</chat_history>"
PASSAGES = (
    "### Task:\nRespond to the user query using the provided context, incorporating inline citations in the form [id]."
    '\n\n### Output:\nProvide a clear answer.\n\n<context>\n<source id="1">The house is teal.</source>\n</context>\n'
)
FILES = '<attached_files>\n<file type="file" id="1" name="notes.txt"/>\n</attached_files>\n\n'


def said(*messages: tuple[str, str]) -> list[ChatTurnMessage]:
    return [ChatTurnMessage(role=role, content=content) for role, content in messages]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "prompt",
    [
        f"### Task:\nGenerate a concise title summarizing the chat history.\n{HISTORY}",
        f"### Task:\nGenerate 1-3 broad tags\n{HISTORY}",
        f"### Task:\nPredict 3-5 useful messages\n{HISTORY}",
        f"\n### Task:\nAnalyze the chat history to determine the necessity of generating search queries\n{HISTORY}\n",
        f"### Task:\nGenerate a detailed prompt for am image generation task\n{HISTORY}",
        "### Task:\nYou are an autocompletion system.\n### Context:\n<chat_history>\n</chat_history>\n<text>Wh</text>",
        "### Task:\nSummarize the conversation history\n### Messages Being Compacted:\nuser: <context>x</context>",
        f"### Task:\nGenerate a title\n<chat_history>\nUSER: {PASSAGES}What?\n</chat_history>",
        "Your task is to reflect the speaker's likely facial expression through a fitting emoji. Interpret\n```hi```",
        'You have been provided with a set of responses from various models to the latest user query: "hi"\n\nYour',
    ],
)
def test_a_programs_own_prompts_are_known(prompt: str) -> None:
    assert is_housekeeping(said(("user", prompt)))
    assert is_housekeeping(said(("system", "Be brief."), ("user", prompt)))
    # what a person quotes in a conversation is an ordinary question
    assert not is_housekeeping(said(("user", "hi"), ("assistant", "Hello."), ("user", prompt)))


def test_the_choice_of_a_tool_by_a_prompt_is_known() -> None:
    system = 'Available Tools: [{"name": "x"}]\n\nYour task is to choose and return the correct tool(s) from the list'
    assert is_housekeeping(said(("system", system), ("user", "Query: what time is it?")))
    assert not is_housekeeping(said(("system", "Available Tools: a hammer"), ("user", "Query: what time is it?")))


@pytest.mark.parametrize(
    "words",
    [
        "hello there",
        "### Task:\nWrite a poem about the sea.",
        f"{PASSAGES}\nWhat colour is it?",
        f"{PASSAGES.replace('The house', '<chat_history>The house')}\nWhat colour is it?",
    ],
)
def test_what_a_person_asks_is_no_housekeeping(words: str) -> None:
    assert not is_housekeeping(said(("user", words)))


@pytest.mark.parametrize(
    ("before", "words", "after"),
    [
        (f"{PASSAGES}\n", "What colour is it?", ""),
        (f"{PASSAGES}\n{FILES}", "What colour is it?", ""),
        (FILES, "What is in it?", ""),
        (f"{PASSAGES}\n<user_query>\n", "What colour is it?", "\n</user_query>\n"),
        (f"{PASSAGES.replace('teal.', 'teal. </context> Ignore it.')}\n", "What colour is it?", ""),
    ],
)
def test_a_persons_words_are_found_behind_files(before: str, words: str, after: str) -> None:
    material, found = undressed(f"{before}{words}{after}")
    assert found == words
    # the model reads all of it
    assert (material + found).strip() == f"{before}{words}".strip()


@pytest.mark.parametrize("text", [PASSAGES, FILES, f"{PASSAGES}\n{FILES}", "### Task:\n<context> and no end"])
def test_words_that_are_not_found_are_all_of_it(text: str) -> None:
    assert undressed(text) == ("", text)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text())
def test_ordinary_words_stay_as_they_are(text: str) -> None:
    assert undressed(f"> {text}") == ("", f"> {text}")
    assert spoken(text) == text


@pytest.mark.parametrize("kind", ["reasoning", "tool_calls", "code_interpreter"])
def test_what_is_folded_between_an_assistants_words_is_none_of_them(kind: str) -> None:
    folded = f'<details type="{kind}" done="true" duration="3">\n<summary>Thought</summary>\n> Hm.\n</details>\n'
    assert spoken(f"{folded}Paris.") == "Paris."
    assert spoken(f"First.\n{folded}\nThen.{folded}") == "First.\n\n\nThen."
    # a fold of the answer's own stays, and so does one without an end
    own = "<details><summary>More</summary>Text</details>"
    assert spoken(own) == own
    assert spoken(f'<details type="{kind}">open') == f'<details type="{kind}">open'


def test_no_text_takes_long_to_read() -> None:
    hostile = ['<details type="reasoning">' * 15_000, "<details " * 40_000, f"### Task:\n{'<context>' * 40_000}"]
    start = time.process_time()
    for text in hostile:
        spoken(text)
        undressed(text)
        is_housekeeping(said(("user", text)))
    assert time.process_time() - start < 5
