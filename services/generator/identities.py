"""Who may sit in the committee: the shipped members, those of an operator's file, and The Self."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from shared.contracts import persona_key
from shared.errors import ModelError, SettingsError
from shared.participant.yaml_file import read_yaml

_FORM = "a mapping with `personas` (name: who it is), `self` (who it is), or both is expected"


class UnknownPersona(ModelError):
    """Somebody names a committee member that there is not."""


@dataclass(frozen=True, slots=True)
class Identities:
    """Name → who it is, in the order of the file; and The Self, who always comes last."""

    personas: dict[str, str]
    self_identity: str

    def named(self, names: Iterable[str]) -> list[str]:
        """The names as they are here, however they are written, each once. Raises UnknownPersona."""
        wanted = list(dict.fromkeys(names))
        known = {persona_key(name): name for name in self.personas}
        if unknown := sorted({name for name in wanted if persona_key(name) not in known}):
            raise UnknownPersona(f"unknown personas: {', '.join(unknown)}; there are {', '.join(self.personas)}")
        return list(dict.fromkeys(known[persona_key(name)] for name in wanted))

    def in_order(self, names: Iterable[str], order: Sequence[str]) -> list[str]:
        """The members named, those of `order` first. Raises UnknownPersona."""
        members, first = self.named(names), self.named(order)
        return [name for name in first if name in members] + [name for name in members if name not in first]


@cache
def load_identities(path: Path | None) -> Identities:
    """The shipped identities; those of an operator's file are added, and one of the same name is replaced.

    Raises SettingsError.
    """
    with as_file(files("services.generator").joinpath("prompts/identities.yaml")) as ours:
        shipped = _parsed(read_yaml(ours))
    if path is None:
        return shipped
    try:
        own = _parsed(read_yaml(path))
    except ValueError as exc:
        raise SettingsError(f"identities {path}: {exc}") from exc
    replaced = {persona_key(name) for name in own.personas}
    kept = {name: text for name, text in shipped.personas.items() if persona_key(name) not in replaced}
    return Identities({**kept, **own.personas}, own.self_identity or shipped.self_identity)


def _parsed(content: Any) -> Identities:
    """Raises ValueError in words."""
    if not isinstance(content, dict) or not content or content.keys() - {"personas", "self"}:
        raise ValueError(_FORM)
    personas, self_identity = content.get("personas") or {}, content.get("self") or ""
    if not isinstance(personas, dict) or not isinstance(self_identity, str):
        raise ValueError(_FORM)
    seen: set[str] = set()
    for name, identity in personas.items():
        if not persona_key(str(name)) or not isinstance(identity, str) or not identity.strip():
            raise ValueError(f"{name!r} needs a name and a text that says who it is; {_FORM}")
        if persona_key(str(name)) == persona_key("The Self"):
            raise ValueError("The Self is no member: who it is stands under `self`")
        if "," in str(name) or not str(name).isprintable():
            raise ValueError(f"{name!r}: a name is one line without commas, which stand between names")
        if persona_key(str(name)) in seen:
            raise ValueError(f"{name!r} stands there twice; case, spaces and underscores make no difference")
        seen.add(persona_key(str(name)))
    return Identities({str(name): identity.strip() for name, identity in personas.items()}, self_identity.strip())
