"""The inner committee over scripted steps: who hears what, in which order, and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from services.generator.committee import Seat, Session, deliberate, persona_prompt, self_prompt
from services.generator.identities import Identities, UnknownPersona, load_identities
from services.generator.loop import Message, Reply
from services.generator.settings import GeneratorSettings
from shared.contracts import ToolCallRecord
from shared.errors import SettingsError
from shared.llm.port import ToolCall

IDENTITIES = Identities({"a": "You are A.", "b": "You are B."}, "You are The Self.")
QUESTION = {"role": "user", "content": "Shall I move?"}


class ScriptedSteps:
    """Answers with the seat's name; member `a` looks into memory first."""

    def __init__(self, seat: Seat | None, asked: list[tuple[Seat | None, bool]]) -> None:
        self._seat = seat
        self._asked = asked

    async def model(self, step: int, current: Sequence[Message], *, with_tools: bool, form: object = None) -> Reply:
        self._asked.append((self._seat, with_tools))
        calls = []
        if self._seat is not None and self._seat.persona == "a" and step == 0:
            calls = [ToolCall("c1", "search_memory", {"query": "move"})]
        name = self._seat.persona if self._seat else "self"
        return Reply("" if calls else f"{name} says so", f"{name} thinks", calls, "stop", "m")

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


async def hold(room: Room, rounds: int = 2, *, parallel: bool = False) -> Any:
    session = Session(["a", "b"], rounds, parallel)
    return await deliberate(session, IDENTITIES, "Base.", QUESTION, room.open, room.note, room.retrieve)


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


async def test_members_that_speak_at_once_hear_the_rounds_before_only() -> None:
    room = Room()
    _, said = await hold(room, parallel=True)
    assert [(d.persona, d.round) for d in said] == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    prompts = {(seat.persona, seat.round) if seat else None: prompt for seat, prompt in room.prompts}
    assert "says so" not in prompts["a", 1] + prompts["b", 1]
    for persona in ("a", "b"):
        assert "[a, round 1]: a says so\n[b, round 1]: b says so" in prompts[persona, 2]
        assert "round 2]" not in prompts[persona, 2]
    assert "[b, round 2]" in prompts[None]
    assert room.progress[:4] == [("working", "a", 1), ("working", "b", 1), ("done", "a", 1), ("done", "b", 1)]


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
    # The Self has no tools either
    assert all("=== RETRIEVED CONTEXT ===\nYou live in Graz." in prompt for _, prompt in room.prompts[1:])
    assert len(said) == 2


async def test_all_members_of_a_round_at_once_speak_again_with_what_memory_holds() -> None:
    room = Room(context="You live in Graz.")
    _, said = await hold(room, rounds=1, parallel=True)
    assert [seat.again if seat else None for seat, _ in room.prompts] == [False, False, True, True, None]
    assert [(d.persona, d.round) for d in said] == [("a", 1), ("b", 1)]


def test_a_persona_and_the_self_are_told_how_to_read_relations() -> None:
    prompt = persona_prompt("You are A.", "Today.", [])
    assert prompt.startswith("You are A.")
    assert "inner committee deliberation" in prompt
    for told in (prompt, self_prompt("Base.", "You are The Self.", [])):
        assert "'WAS' or PAST means no longer true; 'IS' or CURRENT means true now" in told


def test_the_names_of_a_seats_steps_do_not_depend_on_how_its_name_is_written() -> None:
    assert Seat("The Inner Child", 2).scope == Seat("the_inner_child", 2).scope == "theinnerchild.2:"


SHIPPED = [
    "Analyst", "Skeptic", "Empath", "Creative", "Pragmatist",
    "The Inner Child", "The Protector", "The Manager", "The Firefighter", "The Exile",
]  # fmt: skip


def test_the_shipped_identities_have_members_and_a_self() -> None:
    identities = load_identities(None)
    assert list(identities.personas) == SHIPPED
    assert "balanced core" in identities.self_identity


def test_names_are_compared_without_regard_to_case_spaces_and_underscores() -> None:
    asked = ["the_inner_child", "SKEPTIC", "The Inner Child", "theexile"]
    assert load_identities(None).named(asked) == ["The Inner Child", "Skeptic", "The Exile"]


def test_unknown_names_are_told_together_with_those_that_there_are() -> None:
    with pytest.raises(UnknownPersona, match="unknown personas: Clown, Pirate; there are a, b"):
        IDENTITIES.named(["Pirate", "a", "Clown"])


def test_those_of_the_order_speak_first() -> None:
    assert load_identities(None).in_order(["Analyst", "Empath", "Skeptic"], ["skeptic", "The Exile"]) == [
        "Skeptic", "Analyst", "Empath",
    ]  # fmt: skip


def test_an_operators_file_adds_members_and_replaces_those_of_the_same_name(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("personas:\n  Pirate: You are the Pirate.\n  the exile: You are nobody.\n", encoding="utf-8")
    identities = load_identities(own)
    assert list(identities.personas) == [*SHIPPED[:-1], "Pirate", "the exile"]
    assert identities.personas["the exile"] == "You are nobody."
    assert identities.self_identity == load_identities(None).self_identity
    own = tmp_path / "self.yaml"
    own.write_text("self: You are the captain.\n", encoding="utf-8")
    assert load_identities(own) == Identities(load_identities(None).personas, "You are the captain.")


@pytest.mark.parametrize(
    ("text", "trouble"),
    [
        ("- nothing\n", "a mapping with `personas`"),
        ("people: {}\n", "a mapping with `personas`"),
        ("personas: [a]\n", "a mapping with `personas`"),
        ("personas: {Pirate: }\n", "'Pirate' needs a name and a text"),
        ("personas: {' _': You are nobody.}\n", "' _' needs a name and a text"),
        ("personas: {Pirate: x, ' pirate': y}\n", "' pirate' stands there twice"),
        ("personas: {Pirate: x}\npersonas: {Cook: y}\n", "personas stands there twice"),
        ("personas: {[a, b]: x}\n", "unhashable key"),
        ("personas: {the_self: You are the captain.}\n", "stands under `self`"),
        ("personas: {'Pirate, retired': You are the Pirate.}\n", "one line without commas"),
        ("self: {a: b}\n", "a mapping with `personas`"),
        ("self: You are the captain.\npeople: {}\n", "a mapping with `personas`"),
        ("personas: {\n", "while parsing"),
    ],
)
def test_a_malformed_identities_file_is_refused_with_its_name(text: str, trouble: str, tmp_path: Path) -> None:
    broken = tmp_path / "identities.yaml"
    broken.write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError, match=r"identities\.yaml") as refused:
        load_identities(broken)
    assert trouble in str(refused.value)


def test_an_identities_file_that_is_not_there_or_no_text_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"away\.yaml"):
        load_identities(tmp_path / "away.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match=r"binary\.yaml"):
        load_identities(tmp_path / "binary.yaml")


def test_settings_name_members_as_their_file_does_and_refuse_others(tmp_path: Path) -> None:
    settings = GeneratorSettings(active_personas=["the_exile", "analyst"], order=["ANALYST"])
    assert (settings.active_personas, settings.members) == (["The Exile", "Analyst"], ["Analyst", "The Exile"])
    assert settings.update_settings({"active_personas": []}).members == []
    with pytest.raises(SettingsError, match="unknown personas: Pirate; there are Analyst"):
        settings.update_settings({"order": ["Pirate"]})
    own = tmp_path / "own.yaml"
    own.write_text("personas: {Pirate: You are the Pirate.}\n", encoding="utf-8")
    assert GeneratorSettings(identities=own, active_personas=["pirate"]).members == ["Pirate"]
