"""Holds the Triton programs of :mod:`engine.kernels.sampling`: the likeliest token, and a draw by inverse transform.

A row's vocabulary is cut into chunks, one program each, for maxima and sums; a second launch of one program a row puts
the chunks together and draws. Where ``min_p``, ``top_k`` or ``top_p`` rule tokens out, a program looks for the smallest
logit that stays by bisection: each probe counts and weighs the tokens above a value, so nothing is sorted. Sums over
chunks are float64; a draw is the host's but for the rounding of single exponentials.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.sampling import NOT_FINITE, NOTHING_ALLOWED, SamplingTensors
from engine.kernels.triton_launch import early_start
from engine.sampler import DRAW

CHUNK = 4096
PROBE = 8192  # tokens; a probe looks at two of these in one go

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)
_STREAM = tl.constexpr((DRAW + 1) * 0x9E3779B97F4A7C15 % 2**64)
_NOT_FINITE = tl.constexpr(NOT_FINITE)
_NOTHING_ALLOWED = tl.constexpr(NOTHING_ALLOWED)
_LEAST = tl.constexpr(-87.0)  # exp of less is no float32; such tokens are never drawn


def choose_triton(logits: Tensor, params: SamplingTensors, *, edited: bool) -> tuple[Tensor, Tensor]:
    """Launch :func:`engine.kernels.sampling.choose` on a GPU, with error flags.

    Parameters
    ----------
    edited : a row without any finite logit means that nothing is allowed, not that the model failed

    Returns
    -------
    int64 (R,) token ids, int32 (R,) errors
    """
    logits = logits.contiguous()
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    device = logits.device
    # Per chunk: largest logit, its place, sum of exponentials.
    peaks, sums = torch.empty(2, rows, chunks, dtype=torch.float32, device=device)
    best = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    token_ids = torch.empty(rows, dtype=torch.int64, device=device)
    errors = torch.empty(rows, dtype=torch.int32, device=device)
    draws, filters = params.temperature is not None, params.temperature is not None and params.filters
    temperature = peaks if params.temperature is None else params.temperature
    _scan_chunk[(rows, chunks)](
        logits,
        temperature,
        peaks,
        best,
        sums,
        vocab,
        chunks,
        DRAWS=draws,
        CHUNK=CHUNK,
        num_warps=8,
        **early_start(logits),
    )
    _choose_row[(rows,)](
        logits,
        temperature,
        token_ids if params.seeds is None else params.seeds,
        token_ids if params.positions is None else params.positions,
        peaks if params.min_p is None else params.min_p,
        token_ids if params.top_k is None else params.top_k,
        peaks if params.top_p is None else params.top_p,
        peaks,
        best,
        sums,
        token_ids,
        errors,
        vocab,
        chunks,
        DRAWS=draws,
        FILTERS=filters,
        MIN_P=params.min_p is not None,
        TOP_K=params.top_k is not None,
        TOP_P=params.top_p is not None,
        EDITED=edited,
        CHUNK=CHUNK,
        CHUNKS=triton.next_power_of_2(chunks),
        PROBE=PROBE,
        SPAN=2 * PROBE // CHUNK,
        num_warps=32 if filters else 8,
        **early_start(logits),
    )
    return token_ids, errors


def mask_triton(logits: Tensor, masks: Tensor) -> None:
    """Launch :func:`engine.kernels.sampling.mask_logits` on a GPU; ``logits`` are contiguous."""
    rows, vocab = logits.shape
    _mask_chunk[(rows, triton.cdiv(vocab, CHUNK))](logits, masks, vocab, masks.shape[1], CHUNK=CHUNK, num_warps=8)


@triton.jit
def _mask_chunk(logits: tl.tensor, masks: tl.tensor, vocab: tl.tensor, words: tl.tensor, CHUNK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    word = tl.load(masks + row * words + at // 32, mask=at < vocab, other=-1)
    is_ruled_out = ((word >> (at % 32)) & 1) == 0
    # Only what is ruled out is written, so that rows without a grammar cost no more than reading their masks.
    tl.store(logits + row * vocab + at, float("-inf"), mask=is_ruled_out & (at < vocab))


@triton.jit
def _first_true(is_true: tl.tensor, N: tl.constexpr) -> tl.tensor:
    """Return the index of the first True, N if there is none."""
    return tl.min(tl.where(is_true, tl.arange(0, N), N), axis=0)


@triton.jit
def _inverse_temperature(temperature: tl.tensor, row: tl.tensor) -> tl.tensor:
    value = tl.load(temperature + row)
    return 1.0 / tl.where(value == 0.0, 1.0, value)


@triton.jit
def _scan_chunk(
    logits: tl.tensor,
    temperature: tl.tensor,
    peaks: tl.tensor,
    best: tl.tensor,
    sums: tl.tensor,
    vocab: tl.tensor,
    chunks: tl.tensor,
    DRAWS: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    has_nan = tl.max((values != values).to(tl.int32), axis=0)
    peak = tl.max(tl.where(values == values, values, float("-inf")), axis=0)
    place = row * chunks + chunk
    tl.store(best + place, chunk * CHUNK + _first_true(values == peak, CHUNK))
    if DRAWS:
        anchor = tl.where(peak == float("-inf"), 0.0, peak)
        weights = tl.exp((values - anchor) * _inverse_temperature(temperature, row))
        tl.store(sums + place, tl.sum(weights, axis=0))
    tl.store(peaks + place, tl.where(has_nan > 0, float("nan"), peak))


@triton.jit
def _mix(x: tl.tensor) -> tl.tensor:
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Compute :func:`engine.rng.uniform`, bit for bit."""
    x = _mix(seed.to(tl.uint64) + _GOLDEN)
    x = _mix(x + (position.to(tl.uint64) + 1) * _GOLDEN)
    x = _mix(x + _STREAM)
    return (x >> 12).to(tl.float64) * 2.220446049250313e-16


@triton.jit
def _probe(
    base: tl.tensor,
    peaks: tl.tensor,
    vocab: tl.tensor,
    chunks: tl.tensor,
    at_value: tl.tensor,
    least: tl.tensor,
    peak: tl.tensor,
    inverse: tl.tensor,
    floor: tl.tensor,
    PROBE: tl.constexpr,
    SPAN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Find, of a row's tokens not below the floor, how many lie above a value, their mass, the least, and the largest
    not above it."""
    count = tl.zeros([PROBE], tl.int32)
    mass = tl.zeros([PROBE], tl.float32)
    above = tl.full([PROBE], float("inf"), tl.float32)
    below = tl.full([PROBE], float("-inf"), tl.float32)
    for span in range(tl.cdiv(chunks, SPAN)):
        # Chunks without anything from ``least`` on are passed by: it is a logit of the row, not above the value.
        if (
            tl.max(
                tl.load(
                    peaks + span * SPAN + tl.arange(0, SPAN),
                    mask=span * SPAN + tl.arange(0, SPAN) < chunks,
                    other=float("-inf"),
                ),
                axis=0,
            )
            >= least
        ):
            for half in tl.static_range(2):
                at = (2 * span + half) * PROBE + tl.arange(0, PROBE)
                values = tl.load(base + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
                over = (values - peak) * inverse
                is_above = (values > at_value) & (over >= floor)
                count += is_above.to(tl.int32)
                mass += tl.where(is_above, tl.exp(over), 0.0)
                above = tl.minimum(above, tl.where(is_above, values, float("inf")))
                below = tl.maximum(below, tl.where(values <= at_value, values, float("-inf")))
    return tl.sum(count, axis=0), tl.sum(mass, axis=0), tl.min(above, axis=0), tl.max(below, axis=0)


@triton.jit
def _search(
    base: tl.tensor,
    peaks: tl.tensor,
    vocab: tl.tensor,
    chunks: tl.tensor,
    least: tl.tensor,
    most_tokens: tl.tensor,
    most_mass: tl.tensor,
    peak: tl.tensor,
    inverse: tl.tensor,
    floor: tl.tensor,
    PROBE: tl.constexpr,
    SPAN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Find the smallest logit above which lie fewer than ``most_tokens`` tokens with less than ``most_mass``.

    Returns it, how many lie above it, and with which mass. ``least`` is the smallest logit not below the floor.
    """
    low, high = least, peak  # both are logits of the row; high stays, low is not known to
    count, mass, _above, _below = _probe(base, peaks, vocab, chunks, low, low, peak, inverse, floor, PROBE, SPAN)
    high_count, high_mass = tl.zeros_like(count), tl.zeros_like(mass)
    if (count < most_tokens) & (mass < most_mass):
        high, high_count, high_mass = low, count, mass
    while low < high:
        middle = low + (high - low) * 0.5
        middle = tl.where((middle >= high) | (middle < low), low, middle)
        count, mass, above, below = _probe(base, peaks, vocab, chunks, middle, low, peak, inverse, floor, PROBE, SPAN)
        if (count < most_tokens) & (mass < most_mass):
            high, high_count, high_mass = below, count, mass
        else:
            low = above
    return high, high_count, high_mass


@triton.jit
def _inside_chunk(weights: tl.tensor, before: tl.tensor, target: tl.tensor, CHUNK: tl.constexpr) -> tl.tensor:
    """Place in a chunk of the token at which the running sum exceeds the target; one of positive weight."""
    at = tl.arange(0, CHUNK)
    cumulative = before + tl.cumsum(weights.to(tl.float64), axis=0)
    last = tl.max(tl.where(weights > 0.0, at, 0), axis=0)
    return tl.minimum(_first_true(cumulative > target, CHUNK), last)


@triton.jit
def _draw_any(
    base: tl.tensor,
    sums: tl.tensor,
    tops: tl.tensor,
    vocab: tl.tensor,
    chunks: tl.tensor,
    uniform: tl.tensor,
    peak: tl.tensor,
    inverse: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> tl.tensor:
    """Draw among all tokens, from the chunks' sums, which were taken each against its own peak."""
    chunk = tl.arange(0, CHUNKS)
    scaled = tl.exp((tops - peak) * inverse).to(tl.float64)
    masses = tl.load(sums + chunk, mask=chunk < chunks, other=0.0).to(tl.float64) * scaled
    masses = tl.where(tops > float("-inf"), masses, 0.0)
    target = uniform * tl.sum(masses, axis=0)
    last = tl.max(tl.where(masses > 0.0, chunk, 0), axis=0)
    found = tl.minimum(_first_true(tl.cumsum(masses, axis=0) > target, CHUNKS), last)
    before = tl.sum(tl.where(chunk < found, masses, 0.0), axis=0)
    at = found * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(base + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    weights = tl.exp((values - peak) * inverse)
    return found * CHUNK + _inside_chunk(weights, before, target, CHUNK)


@triton.jit
def _draw_filtered(
    base: tl.tensor,
    peaks: tl.tensor,
    vocab: tl.tensor,
    chunks: tl.tensor,
    uniform: tl.tensor,
    min_p: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    peak: tl.tensor,
    inverse: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PROBE: tl.constexpr,
    SPAN: tl.constexpr,
) -> tl.tensor:
    """Draw among the tokens that ``min_p``, then ``top_k``, then ``top_p`` leave; of equal logits the first stay."""
    floor = tl.maximum(tl.log(min_p), _LEAST)
    most_tokens = tl.where(top_k > 0, tl.minimum(top_k, vocab), vocab).to(tl.int32)
    # Everything not below the floor.
    _count, total, least, _below = _probe(
        base, peaks, vocab, chunks, float("-inf"), float("-inf"), peak, inverse, floor, PROBE, SPAN
    )
    if (top_k > 0) & (top_p < 1.0):
        edge, count, mass = _search(
            base, peaks, vocab, chunks, least, most_tokens, float("inf"), peak, inverse, floor, PROBE, SPAN
        )
        # top_p is of what top_k leaves: of the edge's equals as many as there is room for, if there are so many.
        total = tl.minimum(mass + (most_tokens - count) * tl.exp((edge - peak) * inverse), total)
    most_mass = tl.where(top_p < 1.0, top_p * total, float("inf"))
    edge, count, mass = _search(
        base, peaks, vocab, chunks, least, most_tokens, most_mass, peak, inverse, floor, PROBE, SPAN
    )
    weight = tl.exp((edge - peak) * inverse)  # of a token at the edge
    room = tl.minimum((most_tokens - count).to(tl.float32), tl.ceil((most_mass - mass) / weight))
    equals = tl.maximum(tl.minimum(room, 2147480000.0).to(tl.int32), 1)

    # Mass per chunk of what stays: all above the edge, and as many equals as there is room for, from the first id on.
    chunk = tl.arange(0, CHUNKS)
    at = tl.arange(0, CHUNK)
    masses = tl.zeros([CHUNKS], tl.float64)
    earlier = tl.zeros([CHUNKS], tl.int32)  # equals in the chunks before
    num_equals = tl.zeros_like(count)
    for index in range(chunks):
        values = tl.load(base + index * CHUNK + at, mask=index * CHUNK + at < vocab, other=float("-inf")).to(tl.float32)
        above = tl.sum(tl.where(values > edge, tl.exp((values - peak) * inverse), 0.0), axis=0)
        here = tl.sum((values == edge).to(tl.int32), axis=0)
        kept = tl.minimum(tl.maximum(equals - num_equals, 0), here)
        masses = tl.where(chunk == index, above.to(tl.float64) + kept.to(tl.float64) * weight.to(tl.float64), masses)
        earlier = tl.where(chunk == index, num_equals, earlier)
        num_equals += here
    target = uniform * tl.sum(masses, axis=0)
    last = tl.max(tl.where(masses > 0.0, chunk, 0), axis=0)
    found = tl.minimum(_first_true(tl.cumsum(masses, axis=0) > target, CHUNKS), last)
    before = tl.sum(tl.where(chunk < found, masses, 0.0), axis=0)
    rank = tl.sum(tl.where(chunk == found, earlier, 0), axis=0)
    values = tl.load(base + found * CHUNK + at, mask=found * CHUNK + at < vocab, other=float("-inf")).to(tl.float32)
    is_equal = values == edge
    place = rank + tl.cumsum(is_equal.to(tl.int32), axis=0)  # from 1
    stays = (values > edge) | (is_equal & (place <= equals))
    weights = tl.where(stays, tl.exp((values - peak) * inverse), 0.0)
    return found * CHUNK + _inside_chunk(weights, before, target, CHUNK)


@triton.jit
def _choose_row(
    logits: tl.tensor,
    temperature: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    min_p: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    peaks: tl.tensor,
    best: tl.tensor,
    sums: tl.tensor,
    token_ids: tl.tensor,
    errors: tl.tensor,
    vocab: tl.tensor,
    chunks: tl.tensor,
    DRAWS: tl.constexpr,
    FILTERS: tl.constexpr,
    MIN_P: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    EDITED: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PROBE: tl.constexpr,
    SPAN: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    chunk = tl.arange(0, CHUNKS)
    is_chunk = chunk < chunks
    tops = tl.load(peaks + row * chunks + chunk, mask=is_chunk, other=float("-inf"))
    has_nan = tl.max((tops != tops).to(tl.int32), axis=0) > 0
    peak = tl.max(tl.where(tops == tops, tops, float("-inf")), axis=0)
    is_finite = (not has_nan) & (peak < float("inf")) & (peak > float("-inf"))
    error = tl.where(is_finite, 0, _NOT_FINITE)
    if EDITED:
        error = tl.where((not has_nan) & (peak == float("-inf")), _NOTHING_ALLOWED, error)
    tl.store(errors + row, error)
    winner = tl.minimum(_first_true(is_chunk & (tops == peak), CHUNKS), chunks - 1)
    token = tl.minimum(tl.load(best + row * chunks + winner), vocab - 1)
    if DRAWS:
        inverse = _inverse_temperature(temperature, row)
        if is_finite & (tl.load(temperature + row) != 0.0):
            base = logits + row * vocab
            uniform = _uniform(tl.load(seeds + row), tl.load(positions + row))
            least_share, most, share = 0.0, 0, 1.0
            if MIN_P:
                least_share = tl.load(min_p + row)
            if TOP_K:
                most = tl.load(top_k + row).to(tl.int32)
            if TOP_P:
                share = tl.load(top_p + row)
            own_sums = sums + row * chunks
            if FILTERS:
                if (least_share > 0.0) | (most > 0) | (share < 1.0):
                    token = _draw_filtered(
                        base,
                        peaks + row * chunks,
                        vocab,
                        chunks,
                        uniform,
                        least_share,
                        most,
                        share,
                        peak,
                        inverse,
                        CHUNK,
                        CHUNKS,
                        PROBE,
                        SPAN,
                    )
                else:
                    token = _draw_any(base, own_sums, tops, vocab, chunks, uniform, peak, inverse, CHUNK, CHUNKS)
            else:
                token = _draw_any(base, own_sums, tops, vocab, chunks, uniform, peak, inverse, CHUNK, CHUNKS)
    tl.store(token_ids + row, token.to(tl.int64))
