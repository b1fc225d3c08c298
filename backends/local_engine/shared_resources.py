"""Shares what is costly to make among its users: made for the first, closed with the last."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Resource = TypeVar("Resource")


@dataclass(slots=True)
class _SharedEntry(Generic[Resource]):
    lock: threading.Lock = field(default_factory=threading.Lock)
    resource: Resource | None = None
    num_users: int = 0


class SharedResources(Generic[Resource]):
    """Shares engines, or checkpoints, by key. Safe from any thread."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, _SharedEntry[Resource]] = {}
        self._lock = threading.Lock()

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is used by anybody; what could not be made counts for nothing."""
        with self._lock:
            return not any(entry.num_users for entry in self._entries.values())

    def acquire(self, key: Hashable, make: Callable[[], Resource]) -> Resource:
        """Take one use of the resource of a key, waiting for whoever makes it; raises what ``make`` raises."""
        with self._lock:
            entry = self._entries.setdefault(key, _SharedEntry())
        # Held while the resource is made, which takes long: others wait for it and do not make a second.
        with entry.lock:
            if entry.resource is None:
                entry.resource = make()
            entry.num_users += 1
            return entry.resource

    def release(self, key: Hashable, close: Callable[[Resource], None]) -> None:
        """Give up one use; the last one closes the resource. Whoever starts meanwhile waits and makes another."""
        with self._lock:
            entry = self._entries[key]
        with entry.lock:
            entry.num_users -= 1
            resource = entry.resource
            if not entry.num_users and resource is not None:
                entry.resource = None
                close(resource)
