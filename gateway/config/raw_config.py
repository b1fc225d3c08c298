"""The configuration before it is checked: a tree of values, each with the place it was written.

Layers, weakest first: the built-in ladder, one TOML file, the environment, the command line. Nothing here knows which
keys exist; :mod:`gateway.config.table_reader` does.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from importlib import resources
from pathlib import Path
from typing import Any

from gateway.config.errors import Problem, SettingsError, SettingsFileMalformed, SettingsFileMissing

PREFIX = "SUFFICE_"
BUILTIN_SOURCE = "built-in ladder"

# Not ADMIN: SUFFICE_ADMIN_KEY is a client's key, and no section with an underscore missing.
_SECTIONS = (
    "SERVER",
    "AUTH",
    "DATABASE",
    "REDIS",
    "LOG",
    "METRICS",
    "ROUTER",
    "CONTROL",
    "MONITOR",
    "VERIFICATION",
    "LEARNING",
    "POLICY",
)
_SECTION_KEY = re.compile(rf"({'|'.join(_SECTIONS)})_(.+)")


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value as written. ``is_text``: it came as text without quotes and takes the type its key asks for."""

    value: Any
    source: str
    is_text: bool = False


Table = dict[str, "Table | Leaf"]


def builtin_table() -> Table:
    """The shipped ladder."""
    text = resources.files("gateway.config").joinpath("builtin.toml").read_text(encoding="utf-8")
    return _table(tomllib.loads(text, parse_float=Decimal), BUILTIN_SOURCE)


def file_table(path: Path) -> Table:
    """Read one TOML file. Numbers with a point are kept exact, because some of them are money.

    Raises
    ------
    SettingsFileMissing, SettingsFileMalformed
        Cannot be opened; is not TOML.
    SettingsError
        ``tiers`` is not a list of tables with different names.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise SettingsFileMissing(path, error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise SettingsFileMalformed(path, f"not UTF-8: {error.reason} at byte {error.start}") from error
    try:
        parsed = tomllib.loads(text, parse_float=Decimal)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SettingsFileMalformed(path, str(error)) from error
    return _table(parsed, str(path))


def environment_table(environ: Mapping[str, str], below: Table) -> Table:
    """Read ``SUFFICE_SECTION__KEY`` variables.

    Names of tiers, models and policies are matched against ``below`` without regard to case and ``-`` or ``.``, which
    variable names cannot hold. A variable without ``__`` is a top-level key; those that are none belong to others,
    unless they look like a section's key with one underscore missing.
    """
    table: Table = {}
    problems = []
    for variable in sorted(name for name in environ if name.startswith(PREFIX)):
        parts = variable.removeprefix(PREFIX).split("__")
        if not all(parts):
            problems.append(Problem(variable, "expected SUFFICE_SECTION__KEY", "environment"))
        elif len(parts) > 1:
            _put(table, _spell(parts, below), Leaf(environ[variable], f"environment {variable}", is_text=True))
        elif parts[0] == "DATA_DIR":
            table["data_dir"] = Leaf(environ[variable], f"environment {variable}", is_text=True)
        elif match := _SECTION_KEY.match(parts[0]):
            meant = f"{PREFIX}{match[1]}__{match[2]}"
            problems.append(
                Problem(variable, f"sections and keys are parted by two underscores: {meant}?", "environment")
            )
    if problems:
        raise SettingsError(problems)
    return table


def override_table(overrides: Mapping[str, Any], source: str) -> Table:
    """Values by dotted path, as the command line gives them; None means not given."""
    table: Table = {}
    for path, value in overrides.items():
        if value is not None:
            _put(table, path.split("."), Leaf(value, source))
    return table


def merge(layers: Iterable[Table]) -> Table:
    """Lay tables over each other, the last strongest. Lists are replaced as a whole, tables key by key."""
    merged: Table = {}
    for layer in layers:
        for key, node in layer.items():
            below = merged.get(key)
            merged[key] = merge([below, node]) if isinstance(below, dict) and isinstance(node, dict) else node
    return merged


def _table(parsed: Mapping[str, Any], source: str) -> Table:
    table: Table = {}
    for key, value in parsed.items():
        if key == "tiers":
            table[key] = _tiers(value, source)
        else:
            table[key] = _node(value, source)
    return table


def _node(value: Any, source: str) -> Table | Leaf:
    if isinstance(value, dict):
        return {key: _node(each, source) for key, each in value.items()}
    return Leaf(value, source)


def _tiers(value: Any, source: str) -> Table:
    """``[[tiers]]`` as a table by name, in the order written: the ladder's order."""
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise SettingsError([Problem("tiers", "expected a list of tables: write [[tiers]]", source)])
    tiers: Table = {}
    for place, each in enumerate(value, start=1):
        name = each.get("name")
        if not isinstance(name, str) or not name:
            raise SettingsError([Problem(f"tiers[{place}].name", "expected a name", source)])
        if name in tiers:
            raise SettingsError([Problem(f"tiers[{place}].name", f"{name!r} is the name of an earlier tier", source)])
        tiers[name] = {key: _node(part, source) for key, part in each.items() if key != "name"}
    return tiers


def _put(table: Table, path: list[str], leaf: Leaf) -> None:
    for part in path[:-1]:
        below = table.setdefault(part, {})
        if isinstance(below, Leaf):
            below = table[part] = {}
        table = below
    table[path[-1]] = leaf


def _spell(parts: list[str], below: Table) -> list[str]:
    spelled: list[str] = []
    node: Table | Leaf = below
    for part in parts:
        known = node if isinstance(node, dict) else {}
        key = next((name for name in known if re.sub(r"[-. ]", "_", name).lower() == part.lower()), part.lower())
        spelled.append(key)
        node = known.get(key, {})
    return spelled
