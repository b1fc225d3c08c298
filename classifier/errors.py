"""Declares everything the classifier can raise.

::

    ClassifierError
    ├── ArtifactError           a router file that cannot be used; carries its path   (keep the one in use)
    │   ├── ArtifactNotFound    no such file
    │   ├── ArtifactCorrupt     truncated, altered, or not a router at all
    │   └── ArtifactUnsupported sound, but of a format or feature schema this version does not read
    ├── TrainingError           the table cannot carry a fit: too few rows, one class only, shapes disagree
    └── EmbeddingError          the named sentence-embedding source cannot be had, or gave other shapes than promised
"""

from __future__ import annotations

from pathlib import Path


class ClassifierError(Exception):
    """Stands at the base of the tree."""


class ArtifactError(ClassifierError):
    """Says that a router file cannot be used."""

    def __init__(self, path: Path | str, problem: str) -> None:
        super().__init__(f"Router artifact {str(path)!r}: {problem}")
        self.path = Path(path)
        self.problem = problem


class ArtifactNotFound(ArtifactError):
    pass


class ArtifactCorrupt(ArtifactError):
    pass


class ArtifactUnsupported(ArtifactError):
    pass


class TrainingError(ClassifierError):
    pass


class EmbeddingError(ClassifierError):
    pass
