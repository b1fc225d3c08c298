"""Lays a step's input out in one run of bytes, so that the host tells a device all of it in one copy.

The host writes into pinned memory while the device may still be reading what was written for the steps before, so
there is a ring of host buffers, one more than steps can be in flight. On the device the bytes always lie in the same
place, so that a captured graph finds them there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.paged_step import PagedStep

IntArray = NDArray[np.int64]

# At most two steps are in flight: the one that runs and the one that was launched behind it.
RING = 3


@dataclass(frozen=True, slots=True)
class StepShape:
    """Holds a step's sizes: T tokens of S sequences, of which R rows are drawn from."""

    num_tokens: int
    num_sequences: int
    num_rows: int

    @property
    def num_bytes(self) -> int:
        return max(end for _, end, _ in _places(self))


@dataclass(frozen=True, slots=True)
class StepForm:
    """Decides, beside the model, which launches compute a step up to its logits.

    Attributes
    ----------
    max_query_len : the longest query there may be
    by_rows : logits are of the tokens in ``rows``, else of every token
    """

    shape: StepShape
    max_query_len: int
    by_rows: bool


@dataclass(slots=True)
class HostFields:
    """Views a step's input as NumPy arrays over host bytes; names and dtypes are those of :class:`DeviceFields`."""

    token_ids: IntArray
    source_rows: IntArray
    positions: IntArray
    slots: IntArray
    rows: IntArray
    seeds: IntArray
    draw_positions: IntArray
    top_k: IntArray
    lines: IntArray
    query_starts: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    rejects: NDArray[np.int32]
    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    presence: NDArray[np.float32]
    frequency: NDArray[np.float32]
    repetition: NDArray[np.float32]


@dataclass(slots=True)
class DeviceFields:
    """Views a step's input on the device.

    Attributes
    ----------
    token_ids : int64 (T,), where the host knows them
    source_rows : int64 (T,), else the row of the last step's draws that holds the token; below 0: the host knows
    positions : int64 (T,)
    slots, query_starts, context_lens : see :class:`engine.kernels.paged_step.PagedStep`
    rows : int64 (R,), the tokens whose hidden states are drawn from
    seeds, draw_positions, top_k, temperature, top_p, min_p : (R,), see :class:`engine.kernels.sampling.SamplingTensors`
    lines, presence, frequency, repetition : (R,), see :class:`engine.kernels.sampling.Penalties`
    rejects : int32 (S,), 1 where drafts were drawn and are judged by rejection sampling
    """

    token_ids: Tensor
    source_rows: Tensor
    positions: Tensor
    slots: Tensor
    rows: Tensor
    seeds: Tensor
    draw_positions: Tensor
    top_k: Tensor
    lines: Tensor
    query_starts: Tensor
    context_lens: Tensor
    rejects: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    presence: Tensor
    frequency: Tensor
    repetition: Tensor

    def paged(self, block_tables: Tensor, max_query_len: int) -> PagedStep:
        """Return where the step's tokens lie in the paged cache."""
        return PagedStep(block_tables, self.context_lens, self.query_starts, self.slots, max_query_len)


# Kernels are compiled anew for pointers of another alignment, so every field starts on one of this many bytes.
_ALIGNMENT = 16


def _places(shape: StepShape) -> list[tuple[int, int, int]]:
    """Return the first byte, end and item size of each field, in the order in which they are declared."""
    tokens, rows = shape.num_tokens, shape.num_rows
    wide = [tokens] * 4 + [rows] * 5
    narrow = [shape.num_sequences + 1, shape.num_sequences, shape.num_sequences] + [rows] * 6
    places, start = [], 0
    for count, size in [(count, 8) for count in wide] + [(count, 4) for count in narrow]:
        places.append((start, start + count * size, size))
        start += -(-count * size // _ALIGNMENT) * _ALIGNMENT
    return places


_HOST_TYPES = (np.int64,) * 9 + (np.int32,) * 3 + (np.float32,) * 6
_DEVICE_TYPES = (torch.int64,) * 9 + (torch.int32,) * 3 + (torch.float32,) * 6


def host_fields(buffer: Tensor, shape: StepShape) -> HostFields:
    """Return views of uint8 host memory."""
    raw = buffer.numpy()
    views = [raw[a:b].view(dtype) for (a, b, _), dtype in zip(_places(shape), _HOST_TYPES, strict=True)]
    return HostFields(*views)


def device_fields(buffer: Tensor, shape: StepShape) -> DeviceFields:
    """Return views of uint8 device memory."""
    return DeviceFields(
        *(buffer[a:b].view(dtype) for (a, b, _), dtype in zip(_places(shape), _DEVICE_TYPES, strict=True))
    )


class BlockTables:
    """Keeps the block tables of a step's sequences on the device, updated where they changed.

    Row i belongs to the i-th sequence of a step. Decodes keep their order from step to step, so most steps change only
    the rows of sequences that began a new block.
    """

    def __init__(self, max_sequences: int, max_blocks: int, device: torch.device) -> None:
        self._mirror = np.zeros((max_sequences, max_blocks), dtype=np.int32)
        self._rows: list[list[int]] = [[] for _ in range(max_sequences)]
        self._pinned = [
            torch.zeros(max_sequences * max_blocks, dtype=torch.int32, pin_memory=device.type == "cuda")
            for _ in range(RING)
        ]
        self._num_changed = 0  # one beyond the last row that the device has not got yet
        self.tensor = torch.zeros((max_sequences, max_blocks), dtype=torch.int32, device=device)

    def set(self, row: int, table: list[int]) -> None:
        """Let a row hold this table; what lies beyond it is not read."""
        held = self._rows[row]
        if held == table:
            return
        keep = len(held) if len(held) < len(table) and table[: len(held)] == held else 0
        self._mirror[row, keep : len(table)] = table[keep:]
        self._rows[row] = table.copy()
        self._num_changed = max(self._num_changed, row + 1)

    def slots(self, rows: IntArray, positions: IntArray, block_size: int) -> IntArray:
        """Return where tokens of these rows at these positions lie in the pool."""
        found: IntArray = self._mirror[rows, positions // block_size].astype(np.int64)
        found *= block_size
        found += positions % block_size
        return found

    def upload(self, turn: int) -> Tensor:
        """Bring the device's rows up to date; ``turn`` counts steps, for the ring.

        Returns
        -------
        What was written of them, int32 (rows, columns), perhaps none
        """
        num_rows = self._num_changed
        width = max(map(len, self._rows[:num_rows]), default=0)
        changed = self.tensor[:num_rows, :width]
        if num_rows:
            pinned = self._pinned[turn % RING][: num_rows * width]
            pinned.numpy().reshape(num_rows, width)[:] = self._mirror[:num_rows, :width]
            changed.copy_(pinned.to(self.tensor.device, non_blocking=True).view(num_rows, width))
            self._num_changed = 0  # not before: where there was no memory for the copy, the next step makes up for it
        return changed
