"""The fallbacks of a model call: from an attempt and its failure to the next attempt, or to none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shared.llm.attempts import (
    FALLBACKS,
    Attempt,
    EndlessRepetition,
    Failure,
    Fallback,
    again_after_empty,
    next_attempt,
    without_thinking_options,
    without_thoughts,
    without_tools,
)
from shared.llm.failures import ThinkingUnsupported, ToolsUnsupported
from shared.llm.port import (
    ChatRequest,
    ContextOverflow,
    EmptyAnswer,
    ModelError,
    ModelOverloaded,
    Notice,
    StreamInterrupted,
)

TOOL = {"type": "function", "function": {"name": "web_search", "parameters": {}}}
ASKED = ChatRequest("m", [{"role": "user", "content": "What is new?"}], tools=[TOOL])
FIRST = Attempt(ASKED)
NO_TOOLS = replace(FIRST, lacks=frozenset({"tools"}))
NO_THINKING = replace(FIRST, lacks=frozenset({"thinking"}))
NEITHER = replace(FIRST, lacks=frozenset({"tools", "thinking"}))
EMPTY_ONCE = replace(FIRST, after_empty=True)
QUIET = replace(FIRST, after_loop=True)

TOOLS_REFUSED = Failure(ToolsUnsupported("does not support tools"))
THINKING_REFUSED = Failure(ThinkingUnsupported("does not support thinking"))
EMPTY = Failure(EmptyAnswer("nothing"))
LOOPED = Failure(EndlessRepetition("round and round"), shown=True)


@pytest.mark.parametrize(
    ("fallback", "attempt", "failure", "expected"),
    [
        pytest.param(without_tools, FIRST, TOOLS_REFUSED, NO_TOOLS, id="tools-refused"),
        pytest.param(without_tools, NO_THINKING, TOOLS_REFUSED, NEITHER, id="tools-refused-after-thinking"),
        pytest.param(without_tools, NO_TOOLS, TOOLS_REFUSED, None, id="tools-refused-twice"),
        pytest.param(without_tools, Attempt(replace(ASKED, tools=())), TOOLS_REFUSED, None, id="no-tools-to-refuse"),
        pytest.param(without_tools, FIRST, replace(TOOLS_REFUSED, shown=True), None, id="tools-refused-after-text"),
        pytest.param(without_thinking_options, FIRST, THINKING_REFUSED, NO_THINKING, id="thinking-refused"),
        pytest.param(without_thinking_options, NO_TOOLS, THINKING_REFUSED, NEITHER, id="thinking-refused-after-tools"),
        pytest.param(without_thinking_options, NO_THINKING, THINKING_REFUSED, None, id="thinking-refused-twice"),
        pytest.param(
            without_thinking_options, FIRST, replace(THINKING_REFUSED, shown=True), None, id="thinking-refused-too-late"
        ),
        pytest.param(
            without_thinking_options,
            Attempt(replace(ASKED, think=False)),
            THINKING_REFUSED,
            Attempt(replace(ASKED, think=False), frozenset({"thinking"})),
            id="switching-thinking-off-refused",
        ),
        pytest.param(again_after_empty, FIRST, EMPTY, EMPTY_ONCE, id="empty-once"),
        pytest.param(again_after_empty, FIRST, replace(EMPTY, shown=True), EMPTY_ONCE, id="thoughts-alone"),
        pytest.param(again_after_empty, EMPTY_ONCE, EMPTY, None, id="empty-twice"),
        pytest.param(without_thoughts, FIRST, LOOPED, QUIET, id="loop-once"),
        pytest.param(without_thoughts, QUIET, LOOPED, None, id="loop-twice"),
        pytest.param(
            without_thoughts, Attempt(replace(ASKED, think=False)), LOOPED, None, id="loop-in-thoughts-not-asked-for"
        ),
    ],
)
def test_fallback_returns_next_attempt(
    fallback: Fallback, attempt: Attempt, failure: Failure, expected: Attempt | None
) -> None:
    assert fallback(attempt, failure) == expected
    assert next_attempt(attempt, failure) == expected


@pytest.mark.parametrize("fallback", FALLBACKS)
@pytest.mark.parametrize(
    "error",
    [ModelError("?"), StreamInterrupted("gone"), ContextOverflow("too long"), ModelOverloaded("busy")],
    ids=repr,
)
def test_fallback_ignores_other_failures(fallback: Fallback, error: ModelError) -> None:
    assert fallback(FIRST, Failure(error)) is None


def test_each_fallback_applies_once_in_a_call() -> None:
    open_attempts, count = [FIRST], 0
    while open_attempts:
        attempt = open_attempts.pop()
        found = (next_attempt(attempt, failure) for failure in (TOOLS_REFUSED, THINKING_REFUSED, EMPTY, LOOPED))
        open_attempts += [following for following in found if following is not None]
        count += 1
        # every order of up to four fallbacks: 1 + 4 + 12 + 24 + 24
        assert count <= 65
    assert count == 65


@pytest.mark.parametrize(
    ("attempt", "expected"),
    [
        pytest.param(FIRST, ASKED, id="as-asked"),
        pytest.param(EMPTY_ONCE, ASKED, id="same-again"),
        pytest.param(NO_TOOLS, replace(ASKED, tools=()), id="without-tools"),
        pytest.param(NO_THINKING, ASKED, id="without-thinking"),
        pytest.param(QUIET, replace(ASKED, think=False), id="without-thoughts"),
        pytest.param(
            Attempt(replace(ASKED, think=False, options={"num_predict": 100, "seed": 1}), frozenset({"thinking"})),
            replace(ASKED, think=False, options={"seed": 1}, max_tokens=4_196),
            id="room-for-thoughts",
        ),
        pytest.param(
            Attempt(replace(ASKED, max_tokens=100), frozenset({"thinking"}), after_loop=True),
            replace(ASKED, think=False, max_tokens=4_196),
            id="room-for-thoughts-after-a-loop",
        ),
    ],
)
def test_request_leaves_out_what_the_model_lacks(attempt: Attempt, expected: ChatRequest) -> None:
    assert attempt.request == expected


def test_notices_name_only_what_was_asked_for() -> None:
    tools, thinking = Notice("tools_unsupported"), Notice("thinking_unsupported")
    assert FIRST.notices == QUIET.notices == EMPTY_ONCE.notices == ()
    assert (NO_TOOLS.notices, NO_THINKING.notices, NEITHER.notices) == ((tools,), (thinking,), (tools, thinking))
    assert replace(NEITHER, asked=replace(ASKED, tools=(), think=False)).notices == ()
