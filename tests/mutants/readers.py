"""Which lines have to run for a line to matter: its statement, or those that read what it defines at import."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Lines = dict[str, set[int]]
_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class _Statement:
    """first, last: its lines, without those of a body. local: it is in a function. defines: the names it gives."""

    first: int
    last: int
    local: bool
    defines: frozenset[str]
    reads: frozenset[str]


class Readers:
    """Of the files of a program (path → text)."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        trees = {path: ast.parse(text) for path, text in sources.items()}
        self._statements = {path: list(_statements(tree.body, ())) for path, tree in trees.items()}
        self._reading: dict[str, list[tuple[str, _Statement]]] = defaultdict(list)
        for path, statements in self._statements.items():
            for statement in statements:
                for name in statement.reads:
                    self._reading[name].append((path, statement))

    def of(self, path: str, line: int) -> Lines:
        """The lines of which one must run to notice a change in this one; empty when nobody reads what it defines."""
        at = [one for one in self._statements[path] if one.first <= line <= one.last]
        lines: Lines = defaultdict(set)
        pending = [(path, min(at, key=lambda one: one.last - one.first))] if at else []
        seen = set(pending)
        while pending:
            file, statement = pending.pop()
            if statement.local:
                lines[file].update(range(statement.first, statement.last + 1))
                continue
            more = {reading for name in statement.defines for reading in self._reading[name]} - seen
            seen |= more
            pending.extend(more)
        return lines


def _statements(body: list[ast.stmt], inside: tuple[str, ...], local: bool = False) -> Iterator[_Statement]:
    for node in body:
        blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
        blocks += [handler.body for handler in getattr(node, "handlers", ())]
        blocks += [case.body for case in getattr(node, "cases", ())]
        starts = [_first(block[0]) for block in blocks if block]
        last = min(starts) - 1 if starts else node.end_lineno or node.lineno
        parts = [node] if not starts else [one for one in ast.iter_child_nodes(node) if not isinstance(one, ast.stmt)]
        names = [one for part in parts for one in ast.walk(part)]
        own = {one.id for one in names if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
        reads = {one.id for one in names if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
        reads |= {one.attr for one in names if isinstance(one, ast.Attribute)}
        function = isinstance(node, _FUNCTION)
        named = (node.name,) if function or isinstance(node, ast.ClassDef) else ()
        defines = frozenset(own | set(named) | set(inside))
        yield _Statement(_first(node), max(last, _first(node)), local, defines, frozenset(reads))
        for branch in [*getattr(node, "handlers", ()), *getattr(node, "cases", ())]:
            begins = branch.lineno if isinstance(branch, ast.ExceptHandler) else branch.pattern.lineno
            yield _Statement(begins, branch.body[0].lineno - 1, local, frozenset(inside), frozenset())
        within = inside if local or function else (*inside, *named)
        for block in blocks:
            yield from _statements(block, within, local or function)


def _first(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(one.lineno for one in decorators)])
