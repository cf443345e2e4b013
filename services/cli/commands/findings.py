"""Findings of `local2 doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`missing` means that LoCAL2 cannot work like this; `remedy` is what to do."""

    about: str
    level: Level
    text: str
    remedy: str = ""
