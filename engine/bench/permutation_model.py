"""Makes random models whose next token is known, so that a drafter is right exactly as often as a measurement wants.

With layers that add next to nothing to the residual stream, the last hidden state is the current token's embedding; a
head that holds, for each token's successor, that token's embedding then makes the model walk a permutation of the
vocabulary. Every kernel does its whole work; only the answer is known. A drafter whose permutation differs for a share
of the tokens is wrong for just that share.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.layers.linear import DenseLinear
from engine.models.decoder import DecoderModel

# With this much of the usual residual, 160 additions leave the embedding a signal of eight times their noise.
RESIDUAL_SCALE = 0.01


def successors(vocab_size: int, *, agreement: float = 1.0, seed: int = 0) -> Tensor:
    """Return int64 (vocab_size,): token → next token, one permutation per seed, with a share of its entries moved on.

    Parameters
    ----------
    agreement : share of tokens, drawn at random, whose successor is that of the plain permutation
    """
    generator = torch.Generator().manual_seed(seed)
    following = torch.randperm(vocab_size, generator=generator)
    moved = (torch.rand(vocab_size, generator=generator) >= agreement).nonzero().flatten()
    following[moved] = following[moved.roll(1)]
    return following


def walk(model: DecoderModel, following: Tensor) -> None:
    """Give a model made with :data:`RESIDUAL_SCALE` the head that follows ``following``; before any engine has it."""
    head = torch.empty_like(model.embedding)
    head[following.to(head.device)] = model.embedding
    model.lm_head = DenseLinear(head.to(model.dtype))
