"""Marks in the product's byte code: which places ran, in every process of a test, for a store of one byte each.

coverage.py would have to watch every line, in every process from its start to its orderly end, and says of a process
that several tests share (a stack of one test file, say) only which test started it.
"""

from __future__ import annotations

import ast
import importlib.util
import marshal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# The name of the file that all processes of a recording share; whoever does not know it keeps its own bytes.
SEEN = "MUTANTS_SEEN"
_MODULE = "shared/_seen.py"
_SOURCE = """
import mmap
import os


def _opened():
    try:
        file = os.open(os.environ["{name}"], os.O_RDWR | os.O_CREAT)
        try:
            os.ftruncate(file, {size})
            return mmap.mmap(file, {size})
        finally:
            os.close(file)
    except (KeyError, OSError, ValueError):
        return bytearray({size})


SEEN = _opened()
"""
# Byte code that is taken as it is, whatever the source beside it says (PEP 552).
_UNCHECKED = 1
_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
_WAITING = ast.Await | ast.Yield | ast.YieldFrom


@dataclass(slots=True)
class Place:
    """Statements that run one after the other. lines: theirs, as a set of bits."""

    path: str
    lines: int


def mark(root: Path, sources: Sequence[str]) -> list[Place]:
    """Writes byte code with marks for the files of a copy, and leaves their text alone.

    Returns the place of each byte.
    """
    marking = _Marking()
    for path in sources:
        text = (root / path).read_bytes()
        code = compile(marking.marked(path, text), str(root / path), "exec", dont_inherit=True)
        cached = Path(importlib.util.cache_from_source(str(root / path)))
        cached.parent.mkdir(exist_ok=True)
        head = importlib.util.MAGIC_NUMBER + _UNCHECKED.to_bytes(4, "little") + importlib.util.source_hash(text)
        cached.write_bytes(head + marshal.dumps(code))
    (root / _MODULE).write_text(_SOURCE.format(name=SEEN, size=max(len(marking.places), 1)))
    return marking.places


class _Marking:
    def __init__(self) -> None:
        self.places: list[Place] = []

    def marked(self, path: str, text: bytes) -> ast.Module:
        """The file with a mark at each place of its functions."""
        tree = ast.parse(text)
        for function in [node for node in ast.walk(tree) if isinstance(node, _FUNCTION)]:
            function.body = self._block(path, function.body, 0)
        # an import may stand after the docstring and what concerns the whole file
        first = sum(_stays_first(statement) for statement in tree.body)
        tree.body.insert(first, ast.parse("from shared._seen import SEEN as __seen__").body[0])
        return ast.fix_missing_locations(tree)

    def _block(self, path: str, block: list[ast.stmt], head: int) -> list[ast.stmt]:
        """head: the lines that lead to this block alone, as a set of bits."""
        marked: list[ast.stmt] = []
        place: Place | None = None
        for statement in block:
            if not _stays_first(statement):
                if place is None:
                    mark = ast.parse(f"__seen__[{len(self.places)}] = 1").body[0]
                    marked.append(ast.copy_location(mark, statement))
                    place = Place(path, head)
                    self.places.append(place)
                    head = 0
                inner = list(_blocks(statement))
                starts = [body[0].lineno for _, _, body in inner]
                place.lines |= _bits(_first(statement), min(starts, default=(statement.end_lineno or 0) + 1))
                # functions have their own turn
                if not isinstance(statement, _FUNCTION | ast.ClassDef):
                    for owner, name, body in inner:
                        setattr(owner, name, self._block(path, body, _head(owner, body)))
                    # what follows may not run although this did
                    if inner or any(isinstance(node, _WAITING) for node in ast.walk(statement)):
                        place = None
            marked.append(statement)
        return marked


def _blocks(statement: ast.stmt) -> Iterator[tuple[ast.AST, str, list[ast.stmt]]]:
    """Whose, under which name, and the statements."""
    for owner in (statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        for name in ("body", "orelse", "finalbody"):
            if body := getattr(owner, name, None):
                yield owner, name, body


def _head(owner: ast.AST, body: list[ast.stmt]) -> int:
    match owner:
        case ast.ExceptHandler(lineno=line):
            return _bits(line, body[0].lineno)
        case ast.match_case(pattern=pattern):
            return _bits(pattern.lineno, body[0].lineno)
    return 0


def _bits(start: int, end: int) -> int:
    """The lines from `start`, `end` excluded."""
    return sum(1 << line for line in range(start, end))


def _first(statement: ast.stmt) -> int:
    return min([statement.lineno, *(one.lineno for one in getattr(statement, "decorator_list", ()))])


def _stays_first(node: ast.stmt) -> bool:
    """Whether nothing may stand before it: a docstring, `from __future__`, `global`."""
    return (
        isinstance(node, ast.Global | ast.Nonlocal)
        or (isinstance(node, ast.ImportFrom) and node.module == "__future__")
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    )
