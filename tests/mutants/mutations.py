"""Finds small faults that could be put into a source file: one changed expression or one dropped statement each.

What is left alone: annotations, texts and what is formatted into them, docstrings, ``assert`` and ``strict=`` (they
guard against our own faults only), and the conditions of ``while`` (most would only hang).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_SWAPPED: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.Mult,),
    ast.Pow: (ast.Mult,),
    ast.BitOr: (ast.BitAnd,),
    ast.BitAnd: (ast.BitOr,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}
_SWAPPED_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_EMPTY_OF = {"bool": ("True", "False"), "int": ("0",), "float": ("0.0",), "str": ('""',), "tuple": ("()",)}
_DROPPED = (ast.AugAssign, ast.Raise, ast.Delete, ast.Continue)
# Outside these, a replaced expression stands in parentheses, so that it binds as the old one did.
_BARE = (ast.Constant, ast.Name, ast.Call, ast.Attribute)


@dataclass(frozen=True, slots=True)
class Mutation:
    """Replaces the bytes ``[start, end)`` of a file; ``kind`` names the fault."""

    path: str
    line: int
    kind: str
    start: int
    end: int
    new: str

    def apply(self, source: str) -> str:
        raw = source.encode()
        return (raw[: self.start] + self.new.encode() + raw[self.end :]).decode()

    def lines(self, source: str) -> tuple[str, str]:
        """Return the lines it changes, before and after, without what surrounds them."""
        raw = source.encode()
        first = raw.rfind(b"\n", 0, self.start) + 1
        last = raw.find(b"\n", self.end)
        last = len(raw) if last < 0 else last
        after = raw[first : self.start] + self.new.encode() + raw[self.end : last]
        return _flat(raw[first:last]), _flat(after)


def _flat(text: bytes) -> str:
    return " ".join(text.decode().split())


def find_mutations(path: str, source: str) -> list[Mutation]:
    """Return all mutations of a file, in order of place; each yields a file that still compiles."""
    found = sorted(_Finder(path, source).all(), key=lambda one: (one.start, one.end, one.kind, one.new))
    return [one for one in dict.fromkeys(found) if _compiles(one.apply(source))]


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


class _Finder:
    def __init__(self, path: str, source: str) -> None:
        self._path = path
        self._raw = source.encode()
        self._tree = ast.parse(source)
        self._begins = [0]  # the offset of each line, in bytes as columns are
        for line in self._raw.splitlines(keepends=True):
            self._begins.append(self._begins[-1] + len(line))

    def all(self) -> Iterator[Mutation]:
        yield from self._walk(self._tree, returns="")

    def _walk(self, node: ast.AST, returns: str) -> Iterator[Mutation]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            returns = ast.unparse(node.returns).split("[")[0] if node.returns else ""
        elif isinstance(node, ast.stmt):
            yield from self._of_statement(node, returns)
        elif isinstance(node, ast.expr):
            yield from self._of_expression(node)
        for child in _children(node):
            yield from self._walk(child, returns)

    def _of_statement(self, node: ast.stmt, returns: str) -> Iterator[Mutation]:
        if isinstance(node, _DROPPED) or _is_effect(node):
            yield self._at(node, "drop statement", "pass")
        if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
            for constant in _EMPTY_OF.get(returns, ("None",)):
                yield self._at(node.value, "return constant", constant)
        if isinstance(node, ast.If) and not isinstance(node.test, ast.Compare | ast.UnaryOp):
            yield self._at(node.test, "negate condition", f"not ({ast.unparse(node.test)})")

    def _of_expression(self, node: ast.expr) -> Iterator[Mutation]:
        if isinstance(node, ast.Compare):
            for place, old in enumerate(node.ops):
                for new in _SWAPPED[type(old)]:
                    ops = [*node.ops[:place], new(), *node.ops[place + 1 :]]
                    yield self._expression(node, "compare", ast.Compare(node.left, ops, node.comparators))
        elif isinstance(node, ast.BinOp) and not (_is_text(node.left) or _is_text(node.right)):
            for new in _SWAPPED.get(type(node.op), ()):
                yield self._expression(node, "arithmetic", ast.BinOp(node.left, new(), node.right))
        elif isinstance(node, ast.BoolOp):
            yield self._expression(node, "and or", ast.BoolOp(_SWAPPED[type(node.op)][0](), node.values))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            yield self._expression(node, "drop not" if isinstance(node.op, ast.Not) else "sign", node.operand)
        elif isinstance(node, ast.IfExp):
            yield self._expression(node, "swap branches", ast.IfExp(node.test, node.orelse, node.body))
        elif isinstance(node, ast.Constant):
            for value in _near(node.value):
                yield self._at(node, "constant", repr(value))
        elif isinstance(node, ast.Name) and node.id in _SWAPPED_NAMES:
            yield self._at(node, "min max", _SWAPPED_NAMES[node.id])

    def _expression(self, node: ast.expr, kind: str, new: ast.expr) -> Mutation:
        text = ast.unparse(ast.fix_missing_locations(new))
        return self._at(node, kind, text if isinstance(new, _BARE) else f"({text})")

    def _at(self, node: ast.stmt | ast.expr, kind: str, new: str) -> Mutation:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._begins[node.lineno - 1] + node.col_offset
        end = self._begins[node.end_lineno - 1] + node.end_col_offset
        return Mutation(self._path, node.lineno, kind, start, end, new)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may be changed inside a node."""
    if isinstance(node, ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params", "bases"):
            continue
        if isinstance(node, ast.While) and name == "test":
            continue
        if isinstance(node, ast.keyword) and node.arg == "strict":
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child


def _is_effect(node: ast.stmt) -> bool:
    """Tell whether a statement is a call, or sets something that outlives the function."""
    if isinstance(node, ast.Expr):
        value = node.value.value if isinstance(node.value, ast.Await) else node.value
        return isinstance(value, ast.Call)
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _near(value: object) -> tuple[object, ...]:
    """Return other constants close by."""
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return (value + 1, value - 1)
    if isinstance(value, float) and value + 1.0 != value:
        return (value + 1.0,)
    return ()
