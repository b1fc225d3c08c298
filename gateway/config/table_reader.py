"""Turns the raw tree into the typed configuration classes, noting every problem and where every value came from."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar, get_type_hints

from gateway.config.coercion import Mismatch, coerce, expectation, from_text
from gateway.config.errors import Problem, SettingsError
from gateway.config.raw_config import Leaf, Table

DEFAULT_SOURCE = "default"

T = TypeVar("T")


class ConfigReader:
    """Collects problems instead of stopping at the first; ``finish`` raises them together.

    Attributes
    ----------
    values : dotted path of every setting -> its typed value
    sources : dotted path of every setting -> where its value was written
    """

    def __init__(self) -> None:
        self.problems: list[Problem] = []
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
        table = self._as_table(node, path)
        given = given or {}
        hints = get_type_hints(cls)
        settable = {each.name: each for each in fields(cls) if each.name not in given}  # type: ignore[arg-type]
        self.refuse_unknown(table, settable, path)
        num_before = len(self.problems)
        chosen: dict[str, Any] = dict(given)
        for name, each in settable.items():
            self._read_field(each, table.get(name), hints[name], _join(path, name), chosen, base, base_source)
        if len(self.problems) > num_before:
            return None
        return self._construct(cls, chosen, path)

    def refuse_unknown(self, table: Table, known: Collection[str], path: str) -> None:
        """Note a problem for every key that is not known, with the nearest one that is."""
        for key, node in table.items():
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = (
                    f"; did you mean {_join(path, near[0])}?" if near else f"; known here: {', '.join(sorted(known))}"
                )
                self.problems.append(Problem(_join(path, key), f"unknown key{hint}", first_source(node)))

    def note(self, path: str, message: str) -> None:
        """Note a problem with a value that was read before."""
        self.problems.append(Problem(path, message, self.sources.get(path, DEFAULT_SOURCE)))

    def finish(self) -> None:
        """Raise what was noted.

        Raises
        ------
        SettingsError
            There was any problem.
        """
        if self.problems:
            raise SettingsError(self.problems)

    def _as_table(self, node: Table | Leaf | None, path: str) -> Table:
        if isinstance(node, Leaf):
            self.problems.append(Problem(path, f"is {node.value!r}; expected a table", node.source))
            return {}
        return node or {}

    def _read_field(
        self,
        each: Field[Any],
        node: Table | Leaf | None,
        annotation: Any,
        path: str,
        chosen: dict[str, Any],
        base: Any,
        base_source: str,
    ) -> None:
        is_table_class = hasattr(annotation, "__dataclass_fields__")
        if is_table_class:
            value = self.read(annotation, node, path, base=self._default(each, base))
            if value is None:
                return
        elif node is None:
            value = self._default(each, base)
            if value is MISSING:
                self.problems.append(Problem(path, f"missing; expected {expectation(annotation)}", "no value given"))
                return
            self.values[path] = value
            self.sources[path] = base_source
        else:
            try:
                value = _checked(node, annotation, each.metadata)
            except Mismatch as mismatch:
                message = f"is {untyped(node)!r}; expected {mismatch.expected}"
                self.problems.append(Problem(path, message, first_source(node)))
                return
            self.values[path] = value
            self.sources[path] = first_source(node)
        chosen[each.name] = value

    @staticmethod
    def _default(each: Field[Any], base: Any) -> Any:
        if base is not None and base is not MISSING:
            return getattr(base, each.name)
        if each.default_factory is not MISSING:
            return each.default_factory()
        return each.default

    def _construct(self, cls: type[T], chosen: dict[str, Any], path: str) -> T | None:
        try:
            return cls(**chosen)
        except ValueError as error:
            # Configuration classes name the field that is wrong; only the reader knows the path in front of it.
            name = getattr(error, "field_name", "")
            self.note(_join(path, name) if name else path, str(error).removeprefix(f"{name} ").rstrip("."))
            return None


def untyped(node: Table | Leaf) -> Any:
    """The bare values of a tree."""
    return node.value if isinstance(node, Leaf) else {key: untyped(each) for key, each in node.items()}


def first_source(node: Table | Leaf) -> str:
    """Where a value, or the first value of a table, was written."""
    while not isinstance(node, Leaf):
        if not node:
            return "an empty table"
        node = next(iter(node.values()))
    return node.source


def _checked(node: Table | Leaf, annotation: Any, limits: Mapping[str, Any]) -> Any:
    if isinstance(node, Leaf) and node.is_text:
        value = coerce(from_text(node.value, annotation), annotation)
    else:
        value = coerce(untyped(node), annotation)
    low, high = limits.get("at_least"), limits.get("at_most")
    if value is not None and ((low is not None and value < low) or (high is not None and value > high)):
        bounds = [f"at least {low}"] if low is not None else []
        bounds += [f"at most {high}"] if high is not None else []
        raise Mismatch(" and ".join(bounds))
    return value


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
