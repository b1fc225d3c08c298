"""Reads named tensors of a checkpoint's safetensors files, single or sharded, with every fault named."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import CheckpointCorrupt, CheckpointNotFound, TensorMismatch
from engine.load.source import read_json

# Buffers that older exporters wrote beside the weights; they follow from the config.
HARMLESS_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", ".masked_bias")


class TensorSource(Protocol):
    """Gives a model's tensors by their Hugging Face names. See :class:`TensorFiles`."""

    @property
    def folder(self) -> Path: ...

    def __contains__(self, name: str) -> bool: ...

    def take(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor: ...

    def take_float(self, name: str, shape: tuple[int, ...]) -> Tensor: ...

    def ignore(self, names: Iterable[str]) -> None: ...

    def finish(self) -> None: ...


class TensorFiles:
    """Reads all tensors of a folder, each from disk when taken; :meth:`finish` refuses what nobody took.

    Parameters
    ----------
    folder : holds the safetensors files
    device : where tensors are put as they are read
    """

    def __init__(self, folder: Path, device: torch.device | str = "cpu") -> None:
        self.folder = folder
        self._device = str(device)
        self._where = _locate(folder)
        self._open: dict[Path, safe_open] = {}
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def __len__(self) -> int:
        return len(self._where)

    @property
    def num_bytes(self) -> int:
        """Size of the files on disk."""
        return sum(path.stat().st_size for path in set(self._where.values()))

    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return sorted(self._where)

    def take(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """Read one tensor.

        Raises
        ------
        TensorMismatch
            It is missing, or not of ``shape``.
        CheckpointCorrupt
            Its file is truncated or damaged.
        """
        path = self._where.get(name)
        if path is None:
            raise TensorMismatch(f"{self.folder}: tensor {name!r} is missing.", tensor=name, path=self.folder)
        try:
            tensor: Tensor = self._file(path).get_tensor(name)  # type: ignore[no-untyped-call]
        except (SafetensorError, OSError) as error:
            raise TensorMismatch(
                f"{path}: tensor {name!r} cannot be read ({error}).", tensor=name, path=path
            ) from error
        if shape is not None and tuple(tensor.shape) != shape:
            raise TensorMismatch(
                f"{path}: tensor {name!r} has shape {tuple(tensor.shape)}; config.json makes it {shape}.",
                tensor=name,
                path=path,
            )
        self._taken.add(name)
        return tensor

    def take_float(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Take a tensor as :meth:`take` does, refusing integer data (a quantised tensor under a dense name)."""
        tensor = self.take(name, shape)
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise TensorMismatch(
                f"{self._where[name]}: tensor {name!r} is {tensor.dtype}; expected float16, bfloat16 or float32.",
                tensor=name,
                path=self._where[name],
            )
        return tensor

    def ignore(self, names: Iterable[str]) -> None:
        """Count tensors as taken without reading them."""
        self._taken.update(names)

    def finish(self) -> None:
        """Refuse tensors that the model has no place for: silently dropping weights would make another model."""
        left = sorted(n for n in self._where.keys() - self._taken if not n.endswith(HARMLESS_SUFFIXES))
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise TensorMismatch(
                f"{self._where[left[0]]}: unexpected tensors {', '.join(map(repr, left[:3]))}{more}; "
                "the model that config.json describes has no place for them.",
                tensor=left[0],
                path=self._where[left[0]],
            )

    def _file(self, path: Path) -> safe_open:
        if path not in self._open:
            self._open[path] = _open(path, self._device)
        return self._open[path]


def _locate(folder: Path) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return _locate_shards(folder, index)
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        other = next((p.name for pattern in ("*.bin", "*.gguf", "*.pt") for p in folder.glob(pattern)), None)
        hint = f"; {other} is not read here, convert it to safetensors" if other else ""
        raise CheckpointNotFound(f"{folder}: no .safetensors files{hint}.", path=folder)
    return {name: path for path in files for name in _names(path)}


def _locate_shards(folder: Path, index: Path) -> dict[str, Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointCorrupt(f"{index}: no weight_map of tensor names to file names.", path=index)
    present: dict[str, set[str]] = {}
    for shard in sorted(set(weight_map.values())):
        path = folder / shard
        if Path(shard).name != shard:
            raise CheckpointCorrupt(f"{index}: {shard!r} is not a plain file name.", path=index)
        if not path.is_file():
            raise CheckpointNotFound(f"{path}: this shard is named in {index.name} but missing.", path=path)
        present[shard] = _names(path)
    for name, shard in weight_map.items():
        if name not in present[shard]:
            raise TensorMismatch(f"{folder / shard}: tensor {name!r} is missing.", tensor=name, path=folder / shard)
    return {name: folder / shard for name, shard in weight_map.items()}


def _names(path: Path) -> set[str]:
    return set(_open(path).keys())  # type: ignore[no-untyped-call]


def _open(path: Path, device: str = "cpu") -> safe_open:
    try:
        return safe_open(str(path), framework="pt", device=device)
    except (SafetensorError, OSError) as error:
        raise CheckpointCorrupt(
            f"{path} ({path.stat().st_size:,} bytes): not a whole safetensors file ({error}). Fetch it again.",
            path=path,
        ) from error
