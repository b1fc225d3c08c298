"""Rules out tokens that ``min_p``, ``top_k`` and ``top_p`` do not allow.

Sorting a vocabulary costs milliseconds a row, and what survives is nearly always among the likeliest few. So the
likeliest ``NUM_CANDIDATES`` are looked at first, and only rows whose survivors may reach beyond are sorted whole.
Which way a row goes depends on that row alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.request import SamplingParams

NUM_CANDIDATES = 128


def filter_logits(logits: Tensor, params: Sequence[SamplingParams], num_candidates: int = NUM_CANDIDATES) -> Tensor:
    """Write -inf over the tokens outside each row's ``min_p``, ``top_k`` and ``top_p``, applied in this order.

    Parameters
    ----------
    logits : float32 (R, V), after temperature
    params : R of them
    num_candidates : most tokens looked at before a whole sort

    Returns
    -------
    float32 (R, V); at least the likeliest token of each row is left

    References
    ----------
    ``top_p``: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", section 3.1. ``min_p``: Nguyen et
    al. 2024, "Turning Up the Heat: Min-p Sampling", section 3.
    """
    limits = _Limits(logits, params)
    if logits.shape[1] <= num_candidates:
        return limits.keep(*logits.sort(dim=-1, descending=True, stable=True))[0]
    filtered, is_whole = limits.keep(*logits.topk(num_candidates, dim=-1))
    rest = [row for row, whole in enumerate(is_whole.tolist()) if not whole]
    if rest:
        some = _Limits(logits[rest], [params[row] for row in rest])
        filtered[rest] = some.keep(*logits[rest].sort(dim=-1, descending=True, stable=True))[0]
    return filtered


class _Limits:
    """Holds the three limits of each row as columns."""

    def __init__(self, logits: Tensor, params: Sequence[SamplingParams]) -> None:
        self.logits = logits
        self.floor = self._column([math.log(p.min_p) if p.min_p else -math.inf for p in params])
        self.top_k = self._column([p.top_k or logits.shape[1] for p in params])
        # A top_p of 1 must keep a tail whose mass is lost in rounding, so it becomes 2.
        self.top_p = self._column([p.top_p if p.top_p < 1.0 else 2.0 for p in params])

    def _column(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.logits.device).unsqueeze(1)

    def keep(self, ordered: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the limits to each row's likeliest tokens.

        Parameters
        ----------
        ordered, order : (R, C), logits from the likeliest on, and their token ids

        Returns
        -------
        (R, V) logits, and bool (R,): whether all survivors were among the C
        """
        num_candidates = ordered.shape[1]
        peak = ordered[:, :1]
        place = torch.arange(num_candidates, device=ordered.device)
        drop = (ordered - peak < self.floor) | (place >= self.top_k)
        mass = (ordered - peak).exp().masked_fill(drop, 0.0)
        # Beyond the candidates there may be more survivors of the first two limits; they count in top_p's denominator.
        total = mass.sum(dim=-1, keepdim=True)
        goes_on = ~drop[:, -1:]
        if num_candidates < self.logits.shape[1]:
            over = self.logits - peak
            whole = torch.where(over >= self.floor, over.exp(), 0.0).sum(dim=-1, keepdim=True)
            total = torch.where(goes_on & (self.top_k >= self.logits.shape[1]), whole, total)
        # A token stays if the tokens before it have not reached top_p yet.
        drop |= mass.cumsum(dim=-1) - mass >= self.top_p * total
        drop[:, 0] = False
        kept = ordered.masked_fill(drop, -math.inf)
        is_whole = drop[:, -1] | (self.top_k.squeeze(1) <= num_candidates)
        # With a top_k between C and V the denominator above was incomplete.
        is_whole &= (
            ~goes_on.squeeze(1)
            | (self.top_k.squeeze(1) >= self.logits.shape[1])
            | (self.top_k.squeeze(1) <= num_candidates)
        )
        return torch.full_like(self.logits, -math.inf).scatter_(1, order, kept), is_whole
