"""Says when a Triton kernel may start before the one ahead of it has ended."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.cache
def _can_start_early(device: int) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9


def early_start(tensor: Tensor) -> dict[str, bool]:
    """Launch options for programmatic dependent launch: the kernel waits (``EARLY``) before it touches any input."""
    early = tensor.is_cuda and _can_start_early(tensor.get_device())
    return {"EARLY": early, "launch_pdl": True} if early else {"EARLY": False}
