"""Numbers in the command line's outputs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from services.cli.words import counted

CLI = Path(__file__).resolve().parents[3] / "services" / "cli"
# A numeric expression, and a plural behind it, as in `{len(found)} rows`.
NUMBER = re.compile(r"\b(len|sum|count|number|total|rounds|days|rows|turns|keys)\b|\[")
PLURAL = re.compile(r"^ (?!is |was |has |as |needs |does )[a-z]{2,}[^s\W]s\b")


@pytest.mark.parametrize(
    ("number", "nouns", "text"),
    [
        (0, ("turn",), "0 turns"),
        (1, ("turn",), "1 turn"),
        (2, ("turn",), "2 turns"),
        (1_200, ("turn",), "1,200 turns"),
        (1, ("memory", "memories"), "1 memory"),
        (3, ("memory", "memories"), "3 memories"),
    ],
)
def test_counted_chooses_the_form_of_the_noun(number: int, nouns: tuple[str, ...], text: str) -> None:
    assert counted(number, *nouns) == text


def test_command_line_output_has_no_fixed_plural() -> None:
    found = []
    for path in sorted(CLI.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                for value, text in zip(node.values, node.values[1:], strict=False):
                    if isinstance(value, ast.FormattedValue) and isinstance(text, ast.Constant):
                        source = ast.unparse(value.value)
                        if NUMBER.search(source) and "counted(" not in source and PLURAL.search(str(text.value)):
                            found.append(f"{path.relative_to(CLI)}:{node.lineno}: {{{source}}}{text.value}")
    assert found == []
