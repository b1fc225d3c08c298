"""Values of the control plane as JSON keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import msgspec


class StoredValue:
    """A dataclass whose JSON has its fields' names; fields that a stored value lacks have their defaults."""

    __slots__ = ()

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """Return what :meth:`as_dict` wrote.

        Raises
        ------
        msgspec.ValidationError
            A field is missing or of another type.
        """
        return msgspec.convert(stored, cls)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found
