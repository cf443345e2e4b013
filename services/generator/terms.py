"""A client's terms: tools that it runs itself, and the form that the answer must have."""

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

Placed = tuple[int, ToolCall]

_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_SHOWN = 300
_MOST_SECONDS = 1.0


class UnusableForm(ModelError):
    """No value can be compared with the JSON schema of a form: it refers to what is not there, or takes too long."""


@dataclass(frozen=True, slots=True)
class Terms:
    """following: messages after the question. tools: the client's own. schema: JSON schema of the answer."""

    following: Sequence[Mapping[str, Any]] = ()
    tools: ClientTools | None = None
    schema: Mapping[str, Any] | None = None

    # ── the client's tools ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def functions(self) -> list[dict[str, Any]]:
        return self.tools.functions if self.tools else []

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call of the client's tools."""
        return self.tools is not None and self.tools.choice != "auto"

    def split(self, calls: Sequence[ToolCall]) -> tuple[list[Placed], list[Placed]]:
        """(the calls that are run here, those that the client runs), each with its position in the message."""
        names = {function["function"]["name"] for function in self.functions}
        ours: list[Placed] = []
        theirs: list[Placed] = []
        for place in enumerate(calls):
            (theirs if place[1].name in names and place[1].error is None else ours).append(place)
        return ours, theirs if self.tools is None or self.tools.parallel else theirs[:1]

    def call_of(self, text: str) -> ToolCall:
        """The call in a reply that had to have the form `form`. Raises ValueError in words for the model."""
        value = self.fitting(text)
        if (name := self._only) is None:
            name, value = value["name"], value["arguments"]
        return ToolCall("", name, value)

    @property
    def _only(self) -> str | None:
        """The one tool that can be meant."""
        if self.tools is None or self.tools.choice == "required":
            return self.functions[0]["function"]["name"] if len(self.functions) == 1 else None
        return self.tools.choice

    # ── the form of the answer ───────────────────────────────────────────────────────────────────────────────────

    @property
    def form(self) -> Mapping[str, Any] | None:
        """The JSON schema of what the model has to write: of a call's arguments, or of the answer."""
        if not self.must_call:
            return self.schema
        forms = {function["function"]["name"]: _parameters(function) for function in self.functions}
        if self._only is not None:
            return forms[self._only]
        # what refers to a place in itself stands where model servers can follow it: they know no places in lists
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
        """What the model is told of the form."""
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

    def fitting(self, text: str) -> Any:
        """The value that a reply is, when it fits the form. Raises ValueError in words for the model, and
        UnusableForm."""
        trouble = "it is not JSON"
        for candidate in _candidates(text):
            try:
                value = orjson.loads(candidate)
            except orjson.JSONDecodeError:
                continue
            trouble = _misfit(value, self.form or {})
            if not trouble:
                return value
        raise ValueError(trouble)


def _candidates(text: str) -> Iterator[str]:
    """Where the JSON may stand in a reply: all of it, a fenced block, from the first bracket to the last."""
    yield text
    yield from _FENCED.findall(text)
    for first, last in ("{}", "[]"):
        begin, end = text.find(first), text.rfind(last)
        if 0 <= begin < end:
            yield text[begin : end + 1]


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    return function["function"].get("parameters") or {"type": "object"}


def _moved(schema: Any, place: str) -> Any:
    """A schema as part of another one, `place` in it: what refers to a place in itself still does."""
    match schema:
        case {"$id": str()}:
            # its references begin here, wherever it stands
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
    """Raises TimeoutError in what computes for longer: nothing else of this process runs meanwhile, and a pattern or
    references of a client's choice can take for ever."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"it takes more than {seconds:g} s to compare a value with it")

    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _misfit(value: Any, schema: Mapping[str, Any]) -> str:
    """What is wrong with a value, in words; empty when it fits. Raises UnusableForm."""
    # imported when it is needed: most queries have no form
    import jsonschema
    from jsonschema_specifications import REGISTRY

    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    try:
        with _within(_MOST_SECONDS):
            # with a registry of its own, nothing is fetched from where a client's schema refers to
            error = jsonschema.exceptions.best_match(kind(schema, registry=REGISTRY).iter_errors(value))
    except Exception as exc:
        # what it refers to may be anything, a schema or not, and itself: nobody has looked at that before
        raise UnusableForm(f"the JSON schema cannot be used: {exc}"[:_SHOWN]) from exc
    if error is None:
        return ""
    place = "/".join(str(part) for part in error.absolute_path)
    return f"{place or 'the value'}: {error.message}"[:_SHOWN]
