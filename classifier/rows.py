"""Gives tables of columns one base: a table is declared by its fields, and rows are taken field by field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Index = Sequence[int] | NDArray[np.int64] | NDArray[np.bool_]
"""Row numbers in any order, or a mask of all rows."""

WHOLE: Mapping[str, bool] = MappingProxyType({"whole": True})
"""Marks a field that speaks of the table as a whole: ``window: str = field(metadata=WHOLE)``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Holds rows by column: every field that is not marked :data:`WHOLE` has one entry a row.

    A column is a numpy array (rows on its first axis), a tuple, another table (anything with ``take`` and ``join``), or
    None where the table as a whole lacks it. Subclasses are frozen, and built by keyword: two columns of one type
    cannot be confused by their order.
    """

    def __len__(self) -> int:
        for name in _columns(type(self)):
            column = getattr(self, name)
            if column is not None:
                return len(column)
        return 0

    def take(self, rows: Index) -> Self:
        """Return some of the rows, in the given order."""
        places = np.asarray(rows, dtype=None if len(rows) else np.int64)
        if places.dtype == np.bool_:
            places = np.flatnonzero(places)
        return replace(self, **{name: _taken(getattr(self, name), places) for name in _columns(type(self))})

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Return the rows of all parts, one part after the other; what is said of the whole is the first part's."""
        columns = {name: _joined([getattr(part, name) for part in parts]) for name in _columns(cls)}
        return replace(parts[0], **columns)


def _columns(table: type[Rows]) -> tuple[str, ...]:
    return tuple(each.name for each in fields(table) if "whole" not in each.metadata)


def _taken(column: Any, places: Ints) -> Any:
    if column is None:
        return None
    if isinstance(column, np.ndarray):
        return column[places]
    if isinstance(column, tuple):
        return tuple([column[place] for place in places.tolist()])
    return column.take(places)


def _joined(columns: Sequence[Any]) -> Any:
    first = columns[0]
    if first is None:
        return None
    if isinstance(first, np.ndarray):
        return np.concatenate(columns)
    if isinstance(first, tuple):
        return tuple(entry for column in columns for entry in column)
    return type(first).join(columns)
