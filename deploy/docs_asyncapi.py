"""Writes docs/asyncapi.yaml from the contracts: every subject of the bus with its payload, in AsyncAPI 3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from shared.contracts import SUBJECTS, TOOL_REQUEST, TOOL_RESULT, Subject
from shared.key_prefix import PREFIX

PAGE = Path(__file__).resolve().parent.parent / "docs" / "asyncapi.yaml"
_PLACE = "#/components/schemas/{model}"
_FIELDS = {
    "source": "participant/replica that wrote it",
    "time": "milliseconds since the epoch",
    "correlation_id": "the query's id",
    "causation_id": "the id of the entry that it answers",
    "session_id": "",
    "user_id": "",
    "respondent_id": "A, or B for the second respondent; left out: A",
    "traceparent": "W3C trace context",
    "deadline": "milliseconds since the epoch, by the bus's clock",
    "attempt": "how often the sender has asked for this; left out: unknown",
    "turn": "of a query: the respondents whose turn it is since it was accepted, which Redis alone writes",
    "id": "left out: the entry's own",
}
_NUMBERS = ("time", "deadline", "attempt")


def _envelope() -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for name, meaning in _FIELDS.items():
        properties[name] = {"type": "string"}
        if name in _NUMBERS:
            properties[name]["pattern"] = "^[0-9]+$"
        if meaning:
            properties[name]["description"] = meaning
    return {"type": "object", "description": "Fields of the entry beside `payload`", "properties": properties,
            "additionalProperties": False}  # fmt: skip


def _read_by(subject: Subject[Any]) -> str:
    if subject.kind == "event":
        return f"followed by observers; about {subject.keep} entries are kept"
    whole = "read by one group; what that has finished is removed" if subject.single_group else "read by groups"
    return f"{whole}; nothing that a group has not finished is removed"


def _words(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split())


def document() -> dict[str, Any]:
    """The document as it is now."""
    subjects = (*SUBJECTS, TOOL_REQUEST, TOOL_RESULT)
    payloads = sorted({subject.payload for subject in subjects}, key=lambda payload: payload.__name__)
    _, found = models_json_schema([(payload, "validation") for payload in payloads], ref_template=_PLACE)
    channels: dict[str, Any] = {}
    operations: dict[str, Any] = {}
    messages: dict[str, Any] = {}
    for subject in sorted(subjects, key=lambda subject: subject.name):
        name, of_tool = subject.name, subject in (TOOL_REQUEST, TOOL_RESULT)
        channels[name] = {
            "address": PREFIX + name + (".{tool}" if of_tool else ""),
            "description": f"A Redis stream, {_read_by(subject)}.",
            "messages": {name: {"$ref": f"#/components/messages/{name}"}},
            **({"parameters": {"tool": {"description": "The tool's name"}}} if of_tool else {}),
        }
        messages[name] = {
            "name": subject.payload.__name__,
            **({"summary": words} if (words := _words(subject.payload)) else {}),
            "headers": {"$ref": _PLACE.format(model="Envelope")},
            "payload": {"$ref": _PLACE.format(model=subject.payload.__name__)},
        }
        operations[f"publish.{name}"] = {"action": "send", "channel": {"$ref": f"#/channels/{name}"}}
    return {
        "asyncapi": "3.1.0",
        "info": {
            "title": "LoCAL2's bus",
            "version": "1",
            "description": "Each message is an entry of a Redis stream: the fields of the envelope (`headers` here), "
            "and `payload` as JSON. Readers ignore fields that they do not know. Made by `make docs-asyncapi`.",
        },
        "defaultContentType": "application/json",
        "servers": {"redis": {"host": "localhost:6379", "protocol": "redis", "description": "Redis 7.0 or newer"}},
        "channels": channels,
        "operations": operations,
        "components": {"messages": messages, "schemas": {"Envelope": _envelope(), **found["$defs"]}},
    }


def text() -> str:
    return yaml.safe_dump(document(), sort_keys=False, allow_unicode=True, width=140)


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
