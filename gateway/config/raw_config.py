"""Holds the configuration before it is checked: a tree of values, each with the place it was written.

Layers, weakest first: the built-in ladder, one TOML file, the environment, the command line. Nothing here knows which
keys exist; :mod:`gateway.config.table_reader` does.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from gateway.config.errors import SettingsError, SettingsFileMalformed, SettingsFileMissing, SettingsProblem

PREFIX = "SUFFICE_"
BUILTIN_SOURCE = "built-in ladder"


@dataclass(frozen=True, slots=True)
class Leaf:
    """Holds a value as written. ``is_text``: it came as text without quotes and takes the type its key asks for."""

    value: Any
    source: str
    is_text: bool = False


Table = dict[str, "Table | Leaf"]


def builtin_table() -> Table:
    """Return the shipped ladder."""
    # Not importlib.resources, whose import takes longer than the reading; the package is never installed zipped.
    text = Path(__file__).with_name("builtin.toml").read_text(encoding="utf-8")
    return _layer(tomllib.loads(text, parse_float=Decimal), BUILTIN_SOURCE)


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
    return _layer(parsed, str(path))


def environment_table(environ: Mapping[str, str], below: Table, sections: Iterable[str]) -> Table:
    """Read ``SUFFICE_SECTION__KEY`` variables.

    Names of tiers, models and policies are matched against ``below`` without regard to case and ``-`` or ``.``, which
    variable names cannot hold. A variable without ``__`` is a top-level key; those that are none belong to others,
    unless they look like a key of one of ``sections`` with one underscore missing.

    Raises
    ------
    SettingsError
        A variable's name is none; all such names at once.
    """
    section_key = re.compile(rf"({'|'.join(sections).upper()})_(.+)")
    table: Table = {}
    problems = []
    for variable in sorted(name for name in environ if name.startswith(PREFIX)):
        parts = variable.removeprefix(PREFIX).split("__")
        if not all(parts):
            problems.append(SettingsProblem(variable, "expected SUFFICE_SECTION__KEY", "environment"))
        elif len(parts) > 1:
            _put(table, _spell(parts, below), Leaf(environ[variable], f"environment {variable}", is_text=True))
        elif parts[0] == "DATA_DIR":
            table["data_dir"] = Leaf(environ[variable], f"environment {variable}", is_text=True)
        elif match := section_key.match(parts[0]):
            meant = f"{PREFIX}{match[1]}__{match[2]}"
            problems.append(
                SettingsProblem(variable, f"sections and keys are parted by two underscores: {meant}?", "environment")
            )
    if problems:
        raise SettingsError(problems)
    return table


def override_table(overrides: Mapping[str, Any], source: str) -> Table:
    """Return values by dotted path, as the command line gives them, as a tree; None means not given."""
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


def tree(value: Any, source: str) -> Table | Leaf:
    """Return parsed TOML or JSON as a tree whose every value names one source."""
    if isinstance(value, Mapping):
        return {key: tree(each, source) for key, each in value.items()}
    return Leaf(value, source)


def _layer(parsed: Mapping[str, Any], source: str) -> Table:
    return {key: _tiers(value, source) if key == "tiers" else tree(value, source) for key, value in parsed.items()}


def _tiers(value: Any, source: str) -> Table:
    """Return ``[[tiers]]`` as a table by name, in the order written: the ladder's order."""
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise SettingsError([SettingsProblem("tiers", "expected a list of tables: write [[tiers]]", source)])
    tiers: Table = {}
    for place, each in enumerate(value, start=1):
        name = each.get("name")
        if not isinstance(name, str) or not name:
            raise SettingsError([SettingsProblem(f"tiers[{place}].name", "expected a name", source)])
        if name in tiers:
            raise SettingsError(
                [SettingsProblem(f"tiers[{place}].name", f"{name!r} is the name of an earlier tier", source)]
            )
        tiers[name] = {key: tree(part, source) for key, part in each.items() if key != "name"}
    return tiers


def _put(table: Table, path: list[str], leaf: Leaf) -> None:
    for part in path[:-1]:
        below = table.setdefault(part, {})
        if isinstance(below, Leaf):
            # Sorted variables put a table's own value before its keys'; what is said in more detail holds.
            below = table[part] = {}
        table = below
    table[path[-1]] = leaf


def _spell(parts: list[str], below: Table) -> list[str]:
    """Return a variable's parts as the names below it are written; new names are taken in lower case."""
    spelled: list[str] = []
    node: Table | Leaf = below
    for part in parts:
        known = node if isinstance(node, dict) else {}
        key = next((name for name in known if re.sub(r"[-. ]", "_", name).lower() == part.lower()), part.lower())
        spelled.append(key)
        node = known.get(key, {})
    return spelled
