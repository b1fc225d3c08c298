"""Shares among models: checkpoints, each loaded once, engines, a device's memory for KV, and the thread of a CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from backends.builtin.paths import model_dir
from backends.config import Activations, CpuCompute, LoadFormat, device_key
from backends.errors import ModelLoadError
from backends.local_engine.shared_resources import SharedResources
from engine.arena import Arena
from engine.device.device_share import DeviceShare
from engine.errors import LoadError, TokenizerError
from engine.load.model import load_model
from engine.load.source import resolve_checkpoint
from engine.models.decoder import DecoderModel
from engine.parallel.model import ParallelModel
from engine.parallel.rank_launcher import load_parallel
from engine.step_loop import StepLoop
from engine.tokenizer import Tokenizer

Progress = Callable[[str, float], None]
"""Called with a model's path and the share of it that is loaded, from whichever thread loads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Names a checkpoint and how it is loaded: two that are equal are one in memory.

    Parameters
    ----------
    path : a folder, a hub id or ``builtin:tierN``
    tensor_parallel : devices it is cut over, from ``device`` on

    The others are those of ``engine.load.model``.
    """

    path: str
    dtype: str
    device: str
    cpu_compute: CpuCompute = "auto"
    activations: Activations = "auto"
    load_format: LoadFormat = "auto"
    tensor_parallel: int = 1


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Holds the weights and tokenizer of one folder, and how they were asked for."""

    options: LoadOptions
    folder: Path
    model: DecoderModel | ParallelModel
    tokenizer: Tokenizer


class WeightPool:
    """Shares checkpoints between backends, and on a CPU the thread on which their engines step.

    On a GPU each engine has a thread and a stream of its own. On a CPU they take turns on one thread: what arrives for
    a small tier while a large one steps is then served together, and nobody fights for the interpreter. Sixteen routed
    requests at once on two cores took 29 ms of CPU time each so, and 37 ms with a thread for each of the four engines.

    Parameters
    ----------
    kv_bytes : device's name → what its engines' keys and values may take together

    Attributes
    ----------
    engines : those that several models use
    """

    def __init__(self, kv_bytes: Mapping[str, int] = MappingProxyType({})) -> None:
        self._kv_bytes = {device_key(name): num_bytes for name, num_bytes in kv_bytes.items()}
        self._arenas: dict[str, Arena] = {}
        self._shares: dict[str, DeviceShare] = {}
        self._loop: StepLoop | None = None
        self.engines: SharedResources[Any] = SharedResources()
        self._checkpoints: SharedResources[Checkpoint] = SharedResources()
        self._lock = threading.Lock()

    def acquire(self, options: LoadOptions, progress: Progress | None = None) -> Checkpoint:
        """Load a checkpoint, or wait for whoever is loading it. Each call is one use, given back by :meth:`release`.

        Raises
        ------
        ModelLoadError
            Naming the file at fault.
        """
        return self._checkpoints.acquire(options, partial(load_checkpoint, options, progress))

    def loop_for(self, device: str, threads: int) -> StepLoop | None:
        """Return the shared thread of the engines on a CPU, made with the first; None where an engine has its own.

        Parameters
        ----------
        threads : CPU threads that one tensor operation may use; the first engine decides for all
        """
        if torch.device(device).type != "cpu":
            return None
        with self._lock:
            if self._loop is None:
                self._loop = StepLoop("engines", on_start=partial(torch.set_num_threads, threads))
            return self._loop

    def share_for(self, device: str) -> DeviceShare | None:
        """Return where a GPU's engines make room for one another; None on a CPU, where they take turns."""
        key = device_key(device)
        if torch.device(device).type == "cpu" or key is None:
            return None
        with self._lock:
            return self._shares.setdefault(key, DeviceShare())

    def arena_for(self, device: str) -> Arena | None:
        """Return the memory that a device's engines share, taken with the first; None where each has its own.

        Raises
        ------
        OutOfMemoryPlan
            The device has not so much left.
        """
        key = device_key(device)
        with self._lock:
            if key not in self._kv_bytes or key is None:
                return None
            if key not in self._arenas:
                self._arenas[key] = Arena(self._kv_bytes[key], device)
            return self._arenas[key]

    def release(self, checkpoint: Checkpoint) -> None:
        """Give up one use; the last one frees the weights, and the last of all what the engines shared."""
        self._checkpoints.release(checkpoint.options, _close_checkpoint)
        with self._lock:
            # The engines of another checkpoint step on the shared thread.
            if not self._checkpoints.is_idle:
                return
            loop, self._loop = self._loop, None
            self._arenas.clear()
        if loop is not None:
            loop.close()


def _close_checkpoint(checkpoint: Checkpoint) -> None:
    # What one process holds is freed with its last reference; further GPUs have processes of their own.
    if isinstance(checkpoint.model, ParallelModel):
        checkpoint.model.close()


def load_checkpoint(options: LoadOptions, progress: Progress | None = None) -> Checkpoint:
    """Read weights and tokenizer.

    Raises
    ------
    ModelLoadError
    """
    path = options.path
    report = None if progress is None else partial(progress, path)
    try:
        folder = model_dir(_builtin_tier(path)) if path.startswith("builtin:") else resolve_checkpoint(path)
        model: DecoderModel | ParallelModel
        if options.tensor_parallel > 1:
            devices = _devices(options.device, options.tensor_parallel)
            model = load_parallel(
                folder, devices, dtype=options.dtype, load_format=options.load_format, progress=report
            )
        else:
            model = load_model(
                folder,
                dtype=options.dtype,
                device=options.device,
                cpu_compute=options.cpu_compute,
                activations=options.activations,
                load_format=options.load_format,
                progress=report,
            )
        return Checkpoint(options, folder, model, Tokenizer(folder))
    except (LoadError, TokenizerError, OSError) as error:
        raise ModelLoadError(f"{path} could not be loaded: {error}") from error


def _devices(first: str, count: int) -> list[str]:
    """Return ``count`` devices from ``first`` on; a CPU is taken that often."""
    kind, _, index = first.partition(":")
    return [first] * count if kind == "cpu" else [f"{kind}:{int(index or 0) + i}" for i in range(count)]


def _builtin_tier(path: str) -> int:
    name = path.removeprefix("builtin:tier")
    if name not in ("1", "2", "3", "4"):
        raise ModelLoadError(f"There is no {path!r}; the built-in models are builtin:tier1 to builtin:tier4.")
    return int(name)
