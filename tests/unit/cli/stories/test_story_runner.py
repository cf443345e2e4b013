"""Stories through HTTP, against a gateway that plays its part."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from local2_stories.command import Output, run_stories
from local2_stories.story import parse_story

from services.cli.api import Api, ApiError
from services.cli.terminal import Terminal

STORY = """
id: T1
title: Two turns
response_generation_checks: [answer_not_empty]
expected_bus_events: {in_order: [query.received, query.received]}
turns:
  - query: One?
    expected_content: [EXPECTED]
  - query: Two?
    session: same
    must_not_contain: [cannot]
"""


@pytest.fixture
def playing(loopback_gateway: Any, json_answer: Callable[..., bytes], event_head: Callable[..., bytes],
            chunk: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch) -> Any:  # fmt: skip
    monkeypatch.setattr("local2_stories.runner._BACK", 0.0)
    published: list[tuple[str, dict[str, Any], str]] = []

    async def play(heard: Any, writer: asyncio.StreamWriter) -> None:
        path = heard.path.partition("?")[0]
        if path == "/participants":
            rows = [{"name": "generator", "replicas": [{}]}, {"name": "memory", "replicas": []}]
            writer.write(json_answer({"participants": rows}))
        elif path == "/query":
            query_id = f"{len(published) // 2 + 1}-0"
            log = [{"subject": "query.received", "stream": "local2:query.received", "id": query_id}]
            reply = {"query_id": query_id, "answer": "An answer.", "thinking": "", "tool_calls": [], "event_log": log}
            published.append(("query.received", {}, query_id))
            published.append(("response.generation", {**reply, "response_id": f"{query_id}:A"}, query_id))
            writer.write(json_answer(reply))
        elif path == "/bus/events":
            writer.write(event_head())
            writer.write(chunk(b": keep-alive\n\n"))
            sent = 0
            while not writer.is_closing():
                for subject, payload, entry_id in published[sent:]:
                    data = json.dumps({"payload": payload})
                    writer.write(chunk(f"id: {entry_id}\nevent: {subject}\ndata: {data}\n\n".encode()))
                sent = len(published)
                await writer.drain()
                await asyncio.sleep(0.01)

    loopback_gateway.play = play
    return loopback_gateway


class Screen(io.StringIO):
    """A terminal whose text can be read."""

    def isatty(self) -> bool:
        return True


async def outcome(gateway: Any, *texts: str, named: bool = False) -> tuple[int, str]:
    out = io.StringIO()
    return await shown(gateway, *texts, named=named, out=out, err=io.StringIO()), out.getvalue()


async def shown(
    gateway: Any, *texts: str, named: bool = False, out: io.StringIO, err: io.StringIO, as_json: bool = False
) -> int:
    """Run these stories and return the exit code; the report goes to `out`, the progress to a terminal or to `err`."""
    stories = [parse_story(text, "t.yaml", {}) for text in texts]
    async with Api(gateway.settings()) as api:
        output = Output(Terminal(file=out, width=120), Terminal(file=err), verbose=True, as_json=as_json)
        return await run_stories(api, stories, named=named, output=output)


async def test_a_story_whose_checks_hold_passes_and_goes_on_in_its_session(playing: Any) -> None:
    code, text = await outcome(playing, STORY.replace("EXPECTED", "answer"))
    assert code == 0
    assert "passed" in text
    assert "in order: query.received → query.received" in text
    sessions = [json.loads(r.body)["session_id"] for r in playing.requests if r.path == "/query"]
    assert len(sessions) == 2
    assert len(set(sessions)) == 1


async def test_a_wrong_expectation_fails_the_command_and_shows_the_answer(playing: Any) -> None:
    code, text = await outcome(playing, STORY.replace("EXPECTED", "Atlantis"))
    assert code == 1
    assert "✗ answer contains 'Atlantis'" in text
    assert "answer: An answer." in text
    assert "FAILED" in text


async def test_a_story_that_needs_an_absent_participant_is_not_run_and_fails_only_when_it_was_named(
    playing: Any,
) -> None:
    needing = STORY.replace("title:", "requires: [memory]\ntitle:")
    passing = STORY.replace("EXPECTED", "answer").replace("T1", "T2")
    code, text = await outcome(playing, needing, passing)
    assert (code, "not run: memory is not running" in text) == (0, True)
    assert (await outcome(playing, needing, passing, named=True))[0] == 1
    assert (await outcome(playing, needing))[0] == 1


async def test_a_participant_that_is_away_for_a_moment_is_waited_for(
    playing: Any, json_answer: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("local2_stories.runner._BACK", 60.0)
    usual, looks = playing.play, 0

    async def play(heard: Any, writer: asyncio.StreamWriter) -> None:
        nonlocal looks
        if heard.path == "/participants":
            looks += 1
            writer.write(json_answer({"participants": [{"name": "memory", "replicas": [{}] if looks > 1 else []}]}))
        else:
            await usual(heard, writer)

    playing.play = play
    code, _ = await outcome(
        playing, STORY.replace("EXPECTED", "answer").replace("title:", "requires: [memory]\ntitle:")
    )
    assert (code, looks) == (0, 2)


async def test_a_query_that_is_refused_is_a_failed_check(playing: Any, json_answer: Callable[..., bytes]) -> None:
    usual = playing.play

    async def play(heard: Any, writer: asyncio.StreamWriter) -> None:
        if heard.path == "/query":
            writer.write(json_answer({"error": {"code": "model_missing", "message": "no such model"}}, 502))
        else:
            await usual(heard, writer)

    playing.play = play
    code, text = await outcome(playing, STORY)
    assert code == 1
    assert "no such model" in text


@pytest.mark.parametrize("refused", ["/bus/events", "/query"])
async def test_a_key_that_may_not_do_it_is_one_error_and_no_failed_check(
    playing: Any, json_answer: Callable[..., bytes], refused: str
) -> None:
    usual = playing.play

    async def play(heard: Any, writer: asyncio.StreamWriter) -> None:
        if heard.path.partition("?")[0] == refused:
            writer.write(json_answer({"error": {"code": "forbidden", "message": "only for administrators"}}, 403))
        else:
            await usual(heard, writer)

    playing.play = play
    with pytest.raises(ApiError, match="an administrator's key: only for administrators"):
        await outcome(playing, STORY)


async def test_a_story_that_must_know_of_the_stack_what_nobody_told_is_not_run(playing: Any) -> None:
    text = STORY.replace("EXPECTED", "answer").replace("title:", 'vars: {judge: ""}\ngiven: [judge]\ntitle:')
    code, shown = await outcome(playing, text)
    assert (code, "not run: it needs --var judge=VALUE" in shown) == (1, True)
    assert (await outcome(playing, text.replace('judge: ""', "judge: x")))[0] == 0


async def test_a_message_that_no_stream_had_fails_the_story(playing: Any, json_answer: Callable[..., bytes]) -> None:
    usual = playing.play

    async def play(heard: Any, writer: asyncio.StreamWriter) -> None:
        if heard.path != "/query":
            await usual(heard, writer)
            return
        invented = {"subject": "tool.request.x", "stream": "local2:tool.request.x", "id": "3-0"}
        writer.write(json_answer({"query_id": "9-0", "answer": "x", "tool_calls": [], "event_log": [invented]}))

    playing.play = play
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("local2_stories.runner.PUBLISHED_WITHIN", 0.05)
        code, text = await outcome(playing, STORY.replace("EXPECTED", "x"))
    assert code == 1
    assert "✗ event_log lists messages on the bus" in text
    assert "tool.request.x" in text


STEPS = ["T1, turn 1 of 2: waiting for the answer", "T1, turn 2 of 2: waiting for the answer"]


async def test_stories_in_a_pipe_print_each_step_to_standard_error(playing: Any) -> None:
    out, err = io.StringIO(), io.StringIO()
    assert await shown(playing, STORY.replace("EXPECTED", "answer"), out=out, err=err) == 0
    lines = err.getvalue().splitlines()
    assert [line for line in lines if line in STEPS] == STEPS
    assert "waiting for" not in out.getvalue()


async def test_stories_at_a_terminal_show_the_step_in_its_line(playing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # The terminal of this test does not matter.
    monkeypatch.setenv("TERM", "xterm")
    screen, err = Screen(), io.StringIO()
    assert await shown(playing, STORY.replace("EXPECTED", "answer"), out=screen, err=err) == 0
    assert all(step in screen.getvalue() for step in STEPS)
    assert err.getvalue() == ""


async def test_progress_of_a_long_wait_shows_its_seconds(playing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = playing.play

    async def slow(heard: Any, writer: asyncio.StreamWriter) -> None:
        if heard.path == "/query":
            await asyncio.sleep(1.6)
        await usual(heard, writer)

    playing.play = slow
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()
    await shown(playing, STORY.replace("EXPECTED", "answer"), out=screen, err=io.StringIO())
    assert f"{STEPS[0]} (1 s)" in screen.getvalue() or f"{STEPS[0]} (2 s)" in screen.getvalue()
