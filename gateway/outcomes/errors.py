"""Errors of collecting outcomes.

::

    OutcomeError
    ├── PromptFileError    a line of the prompt file cannot be used; names file and line
    └── CollectionError    the record of an earlier run does not fit, or a tier gave no answers
"""

from __future__ import annotations

from pathlib import Path


class OutcomeError(Exception):
    """Base of the tree."""


class PromptFileError(OutcomeError):
    def __init__(self, path: Path, line: int | None, problem: str) -> None:
        where = f"{path}, line {line}" if line is not None else str(path)
        super().__init__(f"{where}: {problem}")
        self.path = path
        self.line = line


class CollectionError(OutcomeError):
    pass
