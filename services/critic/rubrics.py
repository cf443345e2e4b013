"""Rubrics: files of a question in brackets and five score lines, chosen by what the turn did."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from shared.contracts import listed_tools
from shared.errors import SettingsError

DEFAULT = "realistic"
_SHIPPED = ("realistic", "style", "clarity")


@dataclass(frozen=True, slots=True)
class Rubric:
    """`text` is what the judge of one answer reads; `question` is its first line, for comparisons."""

    name: str
    text: str

    @property
    def question(self) -> str:
        return self.text.split("\n", 1)[0]

    @staticmethod
    def parse(name: str, text: str) -> Rubric:
        """Raises SettingsError when it is not a question in brackets with score lines 1 to 5."""
        lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
        scores = [re.match(r"Score (\d): \S", line) for line in lines[1:]]
        if not lines or not re.fullmatch(r"\[.+\]", lines[0]) or [s and s.group(1) for s in scores] != list("12345"):
            raise SettingsError(
                f"rubric {name}: a first line `[question]` and five lines `Score 1: …` to `Score 5: …` are expected"
            )
        return Rubric(name, "\n".join(lines))


def load_rubrics(folder: Path | None) -> dict[str, Rubric]:
    """The shipped rubrics and an operator's own, which may replace them. Raises SettingsError."""
    shipped = files("services.critic").joinpath("rubrics")
    found = {name: Rubric.parse(name, shipped.joinpath(f"{name}.txt").read_text(encoding="utf-8")) for name in _SHIPPED}
    if folder is not None:
        if not folder.is_dir():
            raise SettingsError(f"rubrics_dir: {folder} is not a folder")
        for path in sorted(folder.glob("*.txt")):
            try:
                found[path.stem] = Rubric.parse(path.stem, path.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError) as exc:
                raise SettingsError(f"rubric {path.stem}: {exc}") from exc
    return found


def check_choice(chosen: Mapping[str, str], rubrics: Mapping[str, Rubric]) -> None:
    """Raises SettingsError when a tool is given a rubric that does not exist."""
    unknown = sorted(set(chosen.values()) - rubrics.keys())
    if unknown:
        raise SettingsError(f"rubrics: there is no {', '.join(unknown)}; there are {', '.join(sorted(rubrics))}")


def rubric_for(tools: Collection[str], chosen: Mapping[str, str], rubrics: Mapping[str, Rubric]) -> Rubric:
    """The rubric of the first rule that one of the turn's tools fits; `realistic` when none does."""
    used = listed_tools(tools)
    name = next((rubric for tool, rubric in chosen.items() if not used.isdisjoint(listed_tools([tool]))), DEFAULT)
    return rubrics.get(name, rubrics[DEFAULT])
