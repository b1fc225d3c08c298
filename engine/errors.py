"""Everything the engine can raise.

::

    EngineError
    └── LoadError                  a checkpoint could not become a model; carries ``path``
        ├── CheckpointNotFound     no such folder, hub id or file
        ├── UnsupportedModel       architecture, activation, RoPE type … that no code here computes
        ├── UnsupportedQuantization  method, bits or layout; carries ``method``
        ├── CheckpointCorrupt      unreadable JSON, truncated or damaged weight file
        ├── TensorMismatch         a missing, unexpected or misshapen tensor; carries ``tensor``
        └── OutOfMemoryPlan        weights or the KV pool do not fit; carries the arithmetic
"""

from __future__ import annotations

from pathlib import Path


class EngineError(Exception):
    """Base of the tree."""


class LoadError(EngineError):
    """A checkpoint could not become a model."""

    def __init__(self, message: str, *, path: str | Path | None = None) -> None:
        super().__init__(message)
        self.path = None if path is None else str(path)


class CheckpointNotFound(LoadError):
    pass


class UnsupportedModel(LoadError):
    pass


class UnsupportedQuantization(LoadError):
    def __init__(self, message: str, *, method: str, path: str | Path | None = None) -> None:
        super().__init__(message, path=path)
        self.method = method


class CheckpointCorrupt(LoadError):
    pass


class TensorMismatch(LoadError):
    def __init__(self, message: str, *, tensor: str, path: str | Path | None = None) -> None:
        super().__init__(message, path=path)
        self.tensor = tensor


class OutOfMemoryPlan(LoadError):
    """The memory asked for is not there; ``needed_bytes`` and ``free_bytes`` say by how much."""

    def __init__(self, message: str, *, needed_bytes: int, free_bytes: int, path: str | Path | None = None) -> None:
        super().__init__(message, path=path)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
