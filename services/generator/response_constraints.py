"""What a client demands of a response: calls of its own tools, and a JSON schema of the answer."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import orjson

from shared.contracts import ClientTools
from shared.errors import ModelError
from shared.llm.port import ToolCall

# A call and its position in the message.
PlacedCall = tuple[int, ToolCall]

_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_SHOWN = 300
_MOST_SECONDS = 1.0


class UnusableForm(ModelError):
    """The JSON schema cannot validate any value: a reference has no target, or validation takes too long."""


@dataclass(frozen=True, slots=True)
class ResponseConstraints:
    """following: messages after the question. tools: the client's own tools. schema: JSON schema of the answer."""

    following: Sequence[Mapping[str, Any]] = ()
    tools: ClientTools | None = None
    schema: Mapping[str, Any] | None = None

    # ── the client's tools ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def functions(self) -> list[dict[str, Any]]:
        return self.tools.functions if self.tools else []

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a call of the client's tools."""
        return self.tools is not None and self.tools.choice != "auto"

    def split(self, calls: Sequence[ToolCall]) -> tuple[list[PlacedCall], list[PlacedCall]]:
        """Return the calls that run here, and those that the client runs."""
        names = {function["function"]["name"] for function in self.functions}
        own: list[PlacedCall] = []
        for_client: list[PlacedCall] = []
        for placed in enumerate(calls):
            (for_client if placed[1].name in names and placed[1].error is None else own).append(placed)
        return own, for_client if self.tools is None or self.tools.parallel else for_client[:1]

    def call_of(self, text: str) -> ToolCall:
        """Return the call in a reply of the form `form`. Raises ValueError with a text for the model."""
        value = self.validated(text)
        if (name := self._only) is None:
            name, value = value["name"], value["arguments"]
        return ToolCall("", name, value)

    @property
    def _only(self) -> str | None:
        """The name of the only tool that the client allows; None: several."""
        if self.tools is None or self.tools.choice == "required":
            return self.functions[0]["function"]["name"] if len(self.functions) == 1 else None
        return self.tools.choice

    # ── the form of the answer ───────────────────────────────────────────────────────────────────────────────────

    @property
    def form(self) -> Mapping[str, Any] | None:
        """The JSON schema of the model's text: of a call's arguments, or of the answer."""
        if not self.must_call:
            return self.schema
        forms = {function["function"]["name"]: _parameters(function) for function in self.functions}
        if self._only is not None:
            return forms[self._only]
        # Model servers do not resolve references into lists: a schema with references to itself goes to $defs.
        moved = {name: _moved(form, f"#/$defs/{name}") for name, form in forms.items()}
        defined = {name: form for name, form in moved.items() if form != forms[name]}
        either = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": name},
                    "arguments": {"$ref": f"#/$defs/{name}"} if name in defined else form,
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for name, form in forms.items()
        ]
        return {"anyOf": either, "$defs": defined} if defined else {"anyOf": either}

    @property
    def instruction(self) -> str:
        """The system message about the form."""
        form = orjson.dumps(self.form).decode()
        if not self.must_call:
            return f"Your final answer is one JSON value that fits this JSON schema, and nothing else:\n{form}"
        known = "\n".join(
            f"- {function['function']['name']}: {function['function'].get('description') or 'no description'}"
            for function in self.functions
            if self._only in (None, function["function"]["name"])
        )
        what = f"its arguments, for the tool {self._only}" if self._only else "the tool's name and its arguments"
        return f"Call a tool now. The tools:\n{known}\nAnswer with one JSON value, {what}, in this form:\n{form}"

    def validated(self, text: str) -> Any:
        """Return the JSON value in a reply. Raises ValueError with a text for the model, and UnusableForm."""
        error = "it is not JSON"
        for candidate in _candidates(text):
            try:
                value = orjson.loads(candidate)
            except orjson.JSONDecodeError:
                continue
            error = _schema_error(value, self.form or {})
            if not error:
                return value
        raise ValueError(error)


def _candidates(text: str) -> Iterator[str]:
    """Yield parts of a reply that may be the JSON: all of it, fenced blocks, from the first bracket to the last."""
    yield text
    yield from _FENCED.findall(text)
    for first, last in ("{}", "[]"):
        begin, end = text.find(first), text.rfind(last)
        if 0 <= begin < end:
            yield text[begin : end + 1]


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    return function["function"].get("parameters") or {"type": "object"}


def _moved(schema: Any, place: str) -> Any:
    """Return a schema with its references to itself changed for its new place in another schema."""
    match schema:
        case {"$id": str()}:
            # References in a schema with an id are relative to that id.
            return schema
        case dict():
            found = {name: _moved(value, place) for name, value in schema.items()}
            if isinstance(to := schema.get("$ref"), str) and (to == "#" or to.startswith("#/")):
                found["$ref"] = place + to[1:]
            return found
        case list():
            return [_moved(value, place) for value in schema]
        case _:
            return schema


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in a block that computes for longer.

    The block stops the event loop, and a client's pattern or references can take for ever.
    """

    def raise_timeout(*_: Any) -> None:
        raise TimeoutError(f"it takes more than {seconds:g} s to compare a value with it")

    before = signal.signal(signal.SIGVTALRM, raise_timeout)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _schema_error(value: Any, schema: Mapping[str, Any]) -> str:
    """Return what is wrong with a value; empty if it is valid. Raises UnusableForm."""
    # Imported here, because most queries have no form.
    import jsonschema
    from jsonschema_specifications import REGISTRY

    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    try:
        with _within(_MOST_SECONDS):
            # Its own registry: else the library would fetch the URLs of a client's references.
            error = jsonschema.exceptions.best_match(kind(schema, registry=REGISTRY).iter_errors(value))
    except Exception as exc:
        # References may lead to anything, also to no schema: the library raises errors of many types.
        raise UnusableForm(f"the JSON schema cannot be used: {exc}"[:_SHOWN]) from exc
    if error is None:
        return ""
    place = "/".join(str(part) for part in error.absolute_path)
    return f"{place or 'the value'}: {error.message}"[:_SHOWN]
