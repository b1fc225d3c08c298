"""Measures a tree by reading its files; nothing is imported or run.

The definitions are chosen so that a change of layout moves the figures and a change of formatting hardly does.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOMS = ("engine", "classifier", "policies", "backends", "gateway", "migrations")
OUTSIDE_ENGINE = tuple(room for room in ROOMS if room != "engine")

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class SourceFile:
    """One Python file of ours."""

    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=str(self.path))

    @cached_property
    def num_lines(self) -> int:
        """Return its lines, blank ones, comments and docstrings included."""
        return self.text.count("\n")

    @cached_property
    def code_lines(self) -> frozenset[int]:
        """Return the numbers of the lines with code: no blank line, no comment alone, no docstring."""
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in _NO_CODE:
                lines |= set(range(token.start[0], token.end[0] + 1))
        return frozenset(lines - set(self._docstring_lines()))

    @cached_property
    def num_comments(self) -> int:
        """Return how many comment tokens there are: each line of a comment, those at a line's end, orders to tools."""
        return sum(
            token.type == tokenize.COMMENT for token in tokenize.generate_tokens(io.StringIO(self.text).readline)
        )

    def _docstring_lines(self) -> Iterator[int]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0] if node.body else None
                if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                    yield from range(first.lineno, (first.end_lineno or first.lineno) + 1)


@dataclass(frozen=True)
class House:
    """A checkout as it lies on disk."""

    root: Path

    def files(self, *rooms: str) -> list[SourceFile]:
        """Return the Python files of rooms, in order of their paths."""
        return [SourceFile(path) for room in rooms for path in sorted((self.root / room).rglob("*.py"))]

    @cached_property
    def production(self) -> list[SourceFile]:
        return self.files(*ROOMS)

    def lobby(self) -> list[str]:
        """Return the modules that lie directly in ``gateway/``, its ``__init__`` among them."""
        return sorted(path.stem for path in (self.root / "gateway").glob("*.py"))

    def circles(self, *, without: Container[str] = ()) -> list[list[str]]:
        """Return the circles of ``gateway``'s groups: sets of groups each of which reaches every other by imports.

        A group is a package directly in ``gateway/`` with all below it, or a module directly in it. Imports inside
        functions count; those for types alone do not. Groups named by ``without`` are left out with their imports.
        """
        graph: dict[str, set[str]] = defaultdict(set)
        for file in self.files("gateway"):
            group = self._group(file.path)
            if group is not None and group not in without:
                targets = {self._group_of_module(name) for name in _imported(file.tree)} - {None, group}
                graph[group] |= {target for target in targets if target is not None and target not in without}
        return [sorted(each) for each in _components(graph) if len(each) > 1]

    def shared_class_names(self) -> dict[str, list[str]]:
        """Return the names of classes that more than one production file defines, with those files."""
        places: dict[str, list[str]] = defaultdict(list)
        for file in self.production:
            names = {node.name for node in ast.walk(file.tree) if isinstance(node, ast.ClassDef)}
            for name in names:
                places[name].append(str(file.path.relative_to(self.root)))
        return {name: paths for name, paths in sorted(places.items()) if len(paths) > 1}

    def num_lines_outside_engine(self) -> int:
        return sum(file.num_lines for file in self.files(*OUTSIDE_ENGINE))

    def num_words(self) -> int:
        """Return the words of README, changelog, CONTRIBUTING and the pages, as ``wc -w`` counts them."""
        pages = [self.root / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
        pages += (self.root / "docs").rglob("*.md")
        return sum(len(page.read_text().split()) for page in pages if page.exists())

    def tests_to_code(self, room: str) -> float:
        """Return the code lines of ``tests/ROOM`` over those of the room."""
        return _num_code(self.files(f"tests/{room}")) / _num_code(self.files(room))

    def comments_per_100(self, *rooms: str) -> float:
        """Return comments per 100 lines of code."""
        files = self.files(*rooms)
        return 100 * sum(file.num_comments for file in files) / _num_code(files)

    def _group(self, path: Path) -> str | None:
        first = path.relative_to(self.root / "gateway").parts[0]
        return None if first == "__init__.py" else first.removesuffix(".py")

    def _group_of_module(self, module: str) -> str | None:
        parts = module.split(".")
        if parts[0] != "gateway" or len(parts) < 2:
            return None
        found = self.root / "gateway" / parts[1]
        return parts[1] if found.is_dir() or found.with_suffix(".py").exists() else None


def _num_code(files: Iterable[SourceFile]) -> int:
    return sum(len(file.code_lines) for file in files)


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the modules a file imports at run time, names taken from a package as modules of it."""
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, "imports are absolute here"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _components(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the strongly connected components, the largest first."""
    reach = {name: _reachable(graph, name) for name in graph}
    found: list[set[str]] = []
    for name in graph:
        if not any(name in each for each in found):
            found.append({name} | {other for other in reach[name] if name in reach.get(other, ())})
    return sorted(found, key=len, reverse=True)


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    left = list(graph[start])
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            left += graph.get(name, ())
    return seen
