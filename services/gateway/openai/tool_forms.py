"""The forms in which clients offer tools and hear of their calls: for the model every tool is a function. Pure.

Two are not as the model sees them: a custom tool takes a text instead of arguments, and a namespace has tools of its
own. Source: the API reference of OpenAI, 2026.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.gateway.http.errors import ApiError, sentence

# The one argument of the function that stands for a custom tool.
_INPUT = "input"


class Function(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Form:
    """A tool as its client knows it. custom: it takes a text."""

    name: str
    namespace: str | None = None
    custom: bool = False


Offered = dict[str, tuple[Function, Form]]


def offered(tools: Iterable[Any], ours: tuple[str, ...] = ()) -> Offered:
    """Each tool by the name that the model calls it by. `ours`: beginnings of the types that the agent has itself: such
    a tool is passed over. Raises ApiError 400 for one that cannot be offered."""
    found: Offered = {}
    for place, tool in enumerate(tools):
        for function, form in _each(tool, f"tools.{place}", ours, None):
            if function.name in found:
                raise ApiError(400, "invalid_request", "tools: two of them have the same name")
            found[function.name] = function, form
    return found


def forms_of(tools: Iterable[Any], ours: tuple[str, ...] = ()) -> dict[str, Form]:
    """The forms of tools that were offered before."""
    return {name: form for name, (_, form) in offered(tools, ours).items()}


def full_name(name: str, namespace: str | None) -> str:
    """What the model calls a tool of a namespace."""
    return f"{namespace}__{name}" if namespace else name


def text_of_call(args: Mapping[str, Any]) -> str:
    """What a custom tool is called with."""
    text = args.get(_INPUT)
    return text if isinstance(text, str) else orjson.dumps(args).decode()


def args_of_text(text: Any) -> dict[str, Any]:
    """The arguments of a custom tool's call that a client tells of."""
    return {_INPUT: str(text or "")}


def _each(tool: Any, place: str, ours: tuple[str, ...], space: Mapping[str, Any] | None) -> list[tuple[Function, Form]]:
    """`space`: the namespace that a tool is in."""
    kind = str(tool.get("type", "function")) if isinstance(tool, Mapping) else ""
    match kind:
        case "function" | "custom":
            return [_one(tool.get(kind, tool), place, space, custom=kind == "custom")]
        case "namespace" if space is None and isinstance(tool.get("tools"), list):
            inner = [_each(one, f"{place}.tools.{n}", (), tool) for n, one in enumerate(tool["tools"])]
            return [pair for pairs in inner for pair in pairs]
        case _ if ours and kind.startswith(ours):
            return []
        case "":
            raise _bad(f"{place}: the tool must be an object with a type")
        case _:
            raise _bad(f"{place}: tools of type {kind[:50]} are not supported; use type function")


def _one(given: Any, place: str, space: Mapping[str, Any] | None, *, custom: bool) -> tuple[Function, Form]:
    if not isinstance(given, Mapping):
        raise _bad(f"{place}: the tool must be an object with a name")
    fields = {"parameters": None, **given} if not custom else {**given, **_as_function(given)}
    form = Form(str(given.get("name", "")), custom=custom)
    if space is not None:
        form = Form(form.name, str(space.get("name", "")), custom)
        about = [str(text) for text in (space.get("description"), fields.get("description")) if text]
        fields |= {"name": full_name(form.name, form.namespace), "description": "\n".join(about)}
    try:
        return Function.model_validate(fields), form
    except ValidationError as exc:
        raise _bad(f"{place}: {sentence(exc.errors(include_url=False)[0])}") from exc


def _as_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    about = str(tool.get("description") or "")
    form = tool.get("format")
    if isinstance(form, Mapping) and form.get("type") == "grammar":
        grammar = form.get("grammar", form)
        if not isinstance(grammar, Mapping) or not isinstance(grammar.get("definition"), str):
            raise _bad(f"tools: the grammar of {str(tool.get('name'))[:100]!r} must have a definition")
        about += f"\n\nIts input must fit this grammar ({grammar.get('syntax')}):\n{grammar['definition']}"
    said = {"type": "string", "description": "The text that the tool takes"}
    return {
        "description": about.strip(),
        "parameters": {"type": "object", "properties": {_INPUT: said}, "required": [_INPUT]},
    }


def _bad(message: str) -> ApiError:
    return ApiError(400, "unsupported", message)
