"""Decides whether tensors go to the kernels or to the references."""

from __future__ import annotations

import functools
import importlib.util

from torch import Tensor


@functools.cache
def has_triton() -> bool:
    """Tell whether Triton is installed; PyTorch's CUDA builds bring it along."""
    return importlib.util.find_spec("triton") is not None


def runs_on_gpu(tensor: Tensor) -> bool:
    """Tell whether ``tensor`` lies where the kernels can run."""
    return tensor.is_cuda and has_triton()
