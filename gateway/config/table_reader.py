"""Turns the raw tree into the typed configuration classes, noting every problem and where every value came from."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING
from functools import lru_cache
from typing import Any, TypeVar, get_type_hints

from gateway.config.errors import SettingsError, SettingsProblem
from gateway.config.raw_config import Leaf, Table
from gateway.config.value_reader import Mismatch, convert, expectation, parse_text

DEFAULT_SOURCE = "default"
_NO_LIMITS: Mapping[str, Any] = {}

T = TypeVar("T")


class ConfigReader:
    """Collects problems instead of stopping at the first; ``finish`` raises them together.

    Attributes
    ----------
    values : dotted path of every setting -> its typed value
    sources : dotted path of every setting -> where its value was written
    """

    def __init__(self) -> None:
        self.problems: list[SettingsProblem] = []
        self.values: dict[str, Any] = {}
        self.sources: dict[str, str] = {}

    def read(
        self,
        cls: type[T],
        node: Table | Leaf | None,
        path: str,
        *,
        given: Mapping[str, Any] | None = None,
        base: T | None = None,
        base_source: str = DEFAULT_SOURCE,
    ) -> T | None:
        """Build one configuration class from one table.

        Parameters
        ----------
        cls : a frozen dataclass; its fields are the keys that may be written
        node : the table, None when it was not written
        path : dotted path of the table
        given : fields that are not the writer's to set, such as a tier's place
        base : an instance whose values stand where the table says nothing, in place of the class's defaults
        base_source : what such a value's source is called

        Returns
        -------
        The instance, or None when there were problems.
        """
        if isinstance(node, Leaf):
            self.refuse(path, f"is {_shown(node)}; expected a table", node)
            return None
        table, chosen, num_before = node or {}, dict(given or {}), len(self.problems)
        settable = {name: each for name, each in declared_fields(cls).items() if name not in chosen}  # type: ignore[arg-type]
        self.refuse_unknown(table, settable, path)
        for name, (field, annotation) in settable.items():
            default, where = _default(field, base), join(path, name)
            if dataclasses.is_dataclass(annotation):
                chosen[name] = self.read(annotation, table.get(name), where, base=default)  # type: ignore[arg-type]
            else:
                chosen[name] = self.read_value(
                    annotation, table.get(name), where, default, limits=field.metadata, default_source=base_source
                )
        return self._construct(cls, chosen, path) if len(self.problems) == num_before else None

    def read_value(
        self,
        annotation: Any,
        node: Table | Leaf | None,
        path: str,
        default: Any,
        *,
        limits: Mapping[str, Any] = _NO_LIMITS,
        default_source: str = DEFAULT_SOURCE,
    ) -> Any:
        """Read one value as its declared type and keep it with its source; return the default where that fails."""
        if node is None:
            if default is MISSING:
                self.refuse(path, f"missing; expected {expectation(annotation)}")
            else:
                self.keep(path, default, default_source)
            return default
        try:
            value = _convert(node, annotation)
            _check_limits(value, limits)
        except Mismatch as mismatch:
            self.refuse(path, f"is {_shown(node)}; expected {mismatch.expected}", node)
            return default
        self.keep(path, value, source_of(node))
        return value

    def named_tables(self, node: Table | Leaf | None, path: str) -> Iterator[tuple[str, Table]]:
        """Yield the tables of a table whose keys are names; what is no table is refused."""
        for name, each in (node if isinstance(node, dict) else {"": node}).items():
            if isinstance(each, dict):
                yield name, each
            elif each is not None:
                self.refuse(join(path, name), f"is {_shown(each)}; expected a table", each)

    def keep(self, path: str, value: Any, source: str) -> None:
        """Keep a setting's value and where it was written."""
        self.values[path], self.sources[path] = value, source

    def refuse(self, path: str, message: str, node: Table | Leaf | None = None) -> None:
        """Note a problem with what a tree holds at ``path``; None where it holds nothing."""
        self.problems.append(SettingsProblem(path, message, "no value given" if node is None else source_of(node)))

    def refuse_unknown(self, table: Table, known: Collection[str], path: str) -> None:
        """Note a problem for every key that is not known, with the nearest one that is."""
        for key in [each for each in table if each not in known]:
            # Imported where it is needed: most configurations have no such key.
            from difflib import get_close_matches

            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {join(path, near[0])}?" if near else f"known here: {', '.join(sorted(known))}"
            self.refuse(join(path, key), f"unknown key; {hint}", table[key])

    def note(self, path: str, message: str) -> None:
        """Note a problem with a value that was kept before: its source is known."""
        self.problems.append(SettingsProblem(path, message, self.sources.get(path, DEFAULT_SOURCE)))

    def finish(self) -> None:
        """Raise what was noted.

        Raises
        ------
        SettingsError
            There was any problem.
        """
        if self.problems:
            raise SettingsError(self.problems)

    def _construct(self, cls: type[T], chosen: dict[str, Any], path: str) -> T | None:
        try:
            return cls(**chosen)
        except ValueError as error:
            # Configuration classes name the field that is wrong; only the reader knows the path in front of it.
            name = getattr(error, "field_name", "")
            self.note(join(path, name), str(error).removeprefix(f"{name} ").rstrip("."))
            return None


# Types are evaluated from text, which takes longer than reading a table; a ladder reads some classes often.
@lru_cache
def declared_fields(cls: type[Any]) -> Mapping[str, tuple[dataclasses.Field[Any], Any]]:
    """Return the fields of a configuration class by name, each with its type."""
    hints = get_type_hints(cls)
    return {each.name: (each, hints[each.name]) for each in dataclasses.fields(cls)}


def source_of(node: Table | Leaf) -> str:
    """Return where a value, or the first value of a table, was written."""
    while not isinstance(node, Leaf):
        if not node:
            return "an empty table"
        node = next(iter(node.values()))
    return node.source


def join(path: str, name: str) -> str:
    """Return the dotted path of a key below ``path``."""
    return f"{path}.{name}" if path and name else path or name


def _default(field: dataclasses.Field[Any], base: Any) -> Any:
    if base is not None and base is not MISSING:
        return getattr(base, field.name)
    return field.default if field.default_factory is MISSING else field.default_factory()


def _convert(node: Table | Leaf, annotation: Any) -> Any:
    if isinstance(node, Leaf) and node.is_text:
        return convert(parse_text(node.value, annotation), annotation)
    return convert(_untyped(node), annotation)


def _untyped(node: Table | Leaf) -> Any:
    return node.value if isinstance(node, Leaf) else {key: _untyped(each) for key, each in node.items()}


def _shown(node: Table | Leaf) -> str:
    # A number with a point is kept as a Decimal, which is no way to write one.
    return re.sub(r"Decimal\('([^']*)'\)", r"\1", repr(_untyped(node)))


def _check_limits(value: Any, limits: Mapping[str, Any]) -> None:
    low, high = limits.get("at_least"), limits.get("at_most")
    if value is not None and ((low is not None and value < low) or (high is not None and value > high)):
        bounds = {"at least": low, "at most": high}
        raise Mismatch(" and ".join(f"{words} {bound}" for words, bound in bounds.items() if bound is not None))
