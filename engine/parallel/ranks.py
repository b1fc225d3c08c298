"""The ranks of one model: who talks to whom, and over what."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

# A rank that takes this long over its part of a step is taken for dead.
STEP_TIMEOUT = timedelta(seconds=60)
# An idle engine gives no orders for hours; a rank whose other end is gone notices by the closed connection.
IDLE_TIMEOUT = timedelta(days=365)
# A process starts and imports in seconds; loading comes after the ranks have met.
MEET_TIMEOUT = timedelta(minutes=2)


class Ranks:
    """This process's place among ``size``, with a link for data (NCCL on GPUs, gloo on CPUs) and one for orders.

    Parameters
    ----------
    rank, size : this process, and how many there are
    port : of rank 0's rendezvous on the loopback address
    device : where this rank's tensors live
    """

    def __init__(self, rank: int, size: int, port: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        store = TCPStore("127.0.0.1", port, size, is_master=rank == 0, timeout=MEET_TIMEOUT)
        data = "nccl" if device.type == "cuda" else "gloo"
        # Process groups outside torch's global one: several models in one process have ranks of their own.
        self._data = _group(data, PrefixStore("data", store), rank, size, STEP_TIMEOUT)
        self._orders = _group("gloo", PrefixStore("orders", store), rank, size, IDLE_TIMEOUT)
        self._store = store  # kept: rank 0 serves it

    def wait_for_all(self) -> None:
        """Return when every rank is here, however long its loading takes; raises when one is gone."""
        self._orders.allreduce([torch.zeros(1)]).wait()

    def add_up(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        self._data.allreduce([x]).wait()
        return x

    def gather_last(self, x: Tensor) -> Tensor:
        """(…, n) of each rank side by side: (…, size * n)."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._data.allgather([parts], [x.contiguous()]).wait()
        return torch.cat(parts, dim=-1)

    def share(self, x: Tensor) -> Tensor:
        """Rank 0's tensor, on the device, in every rank's ``x``."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._data.broadcast([x], options).wait()
        return x

    def tell(self, order: Tensor) -> Tensor:
        """Rank 0's int64 tensor, on the host, in every rank's ``order``."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._orders.broadcast([order], options).wait()
        return order


def _group(backend: str, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)
