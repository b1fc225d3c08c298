"""Says which files are mutated by default, and which tests are asked about a file, nearest first."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

# Where a fault costs money or safety. `store/tables.py` only declares: a test holds it against the migrations.
DEFAULT_PATHS = ("policies", "gateway/access", "gateway/store", "engine/scheduler.py", "engine/blocks.py")
_LEFT_OUT = {"gateway/store/tables.py"}
# All tests of the engine are too many to ask about one survivor.
_ROOM_TESTS = {
    "engine": ("tests/engine/test_engine.py", "tests/engine/test_prediction.py", "tests/engine/test_text.py")
}


def mutated_files(root: Path, paths: tuple[str, ...]) -> list[str]:
    """Return the Python files under some paths, relative to the tree's root."""
    found: list[Path] = []
    for path in paths:
        place = root / path
        if not place.exists():
            raise FileNotFoundError(f"{path} is not in {root}.")
        found += sorted(place.rglob("*.py")) if place.is_dir() else [place]
    names = dict.fromkeys(file.relative_to(root).as_posix() for file in found)
    return [name for name in names if name not in _LEFT_OUT]


def sets_of_tests(root: Path, path: str) -> list[tuple[str, ...]]:
    """Return sets of test files, each without those before it.

    First the one that bears the file's name, then those of its room that import its module, then the rest of the room,
    then all others that import the module.
    """
    file = Path(path)
    room = root / "tests" / file.parent
    module = path.removesuffix(".py").replace("/", ".")
    importing = [test for test in _test_files(root / "tests") if module in _imports(test)]
    rest = [root / test for test in _ROOM_TESTS.get(file.parent.as_posix(), ())] or _test_files(room)
    named = [test for test in _test_files(room) if test.name == f"test_{file.stem}.py"]
    seen: set[Path] = set()
    sets: list[tuple[str, ...]] = []
    for group in (named, [test for test in importing if room in test.parents], rest, importing):
        fresh = dict.fromkeys(test for test in group if test not in seen)
        seen.update(fresh)
        if fresh:
            sets.append(tuple(test.relative_to(root).as_posix() for test in fresh))
    return sets


def _test_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("test_*.py"))


@cache
def _imports(test: Path) -> frozenset[str]:
    """Return the modules a test imports, by their own name or out of their package."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(test.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return frozenset(names)
