"""Draws random weights in a checkpoint's exact format, where they will live: a benchmark without the download.

Every tensor has the name, shape and dtype that a real file would give, so that it takes the same way through the
loader, repacking included. Answers are noise; times, bytes and memory are real.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.errors import TensorMismatch

# Eight 4-bit zero points of 7 or 8 each: random codes then lie evenly about zero. With 8 throughout their mean is -0.5,
# and what the inputs have in common grows from layer to layer.
_LEAST_ZEROS, _ONE_EACH = 0x77777777, 0x11111111
# Of everything in floating point, where codes are zero: that loader's.
_BLANK = 1e-3
# Codes 0..15 about their mean have this standard deviation.
_CODE_STD = 4.64

Codes = Literal["random", "zero"]


class DummyTensors:
    """Stands where :class:`engine.load.tensors.TensorFiles` does; each tensor is drawn when it is taken.

    Parameters
    ----------
    config : the model to make up
    device : where the tensors are drawn; a GPU fills 40 GB in seconds
    seed : of everything drawn
    residual_scale : size of what layers add to the residual stream; near 0 the last hidden state is the embedding
    codes : of 4-bit weights and their zero points: random, or zero with everything else uniform within a thousandth of
        0, which is what vLLM's dummy loader measures with (it leaves integers as they were allocated). A card at its
        power limit multiplies zeros faster than anything else
    folder : named in messages

    Random weights are scaled so that hidden states keep their size from layer to layer: nothing overflows or dies.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device,
        seed: int = 0,
        residual_scale: float = 1.0,
        codes: Codes = "random",
        folder: Path = Path(),
    ) -> None:
        self.folder = folder
        self._residual_scale = residual_scale
        self._is_blank = codes == "zero"
        self._config = config
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)
        self._dtype = torch.float16 if config.quant is not None and config.quant.method == "awq" else torch.bfloat16

    def __contains__(self, name: str) -> bool:
        """Tell whether a file of this format would hold the tensor."""
        base, _, suffix = name.rpartition(".")
        quant = self._config.quant
        if suffix in ("bias", "g_idx"):
            return False
        if quant is None or not base.endswith("_proj"):
            return suffix == "weight"
        return (suffix in ("qweight", "qzeros", "scales")) != any(part in base for part in quant.skip)

    def take(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """Draw one tensor.

        Raises
        ------
        TensorMismatch
            ``shape`` is not given: there is no file that would know it.
        """
        if shape is None:
            raise TensorMismatch(f"{self.folder}: dummy tensor {name!r} needs a shape.", tensor=name, path=self.folder)
        suffix = name.rpartition(".")[2]
        if self._is_blank:
            return self._blank(shape, suffix)
        if suffix == "qzeros":
            return self._random_words(shape).bitwise_and_(_ONE_EACH).add_(_LEAST_ZEROS)
        if suffix == "qweight":
            return self._random_words(shape)
        if suffix == "scales":
            scale = self._gain(name) / (_CODE_STD * math.sqrt(self._in_features(name)))
            return torch.full(shape, scale, dtype=self._dtype, device=self._device)
        if len(shape) == 1:
            return (torch.zeros if suffix == "bias" else torch.ones)(shape, dtype=self._dtype, device=self._device)
        drawn = torch.empty(shape, dtype=self._dtype, device=self._device)
        if name == "model.embed_tokens.weight":
            return drawn.normal_(generator=self._generator)
        return drawn.normal_(0.0, self._gain(name) / math.sqrt(shape[1]), generator=self._generator)

    def take_float(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Take a tensor as :meth:`take` does."""
        return self.take(name, shape)

    def ignore(self, names: Iterable[str]) -> None:
        """Do nothing: no tensor is left over here."""

    def finish(self) -> None:
        """Do nothing: no tensor is left over here."""

    def _blank(self, shape: tuple[int, ...], suffix: str) -> Tensor:
        if suffix in ("qweight", "qzeros"):
            return torch.zeros(shape, dtype=torch.int32, device=self._device)
        drawn = torch.empty(shape, dtype=self._dtype, device=self._device)
        return drawn.uniform_(-_BLANK, _BLANK, generator=self._generator)

    def _gain(self, name: str) -> float:
        return self._residual_scale if "o_proj" in name or "down_proj" in name else 1.0

    def _in_features(self, name: str) -> int:
        config = self._config
        if name.endswith("down_proj.scales"):
            return config.intermediate_size
        return config.q_size if name.endswith("o_proj.scales") else config.hidden_size

    def _random_words(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=self._device, generator=self._generator)
