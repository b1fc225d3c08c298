"""Multiplies in int8 on the CPU: weights per output channel, each row of activations by its own largest value.

PyTorch's dynamic kernels take one activation scale for the whole batch, so a row's answer would depend on its
neighbours. Here every row is first divided by its own largest magnitude; all rows then share the fixed scale 1/127, the
integer sums are exact, and the row's magnitude is multiplied back: a row's result is the same alone and in any batch.
"""

from __future__ import annotations

import functools
import threading
import warnings

import torch
from torch import Tensor

# Activations are unsigned with this zero point: 1..255 stand for -127..127.
ZERO_POINT = 128
SCALE = 1.0 / 127.0
TINY = 1e-30  # an all-zero row is divided by this instead of 0

# Warning filters belong to the process, so tiers that load at once take turns at changing them.
_filters_lock = threading.Lock()


class Int8Linear:
    """Computes ``x @ W.T + bias`` with both operands rounded to 8 bits, accumulated in int32, result float32.

    The rounding adds noise of about 1 % of the output's norm for Gaussian data (both operands, K = 128 to 2048).
    """

    def __init__(self, packed: object, out_features: int, in_features: int, bias: Tensor | None) -> None:
        self._packed = packed
        self.out_features = out_features
        self.in_features = in_features
        self.bias = bias
        self._multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32

    @classmethod
    def from_float(cls, weight: Tensor, bias: Tensor | None = None) -> Int8Linear:
        """Quantise float32 (out, in), symmetric per output channel."""
        scales = weight.abs().amax(dim=1).clamp_min(TINY) / 127.0
        codes = (weight / scales[:, None]).round_().to(torch.int8)
        return cls(_prepack(codes, scales), weight.shape[0], weight.shape[1], None if bias is None else bias.float())

    def __call__(self, x: Tensor) -> Tensor:
        magnitude = x.abs().amax(-1, True).clamp_min_(TINY)
        out: Tensor = self._multiply(x / magnitude, SCALE, ZERO_POINT, self._packed).mul_(magnitude)
        return out if self.bias is None else out.add_(self.bias)

    @property
    def weight_bytes(self) -> int:
        # One byte a weight, a float32 scale and int32 column sum per output.
        bias = 0 if self.bias is None else self.bias.nbytes
        return self.out_features * (self.in_features + 8) + bias


def _prepack(codes: Tensor, scales: Tensor) -> object:
    zeros = torch.zeros(codes.shape[0], dtype=torch.int64)
    with _filters_lock, warnings.catch_warnings():
        # The tensor type is announced as deprecated; it only carries the codes into the kernel's own packing.
        warnings.filterwarnings("ignore", message=".*quantized tensor creation functions.*")
        quantized = torch._make_per_channel_quantized_tensor(codes.contiguous(), scales, zeros, 0)
        return torch.ops.quantized.linear_prepack(quantized, None)


@functools.cache
def is_int8_exact() -> bool:
    """Tell whether this machine and this PyTorch sum 8-bit products without saturating.

    Processors without VNNI add pairs of products in 16 bits, which the largest codes overflow. The largest codes are
    tried, so the answer rests on a computation, not on a processor's name.
    """
    try:
        weight = torch.full((64, 256), 127, dtype=torch.int8)
        layer = Int8Linear(_prepack(weight, torch.ones(64)), 64, 256, None)
        out = layer(torch.ones(2, 256))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return bool(torch.allclose(out, torch.full((2, 64), 127.0 * 256), rtol=1e-5))
