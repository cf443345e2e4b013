"""The cases of printed_forms.yaml: calls that models print, and prose that only resembles one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

OFFERED: dict[str, dict[str, Any]] = {
    "web_search": {"type": "object", "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}},
    "save_topic": {"type": "object", "properties": {"topic": {"type": "string"}, "content": {"type": "string"}}},
    "get_time": {"type": "object", "properties": {}},
}


@dataclass(frozen=True)
class Printed:
    """text: a whole answer. calls: (name, arguments) in it. rest: what is left of it as text, but for blanks around."""

    name: str
    text: str
    calls: list[tuple[str, dict[str, Any]]]
    rest: str
    question: str


_CASES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
FORMS = [
    Printed(
        name=case["name"],
        text=case["text"],
        calls=[item for call in case.get("calls", [{"web_search": {"query": "x"}}]) for item in call.items()],
        rest=case.get("rest", ""),
        question="What is new?",
    )
    for case in _CASES["forms"]
]
PROSE = [
    Printed(case["name"], case["text"], [], case["text"], case.get("question", "Tell me about it."))
    for case in _CASES["prose"]
]
