"""Writes the tables of settings into docs/settings.md, between its two marks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from services.cli.settings import ClientSettings
from services.critic.settings import CriticSettings
from services.gateway.settings import GatewaySettings
from services.generator.settings import GeneratorSettings
from services.knowledge.settings import KnowledgeSettings
from services.mcp.settings import McpSettings
from services.memory.settings import MemorySettings
from services.reward.settings import RewardSettings
from services.web_fetch.service import WebFetchSettings
from services.web_search.service import WebSearchSettings
from shared.llm.preemption import PreemptionSettings
from shared.llm.settings import BackendSettings
from shared.participant.settings import Settings, own_prefix

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
PARTICIPANTS: Mapping[str, type[Settings]] = {
    "gateway": GatewaySettings,
    "generator": GeneratorSettings,
    "critic": CriticSettings,
    "memory": MemorySettings,
    "knowledge": KnowledgeSettings,
    "reward": RewardSettings,
    "mcp": McpSettings,
    "web_search": WebSearchSettings,
    "web_fetch": WebFetchSettings,
    "cli": ClientSettings,
}
# What several participants have, with the name that stands for theirs.
SHARED: Mapping[str, type[Settings]] = {
    "every participant": Settings,
    "participants that call a model (generator, respondent-b, critic, memory, knowledge)": BackendSettings,
    "participants that come after the users' queries (respondent-b, critic, memory, knowledge)": PreemptionSettings,
}
_BETWEEN = re.compile(r"(?<=<!-- made by `make docs-settings` -->\n).*?(?=<!-- until here -->)", re.DOTALL)
_LONG = 60


def tables() -> str:
    """One table for what several participants have, one for each participant's own."""
    parts = []
    for title, settings in SHARED.items():
        inherited = set(Settings.model_fields) if settings is not Settings else set()
        parts.append(_table(title, settings, "participant", _except(settings, inherited)))
    known = {name: info.default for kind in SHARED.values() for name, info in kind.model_fields.items()}
    for participant, settings in PARTICIPANTS.items():
        own = {name for name in known if name in settings.model_fields and _same(settings, name, known[name])}
        parts.append(_table(participant, settings, participant, _except(settings, own)))
    return "\n".join(parts)


def _same(settings: type[Settings], name: str, default: Any) -> bool:
    return bool(settings.model_fields[name].default == default)


def _except(settings: type[Settings], names: set[str]) -> list[str]:
    return [name for name in settings.model_fields if name not in names]


def _table(title: str, settings: type[Settings], participant: str, fields: Iterable[str]) -> str:
    rows = [
        f"| `{name}` | {_variables(settings, name, participant)} | {_default(settings.model_fields[name])} "
        f"| {_cell(settings.model_fields[name].description or '')} |"
        for name in fields
    ]
    head = (
        f"### {title[0].upper()}{title[1:]}\n\n| setting | variables, the first that is set counts | default | what |"
    )
    return "\n".join([head, "|---|---|---|---|", *rows, ""])


def _variables(settings: type[Settings], name: str, participant: str) -> str:
    found = settings.variables(name, participant)
    return " · ".join(f"`{one}`" for one in found).replace(own_prefix("participant"), "LOCAL2_<PARTICIPANT>_")


def _default(info: FieldInfo) -> str:
    if info.default_factory is not None:
        return "the shipped one"
    value = info.default.model_dump() if isinstance(info.default, BaseModel) else info.default
    if value is None or value == "":
        return ""
    text = str(value) if isinstance(value, str | Path) else orjson.dumps(value, default=str).decode()
    return f"`{_cell(text)}`" if len(text) <= _LONG else "the shipped one"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def filled(page: str) -> str:
    """The page with the tables as they are now."""
    text, number = _BETWEEN.subn(lambda _: tables(), page)
    assert number == 1, "docs/settings.md has one place for the tables"
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
