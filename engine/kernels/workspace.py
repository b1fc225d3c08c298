"""Holds the scratch memory that kernels of one launch queue hand to each other, one per thread and device.

An engine runs on a thread of its own with one stream, so launches that share a workspace follow one another. Captured
graphs keep the address, so a workspace lives as long as its thread.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

# The most that a launch puts aside for a multiprocessor: attention_one.cu; tiles.cuh, two parts of 128 by 256 sums.
PARTIAL_BYTES_PER_SM = 128 << 10
PART_BYTES_PER_SM = 2 * 128 * 256 * 4
NUM_COUNTERS = 1 << 16
# Thread blocks that have a part of one output wait for each other, so all must get to run. They start in order: of a
# launch only those wait that share an output with the last to have started. With so many of them at most, the streams
# of eight engines cannot fill the 132 multiprocessors of an H200 with thread blocks that wait.
MOST_SHARES = 16

_local = threading.local()


@dataclass(frozen=True, slots=True)
class Workspace:
    """Holds the scratch memory of one launch queue.

    ``partials`` holds anything. Between launches all bits of ``parts`` are set and ``counters`` are zero: kernels leave
    them so.
    """

    partials: Tensor
    parts: Tensor
    counters: Tensor

    @classmethod
    def on(cls, device: torch.device) -> Workspace:
        """Allocate.

        Raises
        ------
        RuntimeError
            While a graph is captured: what it begins with would be written when the graph runs, not now.
        """
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("A kernel workspace cannot be made during graph capture; run the step once before.")
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        return cls(
            torch.empty(PARTIAL_BYTES_PER_SM * num_sms, dtype=torch.uint8, device=device),
            torch.full((PART_BYTES_PER_SM // 4 * num_sms,), -1, dtype=torch.int32, device=device),
            torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device),
        )


def workspace_of(device: torch.device) -> Workspace:
    """Return this thread's workspace on ``device``, made on first use."""
    held: dict[torch.device, Workspace] = _local.__dict__.setdefault("held", {})
    if device not in held:
        held[device] = Workspace.on(device)
    return held[device]


def count_runs(outputs: int, units: int, resident: int) -> int:
    """Return the thread blocks, ``resident`` of them at once, that so many outputs' units are dealt to in equal runs.

    No output falls to more than ``MOST_SHARES + 1`` of them.
    """
    least = -(-units // MOST_SHARES)  # units of a run
    return min(resident, max(outputs * units // least, 1))
