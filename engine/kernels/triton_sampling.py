"""Triton programs of :mod:`engine.kernels.sampling`: the likeliest token, and a draw by the inverted distribution.

A row's vocabulary is cut into chunks, one program each; a second launch of one program a row puts the chunks together.
Rows with ``min_p``, ``top_k`` or ``top_p`` are sorted by torch first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.sampling import SamplingTensors, choose, uniforms
from engine.sampler import DRAW

CHUNK = 4096


def choose_triton(logits: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
    """:func:`engine.kernels.sampling.choose` on a GPU."""
    if params.filters:
        return choose(logits, params)
    logits = logits.contiguous()
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    peaks = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    best = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    sums = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    row_peaks = torch.empty(rows, dtype=torch.float32, device=logits.device)
    draws = params.temperature is not None
    if draws:
        assert params.seeds is not None
        assert params.positions is not None
        at = uniforms(params.seeds, params.positions, DRAW)
    temperature = params.temperature if params.temperature is not None else row_peaks
    _scan_chunk[(rows, chunks)](
        logits, temperature, peaks, best, sums, vocab, chunks, DRAWS=draws, CHUNK=CHUNK, num_warps=8
    )
    _choose_row[(rows,)](
        logits,
        temperature,
        at if draws else row_peaks,
        peaks,
        best,
        sums,
        token_ids,
        row_peaks,
        vocab,
        chunks,
        DRAWS=draws,
        CHUNK=CHUNK,
        CHUNKS=triton.next_power_of_2(chunks),
        num_warps=8,
    )
    return token_ids, row_peaks


@triton.jit
def _first_true(is_true: tl.tensor, N: tl.constexpr) -> tl.tensor:
    """Index of the first True, N if there is none."""
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
) -> None:
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
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
def _choose_row(
    logits: tl.tensor,
    temperature: tl.tensor,
    uniform: tl.tensor,
    peaks: tl.tensor,
    best: tl.tensor,
    sums: tl.tensor,
    token_ids: tl.tensor,
    row_peaks: tl.tensor,
    vocab: tl.tensor,
    chunks: tl.tensor,
    DRAWS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    is_chunk = chunk < chunks
    tops = tl.load(peaks + row * chunks + chunk, mask=is_chunk, other=float("-inf"))
    has_nan = tl.max((tops != tops).to(tl.int32), axis=0)
    peak = tl.max(tl.where(tops == tops, tops, float("-inf")), axis=0)
    tl.store(row_peaks + row, tl.where(has_nan > 0, float("nan"), peak))
    winner = tl.minimum(_first_true(is_chunk & (tops == peak), CHUNKS), chunks - 1)
    token = tl.minimum(tl.load(best + row * chunks + winner), vocab - 1)
    if DRAWS:
        inverse = _inverse_temperature(temperature, row)
        is_finite = (has_nan == 0) & (peak < float("inf")) & (peak > float("-inf"))
        if is_finite & (tl.load(temperature + row) != 0.0):
            # float64 where sums over the vocabulary meet: a draw hits the same token as the host's, but for rounding
            # of single exponentials.
            scaled = tl.exp((tops - peak) * inverse)
            masses = tl.load(sums + row * chunks + chunk, mask=is_chunk, other=0.0).to(tl.float64) * scaled
            masses = tl.where(tops > float("-inf"), masses, 0.0)
            cumulative = tl.cumsum(masses, axis=0)
            target = tl.load(uniform + row) * tl.sum(masses, axis=0)
            last = tl.max(tl.where(masses > 0.0, chunk, 0), axis=0)
            found = tl.minimum(_first_true(cumulative > target, CHUNKS), last)
            before = tl.sum(tl.where(chunk < found, masses, 0.0), axis=0)
            at = tl.arange(0, CHUNK)
            inside = found * CHUNK + at < vocab
            values = tl.load(logits + row * vocab + found * CHUNK + at, mask=inside, other=float("-inf")).to(tl.float32)
            weights = tl.exp((values - peak) * inverse).to(tl.float64)
            within = before + tl.cumsum(weights, axis=0)
            last_token = tl.max(tl.where(weights > 0.0, at, 0), axis=0)
            token = found * CHUNK + tl.minimum(_first_true(within > target, CHUNK), last_token)
    tl.store(token_ids + row, token.to(tl.int64))
