"""Lists the tests that name a finding of the reviews of security and of faults.

    python -m tests.house.review_table

A test names what it keeps closed in its docstring, or its file's: ``(security review H6, H7)``, ``(fault review S2)``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
_NAMED = re.compile(r"review ((?:[HMLS]\d+(?:, | and )?)+)")
_NUMBER = re.compile(r"[HMLS]\d+")
# H4 and H5 belong to the certificate, M10 to conversations.
_ELSEWHERE = {"H4", "H5", "M10"}
FINDINGS = [
    name
    for letter, count in (("H", 8), ("M", 16), ("L", 13), ("S", 9))
    for name in (f"{letter}{number}" for number in range(1, count + 1))
    if name not in _ELSEWHERE
]


def naming_tests() -> dict[str, list[str]]:
    """Return every finding -> the tests that name it, or the file where all of its tests do."""
    found: dict[str, list[str]] = {name: [] for name in FINDINGS}
    for path in sorted(TESTS.rglob("test_*.py")):
        for place, docstring in _docstrings(path):
            for name in dict.fromkeys(_named(docstring)):
                if place not in found.setdefault(name, []):
                    found[name].append(place)
    return found


def _docstrings(path: Path) -> Iterator[tuple[str, str]]:
    tree = ast.parse(path.read_text())
    yield path.relative_to(TESTS).as_posix(), ast.get_docstring(tree) or ""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, ast.get_docstring(node) or ""


def _named(docstring: str) -> list[str]:
    return [number for match in _NAMED.finditer(docstring) for number in _NUMBER.findall(match[1])]


if __name__ == "__main__":
    for finding, tests in naming_tests().items():
        print(f"{finding:4} {', '.join(tests)}")
