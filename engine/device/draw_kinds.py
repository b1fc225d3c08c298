"""Decides how the rows of a step are drawn from: on the device where every row's options allow it, else by the host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from engine.device.logprob_buffers import MOST_ALTERNATIVES
from engine.device.step_buffers import DeviceFields, HostFields
from engine.device.token_counts import is_penalised
from engine.errors import EngineError
from engine.kernels.sampling import SamplingTensors
from engine.request import SamplingParams
from engine.sampler import not_finite
from engine.sequence import Sequence

_SIGN = 1 << 63


class DrawKind(Enum):
    """Names the kinds of draw, the least first; a step takes the greatest that any of its rows needs."""

    GREEDY = 0  # the likeliest token
    SCALED = 1  # a draw at a temperature
    FILTERED = 2  # a draw among what min_p, top_k and top_p leave
    BY_HOST = 3  # whatever the sampler can do; the host waits for the logits


@dataclass(frozen=True, slots=True)
class DrawExtras:
    """Says what a step's draws on the device need beside; a step does for all rows what one of them needs.

    Parameters
    ----------
    penalised : tokens seen so far count, see :mod:`engine.device.token_counts`
    reported : log-probabilities are wanted, see :mod:`engine.device.logprob_buffers`
    masked : grammars rule tokens out, see :mod:`engine.device.mask_buffers`
    """

    penalised: bool = False
    reported: bool = False
    masked: bool = False

    @property
    def suits_drafts(self) -> bool:
        """Tell whether drafts can be checked on the device beside these."""
        return not (self.penalised or self.reported)

    @classmethod
    def of(cls, sequences: Iterable[Sequence]) -> DrawExtras:
        sequences = list(sequences)
        return cls(
            any(map(is_penalised, sequences)),
            any(sequence.request.sampling.logprobs is not None for sequence in sequences),
            any(sequence.grammar is not None for sequence in sequences),
        )


def needs_host(sequence: Sequence) -> bool:
    """Tell whether only the host's sampler can draw for a sequence, so that it must know the tokens before."""
    sampling = sequence.request.sampling
    return bool(
        sampling.logit_bias
        or (sampling.logprobs or 0) > MOST_ALTERNATIVES
        # One more than is needed: a token may be due.
        or sequence.num_output <= sampling.min_tokens > 0
    )


def draws_of(sequence: Sequence) -> DrawKind:
    """Return the least kind that serves one sequence."""
    if needs_host(sequence):
        return DrawKind.BY_HOST
    sampling = sequence.request.sampling
    if sampling.temperature == 0.0:
        return DrawKind.GREEDY
    is_filtered = sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0
    return DrawKind.FILTERED if is_filtered else DrawKind.SCALED


def put_row(host: HostFields, row: int, sequence: Sequence, position: int) -> None:
    """Write one row's options; ``position`` is that of the token to be drawn."""
    sampling: SamplingParams = sequence.request.sampling
    seed = sequence.seed & (2 * _SIGN - 1)
    host.seeds[row] = seed - 2 * _SIGN if seed >= _SIGN else seed
    host.draw_positions[row] = position
    host.temperature[row] = sampling.temperature
    host.top_k[row] = sampling.top_k
    host.top_p[row] = sampling.top_p
    host.min_p[row] = sampling.min_p
    host.presence[row] = sampling.presence_penalty
    host.frequency[row] = sampling.frequency_penalty
    host.repetition[row] = sampling.repetition_penalty


def sampling_tensors(fields: DeviceFields, draws: DrawKind) -> SamplingTensors:
    """Return the options of every row, as far as ``draws`` needs them."""
    params = SamplingTensors(positions=fields.draw_positions)
    if draws is not DrawKind.GREEDY:
        params.temperature = fields.temperature
        params.seeds = fields.seeds
    if draws is DrawKind.FILTERED:
        params.top_k, params.top_p, params.min_p = fields.top_k, fields.top_p, fields.min_p
    return params


def put_padding(host: HostFields, first: int) -> None:
    """Write harmless options for rows that nobody looks at, from ``first`` on."""
    host.seeds[first:] = 0
    host.draw_positions[first:] = 0
    host.temperature[first:] = 1.0
    host.top_k[first:] = 0
    host.top_p[first:] = 1.0
    host.min_p[first:] = 0.0
    host.presence[first:] = 0.0
    host.frequency[first:] = 0.0
    host.repetition[first:] = 1.0


def error_of(code: int) -> EngineError | None:
    """Return the error of a row's code. Rows that could rule out every token are drawn by the host."""
    return not_finite() if code else None
