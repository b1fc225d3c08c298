"""Shares engines that several backends use: made by the first that starts, closed with the last that ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Engine = TypeVar("Engine")


@dataclass(slots=True)
class _SharedEngineEntry(Generic[Engine]):
    lock: threading.Lock = field(default_factory=threading.Lock)
    engine: Engine | None = None
    num_users: int = 0


class SharedEngines(Generic[Engine]):
    """Shares what is made once for a group of models. Safe from any thread."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, _SharedEngineEntry[Engine]] = {}
        self._lock = threading.Lock()

    def acquire(self, group: Hashable, make: Callable[[], Engine]) -> Engine:
        """Take a use of the engine of a group, waiting for whoever makes it; raises what ``make`` raises."""
        with self._lock:
            entry = self._entries.setdefault(group, _SharedEngineEntry())
        # Held while the engine is made, which takes long: others wait for it and do not make a second.
        with entry.lock:
            if entry.engine is None:
                entry.engine = make()
            entry.num_users += 1
            return entry.engine

    def release(self, group: Hashable, close: Callable[[Engine], None]) -> None:
        """Give up one use; with the last one the engine is closed. Whoever starts meanwhile waits and makes another."""
        with self._lock:
            entry = self._entries[group]
        with entry.lock:
            entry.num_users -= 1
            engine = entry.engine
            if not entry.num_users and engine is not None:
                entry.engine = None
                close(engine)
