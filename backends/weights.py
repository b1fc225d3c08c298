"""Checkpoints in memory: each loaded once, however many tiers and drafters use it, and the GPU's stepping thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from backends.builtin.paths import model_dir
from backends.config import CpuCompute, LoadFormat
from backends.errors import ModelLoadError
from engine.errors import LoadError, TokenizerError
from engine.load.model import load_model
from engine.load.source import resolve_checkpoint
from engine.models.decoder import DecoderModel
from engine.parallel.launch import load_parallel
from engine.parallel.model import ParallelModel
from engine.tokenize import Tokenizer

Progress = Callable[[str, float], None]
"""Called with a model's path and the share of it that is loaded, from whichever thread loads."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Weights and tokenizer of one folder."""

    folder: Path
    model: DecoderModel | ParallelModel
    tokenizer: Tokenizer


@dataclass(slots=True)
class _Entry:
    lock: threading.Lock = field(default_factory=threading.Lock)
    checkpoint: Checkpoint | None = None
    num_users: int = 0


class WeightPool:
    """Shares checkpoints between backends.

    Engines share weights but no thread. On a CPU three tiers busy on two cores finished 15 to 50 % sooner so than on
    one thread for all, and a small tier did not wait for a large one's steps; on a GPU each has its own stream.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[str | int, ...], _Entry] = {}
        self._lock = threading.Lock()

    def acquire(
        self,
        path: str,
        *,
        dtype: str,
        device: str,
        cpu_compute: CpuCompute = "auto",
        load_format: LoadFormat = "auto",
        tensor_parallel: int = 1,
        progress: Progress | None = None,
    ) -> Checkpoint:
        """Load a checkpoint, or wait for whoever is loading it. Each call is one use, given back by :meth:`release`.

        Raises
        ------
        ModelLoadError
            Naming the file at fault.
        """
        with self._lock:
            key = (path, dtype, device, cpu_compute, load_format, tensor_parallel)
            entry = self._entries.setdefault(key, _Entry())
        with entry.lock:
            if entry.checkpoint is None:
                entry.checkpoint = load_checkpoint(
                    path,
                    dtype=dtype,
                    device=device,
                    cpu_compute=cpu_compute,
                    load_format=load_format,
                    tensor_parallel=tensor_parallel,
                    progress=progress,
                )
            entry.num_users += 1
            return entry.checkpoint

    def release(self, checkpoint: Checkpoint) -> None:
        """Give up one use; the last one frees the weights."""
        with self._lock:
            for key, entry in list(self._entries.items()):
                if entry.checkpoint is checkpoint:
                    entry.num_users -= 1
                    if not entry.num_users:
                        del self._entries[key]
                        if isinstance(checkpoint.model, ParallelModel):
                            checkpoint.model.close()


def load_checkpoint(
    path: str,
    *,
    dtype: str,
    device: str,
    cpu_compute: CpuCompute = "auto",
    load_format: LoadFormat = "auto",
    tensor_parallel: int = 1,
    progress: Progress | None = None,
) -> Checkpoint:
    """Read weights and tokenizer of a folder, a hub id or ``builtin:tierN``; options as in ``engine.load.model``.

    Raises
    ------
    ModelLoadError
    """
    report = None if progress is None else partial(progress, path)
    try:
        folder = model_dir(_builtin_tier(path)) if path.startswith("builtin:") else resolve_checkpoint(path)
        model: DecoderModel | ParallelModel
        if tensor_parallel > 1:
            devices = _devices(device, tensor_parallel)
            model = load_parallel(folder, devices, dtype=dtype, load_format=load_format, progress=report)
        else:
            model = load_model(
                folder, dtype=dtype, device=device, cpu_compute=cpu_compute, load_format=load_format, progress=report
            )
        return Checkpoint(folder, model, Tokenizer(folder))
    except (LoadError, TokenizerError, OSError) as error:
        raise ModelLoadError(f"{path} could not be loaded: {error}") from error


def _devices(first: str, count: int) -> list[str]:
    """``count`` devices from ``first`` on; a CPU is taken that often."""
    kind, _, index = first.partition(":")
    return [first] * count if kind == "cpu" else [f"{kind}:{int(index or 0) + i}" for i in range(count)]


def _builtin_tier(path: str) -> int:
    name = path.removeprefix("builtin:tier")
    if name not in ("1", "2", "3", "4"):
        raise ModelLoadError(f"There is no {path!r}; the built-in models are builtin:tier1 to builtin:tier4.")
    return int(name)
