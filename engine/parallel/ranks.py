"""Links the ranks of one model: who talks to whom, and over what."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, Store, TCPStore

# A rank that takes this long over its part of a step is taken for dead.
STEP_TIMEOUT_S = 60.0
# NCCL ends the process where its own patience does; ours ends first, and only the model with it.
_DATA_TIMEOUT = timedelta(seconds=10 * STEP_TIMEOUT_S)
# A process starts and imports in seconds; loading comes after the ranks have met.
_MEET_TIMEOUT = timedelta(minutes=2)

# What a link raises whose other end is gone.
BROKEN = (RuntimeError, OSError, EOFError)


class Ranks:
    """Holds this process's place among ``size``, a link for data (NCCL on GPUs, gloo on CPUs) and pipes for orders.

    Data goes to the current stream, in the order of the calls; it may be captured. Orders are a system call and about
    30 microseconds at rank 0, and a closed pipe says at once that its other end is gone.

    Parameters
    ----------
    rank, size : this process, and how many there are
    port : of rank 0's rendezvous on the loopback address
    device : where this rank's tensors live
    pipes : at rank 0 one to each other rank, elsewhere the one to rank 0
    """

    def __init__(self, rank: int, size: int, port: int, device: torch.device, pipes: Sequence[Connection]) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self._pipes = pipes
        store = TCPStore("127.0.0.1", port, size, is_master=rank == 0, timeout=_MEET_TIMEOUT)
        # A process group outside torch's global one: several models in one process have ranks of their own.
        self._data = _group(PrefixStore("data", store), rank, size, device)
        self._store = store  # kept: rank 0 serves it

    # Data

    def add_up(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        _finish(self._data.allreduce([x], _on_stream(dist.AllreduceOptions())))
        return x

    def gather_last(self, x: Tensor) -> Tensor:
        """Lay (R, n) of each rank side by side: (R, size * n)."""
        rows, each = x.shape
        parts = x.new_empty((self.size * rows, each))
        _finish(self._data._allgather_base(parts, x.contiguous(), _on_stream(AllgatherOptions())))
        return parts.view(self.size, rows, each).transpose(0, 1).reshape(rows, self.size * each)

    def share(self, x: Tensor) -> Tensor:
        """Copy rank 0's tensor, on the device, into every rank's ``x``."""
        options = _on_stream(dist.BroadcastOptions())
        options.rootRank = 0
        _finish(self._data.broadcast([x], options))
        return x

    # Orders

    def tell(self, order: Tensor) -> None:
        """Give the other ranks, from rank 0, a contiguous int64 tensor on the host."""
        data = order.numpy().tobytes()
        for pipe in self._pipes:
            pipe.send_bytes(data)

    def hear(self) -> Tensor:
        """Wait, on another rank, for what rank 0 tells next, int64 on the host."""
        return torch.frombuffer(bytearray(self._pipes[0].recv_bytes()), dtype=torch.int64)

    def agree(self, mine: bool) -> bool:
        """Tell whether every rank says yes; waits for all of them, however long one takes."""
        if self.rank:
            self._pipes[0].send(mine)
            return bool(self._pipes[0].recv())
        answers = [pipe.recv() for pipe in self._pipes]
        verdict = mine and all(answers)
        for pipe in self._pipes:
            pipe.send(verdict)
        return verdict

    def abort(self) -> None:
        """Let whatever waits for data of another rank, here or on the device, end without it; no data goes after."""
        if self.device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # what is to be aborted may have failed by itself
                self._data.abort()


def _on_stream(options: Any) -> Any:
    """Stay on this stream, not the library's own: events between the two would cost more than a small sum."""
    options.asyncOp = False
    return options


def _finish(work: Any) -> None:
    if work is not None:  # on a GPU there is nothing to wait for: it is the stream that does
        work.wait()


def _group(store: Store, rank: int, size: int, device: torch.device) -> Any:
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, _DATA_TIMEOUT)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _DATA_TIMEOUT
    return dist.ProcessGroupNCCL(store, rank, size, options)
