"""`local2 ask` as a process: exit codes, JSON, Ctrl-C."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.cli.api import Api
from services.cli.commands import ask
from services.cli.terminal import Terminal

ROOT = str(Path(__file__).parents[4])
ENDED = {"thinking": "", "tool_calls": [], "usage": {}, "finish_reason": "stop", "model": "m"}
END = f"id: 1-1\nevent: completed\ndata: {json.dumps(ENDED | {'answer': 'Paris'})}\n\n".encode()


async def start(gateway: Any, *args: str, zone: str = "UTC") -> asyncio.subprocess.Process:
    """The command, with something to be typed into it."""
    env = {
        **os.environ,
        "PYTHONPATH": ROOT,
        "LOCAL2_API_URL": f"http://127.0.0.1:{gateway.port}",
        "LOCAL2_API_KEY": "k",
        "TZ": zone,
    }
    command = [sys.executable, "-m", "services.cli", *args]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, env=env, stdin=pipe, stdout=pipe, stderr=pipe)


async def run(gateway: Any, *args: str, zone: str = "UTC", typed: bytes = b"") -> tuple[int | None, str, str]:
    process = await start(gateway, *args, zone=zone)
    async with asyncio.timeout(30):
        out, err = await process.communicate(typed)
    return process.returncode, out.decode(), err.decode()


@pytest.fixture
def streaming(loopback_gateway: Any, event_head: Callable[..., bytes], chunk: Callable[[bytes], bytes]) -> Any:
    """The gateway streams the events that a test puts into `events`."""
    loopback_gateway.events = []

    async def play(heard: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(event_head("9-0", "sess"))
        for number, (kind, data) in enumerate(loopback_gateway.events, 1):
            writer.write(chunk(f"id: 1-{number}\nevent: {kind}\ndata: {json.dumps(data)}\n\n".encode()))
        writer.write(b"0\r\n\r\n")

    loopback_gateway.play = play
    return loopback_gateway


async def test_an_answer_is_printed_and_the_status_is_0(streaming: Any) -> None:
    streaming.events = [("answer", {"text": "Paris"}), ("completed", ENDED | {"answer": "Paris"})]
    assert await run(streaming, "ask", "capital?", "--session", "sess") == (0, "Paris\n", "")
    assert json.loads(streaming.requests[0].body) == {"query": "capital?", "session_id": "sess"}


@pytest.mark.parametrize(
    ("zone", "sent"),
    [
        ("Asia/Tokyo", "Asia/Tokyo"),
        (":Europe/Berlin", "Europe/Berlin"),
        ("UTC", None),
        ("Etc/UTC", None),
        ("GMT", None),
        ("Mars/Olympus", None),
    ],
)
async def test_question_has_the_zone_of_the_machine(
    streaming: Any, zone: str, sent: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", zone)
    streaming.events = [("completed", ENDED | {"answer": "Noon."})]
    out, err = io.StringIO(), io.StringIO()
    async with Api(streaming.settings()) as api, asyncio.timeout(30):
        shown = {"console": Terminal(file=out), "errors": Terminal(file=err)}
        code = await ask.ask(api, "what time is it?", session=None, as_json=False, thinking=True, **shown)
    assert (code, out.getvalue(), err.getvalue()) == (0, "Noon.\n", "")
    assert [json.loads(request.body).get("time_zone") for request in streaming.requests] == [sent]


async def test_a_committee_is_asked_by_its_names_and_rounds(streaming: Any) -> None:
    streaming.events = [("completed", ENDED | {"answer": "So."})]
    assert await run(streaming, "ask", "x", "--committee", "analyst, the inner child", "--rounds", "2") == (
        0, "So.\n", "",
    )  # fmt: skip
    assert await run(streaming, "ask", "x", "--committee", "active") == (0, "So.\n", "")
    assert [json.loads(request.body) for request in streaming.requests] == [
        {"query": "x", "mode": "committee", "personas": ["analyst", "the inner child"], "rounds": 2},
        {"query": "x", "mode": "committee"},
    ]
    code, _, err = await run(streaming, "ask", "x", "--committee", " , ")
    assert (code, err) == (1, "local2: name who is to deliberate, separated by commas, or say active\n")
    code, _, err = await run(streaming, "ask", "x", "--rounds", "2")
    assert (code, "needs --committee" in err) == (2, True)


async def test_json_is_one_object_with_the_ids(streaming: Any) -> None:
    streaming.events = [("thinking", {"text": "hm"}), ("completed", ENDED | {"answer": "Paris"})]
    code, out, _ = await run(streaming, "ask", "capital?", "--json")
    assert code == 0
    assert json.loads(out) == {"query_id": "9-0", "session_id": "sess", **ENDED, "answer": "Paris"}


async def test_a_failed_query_ends_with_its_sentence_and_1(streaming: Any) -> None:
    streaming.events = [("failed", {"code": "model_missing", "message": "Ollama does not have the model x"})]
    assert await run(streaming, "ask", "x") == (1, "", "local2: Ollama does not have the model x\n")
    code, out, _ = await run(streaming, "ask", "x", "--json")
    assert (code, json.loads(out)["error"]["code"]) == (1, "model_missing")


async def test_a_refused_query_ends_with_its_sentence_and_1(
    loopback_gateway: Any, json_answer: Callable[..., bytes]
) -> None:
    async def play(_heard: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(json_answer({"error": {"code": "invalid_request", "message": "query: must not be empty"}}, 422))

    loopback_gateway.play = play
    code, _, err = await run(loopback_gateway, "ask", " ")
    assert (code, err) == (1, "local2: query: must not be empty\n")


async def test_ctrl_c_cancels_the_query_and_waits_for_its_end(
    loopback_gateway: Any, event_head: Callable[..., bytes], chunk: Callable[[bytes], bytes],
    json_answer: Callable[..., bytes],
) -> None:  # fmt: skip
    cancelled = asyncio.Event()

    async def play(heard: Any, writer: asyncio.StreamWriter) -> None:
        if heard.path == "/queries/9-0/cancel":
            cancelled.set()
            writer.write(json_answer({"state": "cancelling"}))
            return
        writer.write(event_head("9-0") + chunk(b'id: 1-1\nevent: answer\ndata: {"text":"Pa"}\n\n'))
        await writer.drain()
        await cancelled.wait()
        writer.write(chunk(b"id: 1-2\nevent: cancelled\ndata: {}\n\n"))

    loopback_gateway.play = play
    process = await start(loopback_gateway, "ask", "long story")
    assert process.stdout is not None
    async with asyncio.timeout(30):
        assert await process.stdout.readexactly(2) == b"Pa"
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
    assert process.returncode == 130
    assert b"cancelling" in out
    assert b"the query was cancelled" in err
    assert cancelled.is_set()


async def test_a_second_ctrl_c_leaves_without_waiting(
    loopback_gateway: Any, event_head: Callable[..., bytes], chunk: Callable[[bytes], bytes],
    json_answer: Callable[..., bytes],
) -> None:  # fmt: skip
    over = asyncio.Event()

    async def play(heard: Any, writer: asyncio.StreamWriter) -> None:
        if heard.method == "POST" and heard.path != "/query":
            writer.write(json_answer({"state": "cancelling"}))
            return
        writer.write(event_head("9-0") + chunk(b'id: 1-1\nevent: answer\ndata: {"text":"Pa"}\n\n'))
        await writer.drain()
        await over.wait()

    loopback_gateway.play = play
    process = await start(loopback_gateway, "ask", "long story")
    assert process.stdout is not None
    async with asyncio.timeout(30):
        await process.stdout.readexactly(2)
        process.send_signal(signal.SIGINT)
        await process.stdout.readuntil(b"without waiting")
        process.send_signal(signal.SIGINT)
        await process.communicate()
    over.set()
    assert process.returncode == 130


async def test_a_chat_keeps_its_session_until_new_and_ends_with_quit(streaming: Any) -> None:
    streaming.events = [("answer", {"text": "Hello."}), ("completed", ENDED | {"answer": "Hello."})]
    code, out, err = await run(
        streaming, "chat", zone="Asia/Tokyo", typed=b"one\ntwo\n/new\nthree\n/nonsense\n\n/quit\n"
    )
    assert (code, err) == (0, "")
    assert out.count("Hello.") == 3
    bodies = [json.loads(request.body) for request in streaming.requests]
    assert [body["query"] for body in bodies] == ["one", "two", "three"]
    assert {body["time_zone"] for body in bodies} == {"Asia/Tokyo"}
    first, second, third = (body["session_id"] for body in bodies)
    assert first == second != third


async def test_a_chat_sits_with_a_committee_until_it_is_sent_away(
    streaming: Any, json_answer: Callable[..., bytes]
) -> None:
    streaming.events = [("completed", ENDED | {"answer": "Hello."})]
    play = streaming.play

    async def play_or_list(heard: Any, writer: asyncio.StreamWriter) -> None:
        if heard.path == "/personas":
            writer.write(json_answer({"personas": ["Analyst", "The Exile"], "active_personas": ["Analyst"]}))
        else:
            await play(heard, writer)

    streaming.play = play_or_list
    process = await start(streaming, "chat")
    typed = [
        *("/committee", "/committee The Exile, analyst 2", "one", "/committee active", "two", "/committee a 11"),
        *("/committee off", "three", ""),
    ]
    async with asyncio.timeout(30):
        out, err = await process.communicate("\n".join(typed).encode())
    assert b"there are Analyst, The Exile; active: Analyst" in out
    assert b"committee: The Exile, analyst, 2 rounds" in out
    assert err == b"local2: a committee has 1 to 10 rounds, not 11\n"
    bodies = [json.loads(request.body) for request in streaming.requests if request.path == "/query"]
    assert [{name: value for name, value in body.items() if name != "session_id"} for body in bodies] == [
        {"query": "one", "mode": "committee", "personas": ["The Exile", "analyst"], "rounds": 2},
        {"query": "two", "mode": "committee"},
        {"query": "three"},
    ]


async def test_why_no_answer_comes_is_said_and_it_is_waited_for(
    loopback_gateway: Any, event_head: Callable[..., bytes], chunk: Callable[[bytes], bytes],
    json_answer: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    told = asyncio.Event()

    class Said(io.StringIO):
        def write(self, text: str) -> int:
            if "no answer yet" in text:
                told.set()
            return super().write(text)

    async def play(heard: Any, writer: asyncio.StreamWriter) -> None:
        if heard.path == "/ready":
            writer.write(json_answer({"parts": {"generator": {"ok": False, "reason": "none is [up]"}}}, 503))
            return
        writer.write(event_head("9-0", "sess"))
        await writer.drain()
        await told.wait()
        writer.write(chunk(END) + b"0\r\n\r\n")

    loopback_gateway.play = play
    out, err = io.StringIO(), Said()
    async with Api(loopback_gateway.settings()) as api, asyncio.timeout(30):
        code = await ask.ask(
            api, "?", session=None, as_json=False, thinking=True, console=Terminal(file=out), errors=Terminal(file=err)
        )
    assert (code, out.getvalue()) == (0, "Paris\n")
    assert err.getvalue().startswith("local2: no answer yet (generator: none is [up]); the question waits. What to do:")
