"""Small changes of what a program means, found in its source.

Each is one that a colleague could make by mistake: a condition turned round, a bound moved by one, a call left out, two
arguments in the wrong order. What only shapes text for people (logs, messages, annotations, docstrings) is left alone,
and so are tuning constants. Lua scripts are strings of the source, and changed line by line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

_NEGATED: dict[type[ast.cmpop], str] = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: ">=",
    ast.LtE: ">",
    ast.Gt: "<=",
    ast.GtE: "<",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
# The same without its edge, or with it.
_EDGE: dict[type[ast.cmpop], str] = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
_ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.BitAnd: "|",
    ast.BitOr: "&",
}
_COUNTERPARTS = {"min": "max", "max": "min", "any": "all", "all": "any"}
# Functions that only arrange what they are given.
_ARRANGING = frozenset({"reversed", "sorted"})
# Functions whose arguments say the same in another order, or could not stand in one.
_UNORDERED = frozenset({
    "cast", "compare_digest", "gather", "getattr", "isinstance", "maximum",
    "minimum", "partial", "range", "super", "suppress", "zip",
})  # fmt: skip
# No clock stands at the same moment twice.
_CLOCK = re.compile(r"\b(monotonic|now|time)\(\)")
# Calls on these tell people something, or measure it.
_TELLING = re.compile(
    r"^(await )?(_?log|logger|structlog|warnings|_?meter|_?metrics|_?span|_?tracing|not_understood)\b"
    r"|\.(labels|observe)\("
)
# What a call is given for people, or asserts: function, keyword.
_NO_MATTER = frozenset({("zip", "strict"), ("create_task", "name")})
_QUIET_FUNCTIONS = frozenset({"__repr__", "__str__"})

_LUA_NEGATED = {"==": "~=", "~=": "==", "<": ">=", "<=": ">", ">": "<=", ">=": "<"}
_LUA_OPERATOR = re.compile(r"(?<=\s)(==|~=|<=|>=|<|>|and|or|not)(?=\s)")
_LUA_STATEMENT = re.compile(r"^\s*redis\.call\(.*\)$")
_LUA_NUMBER = re.compile(r"(?<![\w.%'\[+-])(\d)(?![\w.'])")
# Numbers that say the same as the next one: how many are asked for of one id, or of which the first alone is taken; and
# for how many milliseconds nobody may have kept what is claimed from whoever has it.
_LUA_NO_MATTER = re.compile(r"(\S+), \1, 1(?=\))|'\+', 1(?=\)\[1\])|'XCLAIM'(, [^,]+){3}, 0(?![\w.])")


@dataclass(frozen=True, slots=True)
class Change:
    """One change. start, end: offsets of what is replaced by `new`, in bytes of the file as UTF-8; line: from 1."""

    path: str
    line: int
    start: int
    end: int
    old: str
    new: str

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {_short(self.old)}  →  {_short(self.new) or '(nothing)'}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 90 else f"{line[:60]} … {line[-25:]}"


def changes(path: str, source: bytes) -> list[Change]:
    """Every change of a Python file, in the order of its lines. Raises SyntaxError for what is no Python."""
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    return sorted(set(finder.found), key=lambda change: (change.start, change.end, change.new))


class _Finder(ast.NodeVisitor):
    def __init__(self, path: str, source: bytes) -> None:
        self._path = path
        self._source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._depth = 0
        self._returns_something = False
        self.found: list[Change] = []

    # where

    def _span(self, node: ast.AST) -> tuple[int, int]:
        at = node
        assert isinstance(at, ast.expr | ast.stmt | ast.keyword | ast.excepthandler)
        assert at.end_lineno is not None
        assert at.end_col_offset is not None
        return self._starts[at.lineno - 1] + at.col_offset, self._starts[at.end_lineno - 1] + at.end_col_offset

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self._source[start:end].decode()

    def _replace(self, node: ast.AST, new: str) -> None:
        start, end = self._span(node)
        self._put(start, end, new)

    def _put(self, start: int, end: int, new: str) -> None:
        old = self._source[start:end].decode()
        if old != new:
            line = self._source.count(b"\n", 0, start) + 1
            self.found.append(Change(self._path, line, start, end, old, new))

    def _between(self, left: ast.AST, right: ast.AST, old: re.Pattern[str], new: str) -> None:
        """Replaces the operator between two expressions."""
        start, end = self._span(left)[1], self._span(right)[0]
        # a comment may stand between them, and the brackets of either
        match = old.search(self._source[start:end].decode())
        if match:
            self._put(start + match.start(), start + match.end(), new)

    # what is no behaviour

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Its parts have no true position before Python 3.12."""

    def visit_Raise(self, node: ast.Raise) -> None:
        self._replace(node, "pass")

    def visit_Assert(self, node: ast.Assert) -> None:
        """Told to readers and type checkers."""

    def visit_Import(self, node: ast.Import) -> None:
        pass

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        pass

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if not any("Protocol" in ast.dump(base) for base in node.bases):
            for statement in node.body:
                self.visit(statement)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in _QUIET_FUNCTIONS or any("overload" in ast.dump(one) for one in node.decorator_list):
            return
        for value in [*node.args.defaults, *node.args.kw_defaults]:
            if isinstance(value, ast.Constant):
                self.visit(value)
        before = self._returns_something
        self._returns_something = node.returns is not None and self._text(node.returns) not in ("None", "NoReturn")
        self._depth += 1
        for statement in node.body:
            self.visit(statement)
        self._depth -= 1
        self._returns_something = before

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    # statements

    def visit_Expr(self, node: ast.Expr) -> None:
        value = node.value
        if isinstance(value, ast.Constant):
            return
        if self._tells(node) or (isinstance(value, ast.Call) and _is_message(value)):
            return
        if not isinstance(value, ast.Yield | ast.YieldFrom):
            self._replace(node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if self._depth == 0 and isinstance(node.value, ast.Constant) and isinstance(node.value.value, int | float):
            return
        if any(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets) and self._depth:
            self._replace(node, "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._replace(node, "pass")
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._replace(node, "pass")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            self._replace(node, "pass")
            return
        # nor is nothing another value than nothing, for who asks whether it is there
        if self._returns_something and not _is_nothing(node.value):
            self._replace(node.value, "None")
        self.visit(node.value)

    def visit_Continue(self, node: ast.Continue) -> None:
        self._replace(node, "break")

    def visit_Break(self, node: ast.Break) -> None:
        self._replace(node, "continue")

    def visit_If(self, node: ast.If) -> None:
        does = any(isinstance(one, ast.Call | ast.Await | ast.NamedExpr) for one in ast.walk(node.test))
        if node.orelse or does or not all(map(self._tells, node.body)):
            self._condition(node.test)
            self.generic_visit(node)

    def _tells(self, statement: ast.stmt) -> bool:
        return isinstance(statement, ast.Expr) and bool(_TELLING.search(self._text(statement)))

    def visit_While(self, node: ast.While) -> None:
        if not isinstance(node.test, ast.Constant):
            self._replace(node.test, "False")
        self.generic_visit(node)

    def visit_Try(self, node: ast.Try) -> None:
        for handler in node.handlers:
            if not isinstance(handler.body[0], ast.Raise):
                start = self._span(handler.body[0])[0]
                self._put(start, self._span(handler.body[-1])[1], "raise")
            if isinstance(handler.type, ast.Tuple):
                for left in handler.type.elts:
                    rest = [self._text(one) for one in handler.type.elts if one is not left]
                    self._replace(handler.type, f"({', '.join(rest)},)")
        if node.finalbody:
            self._put(self._span(node.finalbody[0])[0], self._span(node.finalbody[-1])[1], "pass")
        self.generic_visit(node)

    # expressions

    def _condition(self, node: ast.expr) -> None:
        text = self._text(node)
        if "TYPE_CHECKING" in text or "__name__" in text:
            return
        for fixed in ("True", "False"):
            self._replace(node, fixed)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._replace(node, f"({self._text(node.body)})")
        self._replace(node, f"({self._text(node.orelse)})")
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self._replace(condition, "True")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in pairwise(node.values):
            self._between(left, right, re.compile(rf"\b{word}\b"), other)
        for gone in node.values:
            rest = [f"({self._text(one)})" for one in node.values if one is not gone]
            self._replace(node, f"({f' {word} '.join(rest)})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            self._replace(node, f"({self._text(node.operand)})")
        if not isinstance(node.operand, ast.Constant):
            self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        left = node.left
        tables = (_NEGATED,) if _CLOCK.search(self._text(node)) else (_NEGATED, _EDGE)
        for operator, right in zip(node.ops, node.comparators, strict=True):
            symbol = re.compile(r"not\s+in|is\s+not|[=!]=|<=|>=|<|>|\bin\b|\bis\b")
            for table in tables:
                if type(operator) in table:
                    self._between(left, right, symbol, table[type(operator)])
            left = right
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = any(isinstance(one, ast.JoinedStr) or _is_text(one) for one in (node.left, node.right))
        if type(node.op) in _ARITHMETIC and not texts:
            symbol = re.compile(r"//|[-+*/|&]")
            self._between(node.left, node.right, symbol, _ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._replace(node, str(not value))
        elif isinstance(value, int) and value < 10:
            self._replace(node, str(value + 1))
            if value == 1:
                self._replace(node, "0")
        elif isinstance(value, str) and "redis.call(" in value:
            self._lua(node)

    def visit_Tuple(self, node: ast.Tuple) -> None:
        first = node.elts[0] if node.elts else None
        claims = isinstance(first, ast.Constant) and first.value == "XCLAIM"
        for place, one in enumerate(node.elts):
            # as in a script: a millisecond more or less
            if not (claims and place == 4):
                self.visit(one)

    def visit_Call(self, node: ast.Call) -> None:
        if _TELLING.search(self._text(node)):
            return
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        called = name or getattr(node.func, "attr", "")
        positional = [one for one in node.args if not isinstance(one, ast.Starred)]
        if name in _COUNTERPARTS:
            self._replace(node.func, _COUNTERPARTS[name])
            if len(positional) == len(node.args) == 2 and not node.keywords:
                for one in positional:
                    self._replace(node, f"({self._text(one)})")
        elif name in _ARRANGING and positional:
            self._replace(node, f"list({self._text(positional[0])})")
        elif called not in _UNORDERED:
            for one, two in pairwise(positional):
                if len(positional) == len(node.args) and not _is_text(one) and ast.dump(one) != ast.dump(two):
                    start, end = self._span(one)[0], self._span(two)[1]
                    middle = self._source[self._span(one)[1] : self._span(two)[0]].decode()
                    self._put(start, end, self._text(two) + middle + self._text(one))
        mattering = [keyword for keyword in node.keywords if (called, keyword.arg) not in _NO_MATTER]
        for keyword in mattering:
            if keyword.arg is not None and (node.args or len(node.keywords) > 1):
                start, end = self._span(keyword)
                following = re.match(rb"\s*,\s*", self._source[end:])
                before = re.search(rb",\s*$", self._source[:start])
                if following:
                    self._put(start, end + following.end(), "")
                elif before:
                    self._put(before.start(), end, "")
        for part in (node.func, *node.args, *mattering):
            self.visit(part)

    # Lua

    def _lua(self, node: ast.Constant) -> None:
        start, end = self._span(node)
        for match in re.finditer(rb"[^\n]+", self._source[start:end]):
            line, at = match.group().decode(), start + match.start()
            if line.lstrip().startswith("--"):
                continue
            for put in _lua_line(line):
                put(self._put, at)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_nothing(node: ast.expr) -> bool:
    """Whether it is a false value: None, 0, an empty text or collection."""
    try:
        return not ast.literal_eval(node)
    except (TypeError, ValueError):
        return False


def _is_message(call: ast.Call) -> bool:
    """Whether an exception is given its sentence."""
    return (
        ast.unparse(call.func) == "super().__init__" and all(_is_text(one) for one in call.args) and not call.keywords
    )


def _lua_line(line: str) -> Iterator[Callable[[Callable[[int, int, str], None], int], None]]:
    def at(start: int, end: int, new: str) -> Callable[[Callable[[int, int, str], None], int], None]:
        # offsets are those of bytes
        begins, ends = len(line[:start].encode()), len(line[:end].encode())
        return lambda put, base: put(base + begins, base + ends, new)

    for match in _LUA_OPERATOR.finditer(line):
        word = match.group()
        if word == "not":
            yield at(match.start(), match.end(), "")
        elif word in ("and", "or"):
            yield at(match.start(), match.end(), "or" if word == "and" else "and")
        else:
            yield at(match.start(), match.end(), _LUA_NEGATED[word])
            if word in ("<", ">", "<=", ">="):
                yield at(match.start(), match.end(), word[0] if len(word) == 2 else f"{word}=")
    if _LUA_STATEMENT.match(line):
        text = line.strip()
        start = line.index(text)
        yield at(start, start + len(text), "")
    equal = {match.end() for match in _LUA_NO_MATTER.finditer(line)}
    for match in _LUA_NUMBER.finditer(line):
        if match.end() in equal:
            continue
        number = int(match.group())
        # what a script returns is asked for whether it is nothing
        turned = number < 2 and line[: match.start()].endswith("return ")
        yield at(match.start(), match.end(), str(1 - number if turned else number + 1))
