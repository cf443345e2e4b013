"""JSON schemas of tools without references. Pure.

Model servers follow references in their own ways or not at all, and some refuse a request with a broken reference.
Therefore a model gets each schema with its references replaced by their targets. Source: JSON Schema 2020-12, RFC 6901.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from shared.llm.lenient_literals import DEEPEST

# Repetitions of a schema inside itself; below them it allows anything. The first number with which the schema stays
# within its bound is used: a prompt has no room for schemas that grow.
_REPEATS = (2, 1)
# The bound of objects in a schema without references: at least this many, or this multiple of the original number.
# Further references allow anything.
_LEAST_BOUND, _GROWTH = 200, 3
_DEFINITIONS = ("$defs", "definitions")
# Keywords whose values map names to schemas: these names are not keywords.
_MAPS = frozenset({*_DEFINITIONS, "properties", "patternProperties", "dependentSchemas"})
# Keywords whose values are data.
_DATA = frozenset({"const", "enum", "default", "example", "examples"})
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_ANCHORS = ("$anchor", "$dynamicAnchor")
# Annotations: beside a reference they replace those of its target.
_NOTES = frozenset({"title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly"})


def without_references(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the schema with its references replaced by their targets, and the broken references.

    A broken reference becomes `{}`, which allows anything. So does a schema with too many levels.
    """
    refers, objects = False, 0
    level: list[Any] = [schema]
    for _ in range(DEEPEST):
        maps = [one for one in level if isinstance(one, Mapping)]
        objects += len(maps)
        refers = refers or any(isinstance(one.get(name), str) for one in maps for name in _REFERENCES)
        level = _inside(level)
    if level:
        return {"type": "object"}, [f"more than {DEEPEST} levels"]
    if not refers:
        return dict(schema), []
    for repeats in _REPEATS:
        replacing = _Replacing(repeats, max(_LEAST_BOUND, _GROWTH * objects))
        replaced = replacing.schema(schema, schema, ())
        if replacing.left > 0:
            break
    return replaced, list(dict.fromkeys(replacing.unresolved))


def _inside(values: Sequence[Any]) -> list[Any]:
    """Return the members of these values that are objects or lists."""
    return [
        inner
        for one in values
        if isinstance(one, Mapping | list)
        for inner in (one.values() if isinstance(one, Mapping) else one)
    ]


@dataclass(slots=True)
class _Replacing:
    """One pass over one schema. repeats: of a schema inside itself. left: objects that may still be written."""

    repeats: int
    left: int
    unresolved: list[str] = field(default_factory=list)

    def schema(self, value: Mapping[str, Any], document: Mapping[str, Any], inside: tuple[int, ...]) -> dict[str, Any]:
        """Return a schema without references. document: the root of its references. inside: ids of the targets that
        contain it."""
        self.left -= 1
        if isinstance(value.get("$id"), str):
            document = value
        own = {
            name: self._keyword(name, part, document, inside)
            for name, part in value.items()
            if name not in _DEFINITIONS and not (name in _REFERENCES and isinstance(part, str))
        }
        for name in _REFERENCES:
            if isinstance(reference := value.get(name), str):
                own = _both(self._target(reference, document, inside), own)
        return own

    def _keyword(self, name: str, part: Any, document: Mapping[str, Any], inside: tuple[int, ...]) -> Any:
        if name in _DATA:
            return part
        if name in _MAPS and isinstance(part, Mapping):
            return {key: self._part(one, document, inside) for key, one in part.items()}
        return self._part(part, document, inside)

    def _part(self, part: Any, document: Mapping[str, Any], inside: tuple[int, ...]) -> Any:
        if isinstance(part, Mapping):
            return self.schema(part, document, inside)
        if isinstance(part, list):
            return [self._part(one, document, inside) for one in part]
        return part

    def _target(self, reference: str, document: Mapping[str, Any], inside: tuple[int, ...]) -> dict[str, Any]:
        try:
            target = _found(reference, document)
        except (LookupError, ValueError, TypeError):
            self.unresolved.append(reference)
            return {}
        if not isinstance(target, Mapping):
            return {"not": {}} if target is False else {}
        if self.left <= 0 or inside.count(id(target)) >= self.repeats:
            return {}
        return self.schema(target, document, (*inside, id(target)))


def _both(target: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that requires both."""
    if not target.keys() & own.keys() - _NOTES:
        return {**target, **own}
    notes = {name: value for name, value in own.items() if name in _NOTES}
    return {**notes, "allOf": [target, {name: value for name, value in own.items() if name not in _NOTES}]}


def _found(reference: str, document: Mapping[str, Any]) -> Any:
    """Return the target of a reference in its document. Raises LookupError, ValueError or TypeError."""
    base, _, fragment = reference.partition("#")
    if base and base != str(document.get("$id", "")).rstrip("#"):
        raise LookupError(reference)
    fragment = unquote(fragment)
    if fragment and not fragment.startswith("/"):
        return _anchored(fragment, document)
    found: Any = document
    for token in fragment.split("/")[1:]:
        name = token.replace("~1", "/").replace("~0", "~")
        found = found[int(name)] if isinstance(found, list) else found[name]
    if not isinstance(found, Mapping | bool):
        raise LookupError(reference)
    return found


def _anchored(anchor: str, value: Any) -> Mapping[str, Any]:
    """Return the schema with this anchor inside a value. Raises LookupError."""
    level = [value]
    while level:
        for one in level:
            if isinstance(one, Mapping) and anchor in (one.get(name) for name in _ANCHORS):
                return one
        level = _inside(level)
    raise LookupError(anchor)
