"""Bounds the bytes of request bodies that are held at once: of all requests together, and of each key.

A body counts from before its first byte is read, with the length it announces, to the end of its request: also while it
waits for a place, and while it is answered. One that announces no length counts as it comes.
"""

from __future__ import annotations

from collections.abc import Hashable

from gateway.errors import BodiesFull


class BodyBudget:
    """Holds the sums.

    Parameters
    ----------
    max_bytes, max_bytes_per_key : limits
    """

    def __init__(self, max_bytes: int, max_bytes_per_key: int) -> None:
        self._max_bytes = max_bytes
        self._max_bytes_per_key = max_bytes_per_key
        self._by_key: dict[Hashable, int] = {}
        self.num_bytes = 0

    def share(self, key: Hashable) -> BodyShare:
        """Return the part of one request, empty so far."""
        return BodyShare(self, key)

    def take(self, key: Hashable, num_bytes: int) -> None:
        """Count bytes that are about to be read.

        Raises
        ------
        BodiesFull
        """
        of_key = self._by_key.get(key, 0) + num_bytes
        if of_key > self._max_bytes_per_key:
            raise BodiesFull(of_key - num_bytes, self._max_bytes_per_key, is_of_key=True)
        if self.num_bytes + num_bytes > self._max_bytes:
            raise BodiesFull(self.num_bytes, self._max_bytes, is_of_key=False)
        self._by_key[key] = of_key
        self.num_bytes += num_bytes

    def give_back(self, key: Hashable, num_bytes: int) -> None:
        """Count them no longer."""
        left = self._by_key[key] - num_bytes
        if left:
            self._by_key[key] = left
        else:
            del self._by_key[key]
        self.num_bytes -= num_bytes


class BodyShare:
    """Holds what one request counts for.

    Attributes
    ----------
    num_bytes : counted
    """

    __slots__ = ("_budget", "_key", "num_bytes")

    def __init__(self, budget: BodyBudget, key: Hashable) -> None:
        self._budget = budget
        self._key = key
        self.num_bytes = 0

    def grow_to(self, num_bytes: int) -> None:
        """Count that many bytes; fewer than are counted already change nothing. Raises ``BodiesFull``."""
        if num_bytes > self.num_bytes:
            self._budget.take(self._key, num_bytes - self.num_bytes)
            self.num_bytes = num_bytes

    def close(self) -> None:
        """Count nothing any more; idempotent."""
        if self.num_bytes:
            self._budget.give_back(self._key, self.num_bytes)
            self.num_bytes = 0
