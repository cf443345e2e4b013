"""The inner committee over scripted steps: who hears what, in which order, and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from services.generator.committee import (
    Identities,
    Seat,
    deliberate,
    load_identities,
    persona_prompt,
)
from services.generator.loop import Message, Reply
from shared.contracts import ToolCallRecord
from shared.errors import SettingsError
from shared.llm.port import ToolCall

IDENTITIES = Identities({"a": "You are A.", "b": "You are B."}, "You are The Self.")
QUESTION = {"role": "user", "content": "Shall I move?"}


class ScriptedSteps:
    """Answers with the seat's name and 3 + 2 tokens; member `a` looks into memory first."""

    def __init__(self, seat: Seat | None, asked: list[tuple[Seat | None, bool]]) -> None:
        self._seat = seat
        self._asked = asked

    async def model(self, step: int, current: Sequence[Message], *, with_tools: bool, form: object = None) -> Reply:
        self._asked.append((self._seat, with_tools))
        calls = []
        if self._seat is not None and self._seat.persona == "a" and step == 0:
            calls = [ToolCall("c1", "search_memory", {"query": "move"})]
        name = self._seat.persona if self._seat else "self"
        return Reply("" if calls else f"{name} says so", f"{name} thinks", calls, "stop", "m", 3, 2)

    async def tools(self, step: int, calls: Sequence[tuple[int, ToolCall]]) -> list[ToolCallRecord]:
        return [ToolCallRecord(tool=c.name, args=c.args, result="x" * 300, call_id=str(i)) for i, c in calls]

    async def transition(self, action: str) -> None:
        del action


class Room:
    def __init__(self, context: str | None = None) -> None:
        self.prompts: list[tuple[Seat | None, str]] = []
        self.asked: list[tuple[Seat | None, bool]] = []
        self.progress: list[tuple[str, str, int]] = []
        self._context = context

    def open(self, seat: Seat | None, prompt: str) -> ScriptedSteps:
        self.prompts.append((seat, prompt))
        return ScriptedSteps(seat, self.asked)

    async def note(self, what: str, seat: Seat, data: dict[str, Any]) -> None:
        del data
        self.progress.append((what, seat.persona, seat.round))

    async def retrieve(self) -> str | None:
        return self._context


async def hold(room: Room, rounds: int = 2) -> Any:
    return await deliberate(["a", "b"], rounds, IDENTITIES, "Base.", QUESTION, 5, room.open, room.note, room.retrieve)


async def test_members_speak_in_order_and_the_self_comes_last() -> None:
    room = Room()
    answer, said = await hold(room)
    assert [(seat.persona, seat.round) if seat else None for seat, _ in room.prompts] == [
        ("a", 1), ("b", 1), ("a", 2), ("b", 2), None,
    ]  # fmt: skip
    assert answer.text == "self says so"
    assert [(d.persona, d.round, d.response) for d in said] == [
        ("a", 1, "a says so"), ("b", 1, "b says so"), ("a", 2, "a says so"), ("b", 2, "b says so"),
    ]  # fmt: skip
    assert room.progress[:4] == [("working", "a", 1), ("done", "a", 1), ("working", "b", 1), ("done", "b", 1)]


async def test_later_members_hear_the_earlier_ones() -> None:
    room = Room()
    await hold(room)
    prompts = [prompt for _, prompt in room.prompts]
    assert "=== PREVIOUS DELIBERATIONS ===" not in prompts[0]
    assert "=== PREVIOUS DELIBERATIONS ===\n[a, round 1]: a says so" in prompts[1]
    assert "[b, round 1]: b says so" in prompts[2]
    assert "=== INNER COMMITTEE DELIBERATION ===" in prompts[4]
    assert prompts[4].startswith("Base.\n\nYou are The Self.")


async def test_token_counts_of_all_are_summed() -> None:
    answer, _ = await hold(Room(), rounds=1)
    # a: two calls, b: one, The Self: one
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (12, 8)


async def test_tool_traces_are_previews_of_200_characters() -> None:
    _, said = await hold(Room(), rounds=1)
    (trace,) = said[0].tool_trace
    assert (trace.tool, trace.args, len(trace.result_preview)) == ("search_memory", {"query": "move"}, 200)
    assert said[1].tool_trace == []


async def test_a_model_that_cannot_call_tools_speaks_again_with_what_memory_holds() -> None:
    room = Room(context="You live in Graz.")
    _, said = await hold(room, rounds=1)
    seats = [seat for seat, _ in room.prompts]
    assert [seat.again if seat else None for seat in seats] == [False, True, False, None]
    assert "=== RETRIEVED CONTEXT ===\nYou live in Graz." not in room.prompts[0][1]
    assert all("You live in Graz." in prompt for _, prompt in room.prompts[1:3])
    assert len(said) == 2


def test_a_persona_is_told_how_to_read_relations() -> None:
    prompt = persona_prompt("You are A.", [])
    assert prompt.startswith("You are A.")
    assert "'WAS' or PAST means no longer true; 'IS' or CURRENT means true now" in prompt
    assert "inner committee deliberation" in prompt


def test_the_shipped_identities_have_members_and_a_self() -> None:
    identities = load_identities(None)
    assert len(identities.personas) >= 3
    assert "balanced core" in identities.self_identity


def test_a_malformed_identities_file_is_refused_with_its_name(tmp_path: Path) -> None:
    broken = tmp_path / "identities.yaml"
    broken.write_text("- nothing\n", encoding="utf-8")
    with pytest.raises(SettingsError, match=r"identities\.yaml"):
        load_identities(broken)
