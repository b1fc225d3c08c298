"""Defines everything that reading the configuration can raise.

::

    SettingsError              one or several problems, each with its key path, its place, and what was expected
    ├── SettingsFileMissing    the named file cannot be opened
    └── SettingsFileMalformed  the file is not TOML; carries line and column in the message
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SettingsProblem:
    """Names one thing that is wrong with one key: ``path`` is dotted, ``source`` says where the value was written."""

    path: str
    message: str
    source: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message} ({self.source})" if self.path else f"{self.message} ({self.source})"


class SettingsError(Exception):
    """The configuration cannot be used; ``problems`` lists all that is wrong, not only the first."""

    def __init__(self, problems: Sequence[SettingsProblem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


class SettingsFileMissing(SettingsError):
    """The file named cannot be opened."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__([SettingsProblem("", f"cannot read the configuration file: {reason}", str(path))])


class SettingsFileMalformed(SettingsError):
    """The file is not TOML."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__([SettingsProblem("", f"not a TOML file: {reason}", str(path))])
