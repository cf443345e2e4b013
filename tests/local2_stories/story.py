"""An acceptance story: its file as a typed model. What is not known here is an error, so nothing goes unchecked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shared.contracts import MAX_QUERY_CHARS
from shared.errors import Local2Error
from shared.participant.settings import describe

_VARIABLE = re.compile(r"\$\{(\w+)\}")


class StoryError(Local2Error):
    """A story file is wrong, or there is no such story."""


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class AnyOf(Part):
    """At least one of the texts."""

    any_of: list[Annotated[str, Field(min_length=1)]] = Field(min_length=1)


Expected = Annotated[str, Field(min_length=1)] | AnyOf
ResponseCheck = Literal["thinking_not_empty", "tool_calls_empty", "tool_calls_not_empty", "answer_not_empty"]


class BusEvents(Part):
    """Subjects of the messages on the bus that respondent A's answer led to: there, not there, and there in this order
    (others may stand between). One that ends with * stands for all that begin so."""

    present: list[str] = []
    absent: list[str] = []
    in_order: list[str] = []


class CritiqueCheck(Part):
    """A critique.result with an integer score in this range, within so many seconds."""

    min_score: int = Field(default=1, ge=1, le=5)
    max_score: int = Field(default=5, ge=1, le=5)
    within: float = Field(default=60, gt=0)


class PairwiseCheck(Part):
    """A pairwise.result with one of these winners; its query ids must be those of the two responses."""

    winner: list[Literal["A", "B", "tie"]] = ["A", "B", "tie"]
    fields: list[Literal["winner", "score_a", "score_b", "query_id_a", "query_id_b", "reason"]] = []
    within: float = Field(default=120, gt=0)


class EngramCheck(Part):
    """Engrams of this query: one for each respondent, and the fields that must not be empty in them. `pairwise_winner`
    must be what the pairwise.result says: true for the better one, false for the other, null after a tie."""

    respondents: list[Literal["A", "B"]] = ["A"]
    annotated: list[str] = []
    within: float = Field(default=60, gt=0)


class PreferenceCheck(Part):
    """Rows that this query has in the export of preferences."""

    dpo: int = Field(ge=0)
    within: float = Field(default=60, gt=0)


class DeliberationCheck(Part):
    """Each of the personas has deliberated, so often."""

    personas: list[str] = Field(min_length=1)
    rounds: int = Field(default=1, ge=1)


class FactLine(Part):
    """A line about a fact that says IS or WAS, and has these texts."""

    holds: Literal["IS", "WAS"]
    contains: list[Annotated[str, Field(min_length=1)]] = Field(min_length=1)


class ResultLines(Part):
    """Lines of a tool's result; each must be there."""

    tool: str
    lines: list[FactLine] = Field(min_length=1)


class FactCheck(Part):
    """What knowledge has of somebody when it has read the answer."""

    about: str = Field(min_length=1)
    lines: list[FactLine] = Field(min_length=1)
    within: float = Field(default=120, gt=0)


class Turn(Part):
    """One query and everything that must be true of its reply.

    session: `same` goes on in the conversation of the turn before.
    tool_calls: tools that were called, in this order (other calls may stand between).
    answer_uses_result_of: the answer repeats words of that tool's result which the query does not have.
    respondents: a response.generation of each, on the bus.
    """

    query: str = Field(min_length=1, max_length=MAX_QUERY_CHARS)
    session: Literal["same", "new"] = "new"
    mode: Literal["chat", "committee"] | None = None
    personas: list[str] | None = None
    rounds: int | None = None
    expected_content: list[Expected] = []
    must_not_contain: list[Annotated[str, Field(min_length=1)]] = []
    expected_bus_events: BusEvents = BusEvents()
    response_generation_checks: list[ResponseCheck] = []
    tool_calls: list[str] = []
    answer_uses_result_of: str | None = None
    respondents: list[Literal["A", "B"]] = ["A"]
    critique: CritiqueCheck | None = None
    pairwise: PairwiseCheck | None = None
    engrams: EngramCheck | None = None
    preferences: PreferenceCheck | None = None
    deliberations: DeliberationCheck | None = None
    result_lines: ResultLines | None = None
    facts: FactCheck | None = None


class Story(Part):
    """`requires` names participants that must be live, `given` variables without which it cannot be tried: they tell
    of the stack what nobody can see. Checks beside `turns` hold for the story as a whole:
    events for those of all turns one after the other, response checks for each turn.
    """

    id: str = Field(pattern=r"^[A-Za-z0-9_-]+$")
    title: str = Field(min_length=1)
    requires: list[str] = []
    given: list[str] = []
    vars: dict[str, str] = {}
    turns: list[Turn] = Field(min_length=1)
    expected_bus_events: BusEvents = BusEvents()
    response_generation_checks: list[ResponseCheck] = []

    @model_validator(mode="after")
    def _first_turn_is_new(self) -> Story:
        if self.turns[0].session == "same":
            raise ValueError("the first turn has no conversation to go on in: session must be new")
        return self


def parse_story(text: str, where: str, variables: Mapping[str, str]) -> Story:
    """A story with its `${name}` places filled in, by `variables` or its own defaults. Raises StoryError."""
    try:
        raw = yaml.load(text, _Loader)
    except yaml.YAMLError as exc:
        raise StoryError(f"{where}: not valid YAML: {exc}") from exc
    if not isinstance(raw, dict):
        raise StoryError(f"{where}: a mapping with id, title and turns is expected")
    defaults = raw.get("vars") or {}
    if not isinstance(defaults, dict):
        raise StoryError(f"{where}: vars: a mapping of names to texts is expected")
    values = {**defaults, **{name: value for name, value in variables.items() if name in defaults}}
    try:
        return Story.model_validate({**_filled({k: v for k, v in raw.items() if k != "vars"}, values), "vars": values})
    except KeyError as exc:
        raise StoryError(f"{where}: the variable {exc.args[0]} has no value; it must stand under vars") from exc
    except ValidationError as exc:
        raise StoryError(f"{where}: {describe(exc)}") from exc


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice: YAML would silently drop the first, and its checks with it."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in found:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", key_node.start_mark)
        found[key] = loader.construct_object(value_node, deep=True)
    return found


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _filled(value: Any, variables: Mapping[str, str]) -> Any:
    match value:
        case str():
            return _VARIABLE.sub(lambda match: str(variables[match[1]]), value)
        case list():
            return [_filled(item, variables) for item in value]
        case dict():
            return {key: _filled(item, variables) for key, item in value.items()}
        case _:
            return value


def shipped_stories() -> dict[str, str]:
    """The texts of the stories that come with LoCAL2, by id, in the order of their numbers."""
    found = {path.stem: path for path in Path(__file__).parent.glob("*.yaml")}
    numbered = sorted(found, key=lambda name: (int("".join(re.findall(r"\d", name)) or 0), name))
    return {name: found[name].read_text(encoding="utf-8") for name in numbered}


def select_stories(names: list[str], variables: Mapping[str, str]) -> list[Story]:
    """The stories named (ids, or paths of YAML files), or all that are shipped. Raises StoryError."""
    texts = shipped_stories()
    by_id = {name.upper(): name for name in texts}
    chosen: list[tuple[str, str]] = []
    for name in names or list(texts):
        if name.endswith((".yaml", ".yml")):
            try:
                chosen.append((name, Path(name).read_text(encoding="utf-8")))
            except (OSError, UnicodeDecodeError) as exc:
                raise StoryError(f"{name} cannot be read: {exc}") from exc
        elif name.upper() in by_id:
            found = by_id[name.upper()]
            chosen.append((f"{found}.yaml", texts[found]))
        else:
            raise StoryError(f"there is no story {name}; there are: {', '.join(texts)}, or the path of a .yaml file")
    stories = [parse_story(text, where, variables) for where, text in chosen]
    known = set().union(*(story.vars for story in stories))
    if unknown := sorted(set(variables) - known):
        raise StoryError(f"no story chosen has the variable {', '.join(unknown)}")
    return stories
