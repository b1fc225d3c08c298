"""Brings log-probabilities of drawn tokens from the device to whoever asked for them."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.device.step_buffers import RING
from engine.kernels.sampling import SampledTokens
from engine.request import TokenLogprob
from engine.sampler import allowed

# Alternatives that a step reports of every row; the host's sampler serves those who want more.
MOST_ALTERNATIVES = 20


class LogprobBuffers:
    """Holds one row per drawn token, on the device and, in a ring, on the host.

    Parameters
    ----------
    max_rows : most tokens that a step draws
    vocab_size : V
    device : where logits are
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.num_alternatives = min(MOST_ALTERNATIVES, vocab_size)
        on_gpu = device.type == "cuda"
        shape = (max_rows, 1 + self.num_alternatives)
        # The drawn token's log-probability and those of the likeliest; the drawn token's rank and the likeliest ids.
        self._values = torch.zeros(shape, dtype=torch.float32, device=device)
        self._ids = torch.zeros(shape, dtype=torch.int64, device=device)
        self._landed = [
            (torch.zeros(shape, pin_memory=on_gpu), torch.zeros(shape, dtype=torch.int64, pin_memory=on_gpu))
            for _ in range(RING)
        ]

    def keep(self, sampled: SampledTokens) -> None:
        """Put a step's reports where :meth:`land` finds them; may be captured."""
        assert sampled.logprobs is not None
        assert sampled.ranks is not None
        assert sampled.top_ids is not None
        assert sampled.top_logprobs is not None
        count = sampled.logprobs.shape[0]
        self._values[:count, 0], self._values[:count, 1:] = sampled.logprobs, sampled.top_logprobs
        self._ids[:count, 0], self._ids[:count, 1:] = sampled.ranks, sampled.top_ids

    def land(self, num_rows: int, turn: int) -> tuple[Tensor, Tensor]:
        """Copy to the host, without waiting; ``turn`` counts steps, for the ring."""
        values, ids = (landed[:num_rows] for landed in self._landed[turn % RING])
        values.copy_(self._values[:num_rows], non_blocking=True)
        ids.copy_(self._ids[:num_rows], non_blocking=True)
        return values, ids


def read_logprob(values: Tensor, ids: Tensor, token_id: int, num_wanted: int) -> TokenLogprob:
    """Return one row, landed, of the drawn token with as many alternatives as were asked for."""
    logprobs, numbers = values[: num_wanted + 1].tolist(), ids[: num_wanted + 1].tolist()
    return TokenLogprob(token_id, logprobs[0], numbers[0], allowed(numbers[1:], logprobs[1:]))
