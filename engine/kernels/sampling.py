"""Draws tokens where the logits are: the rules of :mod:`engine.sampler`, parameters in tensors and no host in it.

Every stage works on rows of fixed shape and reads nothing back, so the whole can lie inside a captured graph. Which
stages there are is decided by which fields of :class:`SamplingTensors` are given, hence before capture.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.dispatch import runs_on_gpu
from engine.sampler import DRAW

NOT_FINITE = 1  # NaN or infinity in the row's logits
NOTHING_ALLOWED = 2  # bias, masks and banned tokens left no token


@dataclass(slots=True)
class Penalties:
    """Holds the tokens seen so far, and what that costs them.

    Attributes
    ----------
    presence, frequency, repetition : float32 (R,); 0, 0 and 1 are off
    slots : int64 (R,), each row's line in the two tables
    counts : int32 (lines, V), of the output so far
    prompts : bool (lines, V), tokens of the prompt
    """

    presence: Tensor
    frequency: Tensor
    repetition: Tensor
    slots: Tensor
    counts: Tensor
    prompts: Tensor


@dataclass(slots=True)
class SamplingTensors:
    """Holds the parameters of R rows; a None leaves its stage out for all of them.

    Attributes
    ----------
    temperature : float32 (R,), 0 is greedy. None: every row is greedy
    seeds, positions : int64 (R,), of the request and of the token to be drawn; they key the random number
    min_p : float32 (R,), 0 is off
    top_k : int64 (R,), 0 is off
    top_p : float32 (R,), 1 is off
    penalties : see there
    bias_ids, bias_values : int64 and float32 (R, B), added to logits; an unused place is id 0, value 0
    banned_ids : int64 (R, E), ruled out while ``positions < banned_until``; an unused place repeats another id
    banned_until : int64 (R,)
    """

    temperature: Tensor | None = None
    seeds: Tensor | None = None
    positions: Tensor | None = None
    min_p: Tensor | None = None
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    penalties: Penalties | None = None
    bias_ids: Tensor | None = None
    bias_values: Tensor | None = None
    banned_ids: Tensor | None = None
    banned_until: Tensor | None = None

    @property
    def filters(self) -> bool:
        return self.min_p is not None or self.top_k is not None or self.top_p is not None


@dataclass(slots=True)
class SampledTokens:
    """Holds what was drawn.

    Attributes
    ----------
    token_ids : int64 (R,); any valid id where ``errors`` is not 0
    errors : int32 (R,), 0, ``NOT_FINITE`` or ``NOTHING_ALLOWED``
    logprobs : float32 (R,), of the drawn token under the unedited logits; None unless asked for, like those below
    ranks : int64 (R,), how many tokens are likelier
    top_ids, top_logprobs : int64 and float32 (R, n), the likeliest tokens
    """

    token_ids: Tensor
    errors: Tensor
    logprobs: Tensor | None = None
    ranks: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


def mask_logits(logits: Tensor, masks: Tensor) -> None:
    """Write -inf over the logits of tokens whose bit is 0.

    Parameters
    ----------
    logits : (R, V) float32 or bfloat16, overwritten
    masks : int32 (R, words), 32 tokens each, the lowest bit first
    """
    if runs_on_gpu(logits):
        from engine.kernels.triton_sampling import mask_triton

        mask_triton(logits, masks)
        return
    bits = (masks[:, :, None] >> torch.arange(32, dtype=torch.int32, device=masks.device)) & 1
    logits.masked_fill_(bits.view(masks.shape[0], -1)[:, : logits.shape[1]] == 0, -math.inf)


def sample(logits: Tensor, params: SamplingTensors, num_logprobs: int | None = None) -> SampledTokens:
    """Draw one token per row.

    Parameters
    ----------
    logits : (R, V) float32 or bfloat16, left as they are
    num_logprobs : how many alternatives to report; 0: only the drawn token's; None: nothing

    Returns
    -------
    Sampled; a row's tokens depend on that row alone
    """
    if not runs_on_gpu(logits):
        return sample_reference(logits, params, num_logprobs)
    from engine.kernels.triton_sampling import choose_triton

    edited = edit_logits(logits, params)
    token_ids, errors = choose_triton(edited, params, edited=edited is not logits)
    if edited is not logits:
        errors = torch.where(logits.amax(dim=-1).isfinite(), errors, NOT_FINITE)
    sampled = SampledTokens(token_ids, errors)
    if num_logprobs is not None:
        _add_logprobs(sampled, logits, num_logprobs)
    return sampled


def sample_reference(logits: Tensor, params: SamplingTensors, num_logprobs: int | None = None) -> SampledTokens:
    """Compute :func:`sample` in plain torch on any device."""
    edited = edit_logits(logits, params)
    token_ids, peaks = choose(edited, params)
    sampled = SampledTokens(token_ids, _errors(logits.amax(dim=-1), peaks))
    if num_logprobs is not None:
        _add_logprobs(sampled, logits, num_logprobs)
    return sampled


def _errors(raw_peaks: Tensor, peaks: Tensor) -> Tensor:
    """Return the errors: a row has NaN or +infinity exactly if its maximum is one; -infinity means nothing is left."""
    nothing = torch.where(peaks == -math.inf, NOTHING_ALLOWED, 0)
    return torch.where(raw_peaks.isfinite(), nothing, NOT_FINITE).to(torch.int32)


def edit_logits(logits: Tensor, params: SamplingTensors) -> Tensor:
    """Apply penalties, bias and bans, in this order: ``logits`` itself if there are none, else float32 (R, V)."""
    if params.penalties is None and params.bias_ids is None and params.banned_ids is None:
        return logits
    edited = logits.float()
    if params.penalties is not None:
        edited = _penalise(edited, params.penalties)
    if params.bias_ids is not None:
        assert params.bias_values is not None
        edited = edited.scatter_add(1, params.bias_ids, params.bias_values)
    if params.banned_ids is not None:
        assert params.banned_until is not None
        assert params.positions is not None
        held = (params.positions < params.banned_until)[:, None].expand_as(params.banned_ids)
        wall = torch.where(held, -math.inf, 0.0).to(torch.float32)
        # Adding is as good as writing here, and ids repeated as padding do no harm.
        edited = edited.scatter_add(1, params.banned_ids, wall)
    return edited


def _penalise(logits: Tensor, penalties: Penalties) -> Tensor:
    counts = penalties.counts.index_select(0, penalties.slots)
    seen = counts > 0
    in_text = seen | penalties.prompts.index_select(0, penalties.slots)
    repetition = penalties.repetition[:, None]
    logits = torch.where(in_text, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits = logits - counts * penalties.frequency[:, None]
    return logits - seen * penalties.presence[:, None]


def count_tokens(penalties: Penalties, token_ids: Tensor) -> None:
    """Add the tokens just drawn, (R,), to each row's counts."""
    ones = torch.ones_like(token_ids, dtype=torch.int32)
    penalties.counts.view(-1).index_add_(0, penalties.slots * penalties.counts.shape[1] + token_ids, ones)


def choose(logits: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
    """Choose each row's greedy or drawn token of edited logits, int64 (R,), with its largest logit, float32 (R,)."""
    peaks, best = logits.float().max(dim=-1)
    if params.temperature is None:
        return best, peaks
    probs = probabilities(logits, params)
    assert params.seeds is not None
    assert params.positions is not None
    drawn = draw(probs, uniforms(params.seeds, params.positions, DRAW))
    return torch.where(params.temperature == 0.0, best, drawn), peaks


def probabilities(logits: Tensor, params: SamplingTensors) -> Tensor:
    """Return float32 (R, V): temperature, then ``min_p``, ``top_k``, ``top_p``; greedy rows as at temperature 1."""
    assert params.temperature is not None
    temperature = torch.where(params.temperature == 0.0, 1.0, params.temperature)
    scaled = logits.float() / temperature[:, None]
    if params.filters:
        scaled = _filter(scaled, params)
    return torch.softmax(scaled, dim=-1)


def _filter(logits: Tensor, params: SamplingTensors) -> Tensor:
    """Write -inf over what a whole stable sort and the three limits leave out, as :mod:`engine.logit_filters` does."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    over = ordered - ordered[:, :1]
    drop = torch.zeros_like(ordered, dtype=torch.bool)
    if params.min_p is not None:
        drop |= over < params.min_p.log()[:, None]
    if params.top_k is not None:
        limit = torch.where(params.top_k > 0, params.top_k, logits.shape[1])
        drop |= torch.arange(logits.shape[1], device=logits.device) >= limit[:, None]
    if params.top_p is not None:
        mass = over.exp().masked_fill(drop, 0.0)
        # A top_p of 1 must keep a tail whose mass is lost in rounding, so it becomes 2.
        top_p = torch.where(params.top_p < 1.0, params.top_p, 2.0)[:, None]
        drop |= mass.cumsum(dim=-1) - mass >= top_p * mass.sum(dim=-1, keepdim=True)
    drop[:, 0] = False
    return torch.full_like(logits, -math.inf).scatter_(1, order, ordered.masked_fill(drop, -math.inf))


def draw(probs: Tensor, at: Tensor) -> Tensor:
    """Invert each row's cumulative distribution, (R, V), at its uniform number, float64 (R,); int64 (R,)."""
    # float64: over 100,000 tokens a float32 running sum would lose tokens of probability 1e-7.
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    found = torch.searchsorted(cumulative, at[:, None] * cumulative[:, -1:], right=True).squeeze(1)
    return found.clamp_max(probs.shape[1] - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift without the sign: int64 stands for an unsigned number here."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def uniforms(seeds: Tensor, positions: Tensor, stream: int = DRAW) -> Tensor:
    """Compute :func:`engine.rng.uniform` bit for bit: float64 (R,) of int64 (R,) seeds (modulo 2**64) and positions."""
    x = _mix(seeds + _GOLDEN)
    x = _mix(x + (positions + 1) * _GOLDEN)
    x = _mix(x + _signed((stream + 1) * 0x9E3779B97F4A7C15 & (1 << 64) - 1))
    return _shifted(x, 12).to(torch.float64) * 2.0**-52


def _add_logprobs(sampled: SampledTokens, logits: Tensor, num_logprobs: int) -> None:
    """Add log-probability and rank of the drawn tokens, and the likeliest ones, from the unedited logits."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(1, sampled.token_ids[:, None])
    sampled.logprobs = chosen.squeeze(1)
    sampled.ranks = (logprobs > chosen).sum(dim=-1)
    if num_logprobs > 0:
        sampled.top_logprobs, sampled.top_ids = logprobs.topk(min(num_logprobs, logits.shape[1]), dim=-1)
