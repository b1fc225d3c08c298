"""Draws the next token from logits, for many requests at once and each as if alone.

Every operation works on rows, and no row looks at another, so a request's draw does not depend on its neighbours. Work
that only some rows need (penalties, filters, log-probabilities) is done on those rows alone; a batch of plain greedy
rows is one ``max``. Tokens that a row's grammar rules out are so from the start, for log-probabilities too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from engine.errors import EngineError, NonFiniteLogits, NothingAllowed
from engine.logit_filters import filter_logits
from engine.mask_filler import MaskedRows, MaskFiller
from engine.request import SamplingParams, TokenLogprob
from engine.rng import uniform
from engine.sequence import Sequence

DRAW = 0  # the stream of `uniform` that chooses tokens

# float32 keeps differences of 1e-3 next to a bias of this size, and exp of the difference is 0 long before.
_BIAS_LIMIT = 1e4


@dataclass(slots=True)
class LogitsRow:
    """Names one distribution: the next token of ``sequence`` if ``drafts`` came first."""

    sequence: Sequence
    drafts: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        return len(self.sequence.token_ids) + len(self.drafts)


@dataclass(slots=True)
class Draw:
    """Holds a drawn token, or why there is none."""

    token_id: int
    logprob: TokenLogprob | None = None
    error: EngineError | None = None


class SamplerState:
    """Holds what the sampler keeps of a request: which work its rows need, and counts of its tokens so far."""

    __slots__ = ("bias", "counts", "greedy", "num_counted", "params", "penalised", "prompt", "scaled_only", "top")

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.greedy = params.temperature == 0.0
        self.top = params.logprobs
        self.scaled_only = params.top_p >= 1.0 and params.top_k == 0 and params.min_p == 0.0
        self.penalised = (
            params.presence_penalty != 0.0 or params.frequency_penalty != 0.0 or params.repetition_penalty != 1.0
        )
        self.counts: Tensor | None = None  # int32 (V,), of the output
        self.prompt: Tensor | None = None  # bool (V,), tokens of the prompt
        self.num_counted = 0
        self.bias: tuple[Tensor, Tensor] | None = None


class Sampler:
    """Draws tokens.

    Parameters
    ----------
    vocab_size : V, the width of the logits
    device : where logits live
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._mask_filler = MaskFiller()

    def state_of(self, sequence: Sequence) -> SamplerState:
        state = sequence.sampler_state
        if state is None:
            state = sequence.sampler_state = SamplerState(sequence.request.sampling)
        assert isinstance(state, SamplerState)
        return state

    def sample(self, logits: Tensor, rows: Seq[LogitsRow]) -> list[Draw]:
        """Draw one token per row.

        Parameters
        ----------
        logits : float32 (R, V); may be overwritten
        rows : R of them

        Returns
        -------
        R draws; a row with NaN or infinity carries an error, the others are as if it were not there
        """
        self.mask(logits, rows)
        if all(self._is_plain(row) for row in rows):
            peaks, best = logits.max(dim=-1)
            return [
                Draw(token) if math.isfinite(peak) else Draw(-1, error=not_finite())
                for token, peak in zip(best.tolist(), peaks.tolist(), strict=True)
            ]
        errors = self.errors(logits)
        edited = self.edit(logits, rows, errors)
        ids = self.choose(edited, rows)
        return self.report(logits, rows, ids, errors)

    def mask(self, logits: Tensor, rows: Seq[LogitsRow]) -> None:
        """Write -inf over what the rows' grammars rule out.

        Parameters
        ----------
        logits : float32 (R, V), overwritten
        rows : R of them, those of one sequence next to each other
        """
        constrained = [i for i, row in enumerate(rows) if row.sequence.grammar is not None]
        if not constrained:
            return
        masks = np.empty((len(constrained), -(-self.vocab_size // 32)), dtype=np.int32)
        masked: list[MaskedRows] = []
        first = 0
        for sequence, group in groupby([rows[i] for i in constrained], key=lambda row: row.sequence):
            own = list(group)
            assert sequence.grammar is not None
            masked.append(MaskedRows(sequence.grammar, first, len(own), own[-1].drafts))
            first += len(own)
        self._mask_filler.fill(masks, masked)
        bits = np.unpackbits(masks.view(np.uint8), axis=1, count=self.vocab_size, bitorder="little")
        ruled_out = torch.from_numpy(bits).to(logits.device) == 0
        if len(constrained) == len(rows):
            logits.masked_fill_(ruled_out, -math.inf)
            return
        for place, i in enumerate(constrained):
            logits[i].masked_fill_(ruled_out[place], -math.inf)

    def _is_plain(self, row: LogitsRow) -> bool:
        state = self.state_of(row.sequence)
        return state.greedy and state.top is None and not self._is_edited(row, state)

    def _is_edited(self, row: LogitsRow, state: SamplerState) -> bool:
        params = state.params
        return state.penalised or bool(params.logit_bias) or row.position - row.sequence.num_prompt < params.min_tokens

    def errors(self, logits: Tensor) -> dict[int, EngineError]:
        """Find rows that hold NaN or +infinity; a row's maximum is one of those exactly if the row has one."""
        return {i: not_finite() for i, peak in enumerate(logits.amax(dim=-1).tolist()) if not math.isfinite(peak)}

    def edit(self, logits: Tensor, rows: Seq[LogitsRow], errors: dict[int, EngineError]) -> Tensor:
        """Apply penalties, bias and the least length; (R, V) again, the argument untouched.

        Rows left without any allowed token are added to ``errors``.
        """
        states = [self.state_of(row.sequence) for row in rows]
        touched = [i for i, row in enumerate(rows) if self._is_edited(row, states[i])]
        if not touched:
            return logits
        edited = logits.clone()
        penalised = [i for i in touched if states[i].penalised]
        if penalised:
            edited[penalised] = self._penalise(edited[penalised], [rows[i] for i in penalised])
        for i in touched:
            self._edit_row(edited[i], rows[i], states[i])
        for i, peak in zip(touched, edited[touched].amax(dim=-1).tolist(), strict=True):
            if peak == -math.inf and i not in errors:
                errors[i] = NothingAllowed(
                    "The request's stop_token_ids and min_tokens together rule out every next token; allow one."
                )
        return edited

    def _penalise(self, logits: Tensor, rows: Seq[LogitsRow]) -> Tensor:
        params = [row.sequence.request.sampling for row in rows]
        counts = torch.stack([self._counts(row) for row in rows])
        prompts = torch.stack([self._prompt(row.sequence) for row in rows])
        seen = counts > 0
        repetition = self._column([p.repetition_penalty for p in params])
        logits = torch.where(seen | prompts, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
        logits = logits - counts * self._column([p.frequency_penalty for p in params])
        return logits - seen * self._column([p.presence_penalty for p in params])

    def _counts(self, row: LogitsRow) -> Tensor:
        state, sequence = self.state_of(row.sequence), row.sequence
        if state.counts is None:
            state.counts = torch.zeros(self.vocab_size, dtype=torch.int32, device=self.device)
        fresh = sequence.token_ids[sequence.num_prompt + state.num_counted :]
        if fresh:
            state.counts += self._histogram(fresh)
            state.num_counted += len(fresh)
        return state.counts + self._histogram(row.drafts) if row.drafts else state.counts

    def _prompt(self, sequence: Sequence) -> Tensor:
        state = self.state_of(sequence)
        if state.prompt is None:
            state.prompt = self._histogram(sequence.token_ids[: sequence.num_prompt]) > 0
        return state.prompt

    def _histogram(self, token_ids: Seq[int]) -> Tensor:
        ids = torch.tensor(token_ids, dtype=torch.int64, device=self.device)
        ones = torch.ones(len(token_ids), dtype=torch.int32, device=self.device)
        return torch.zeros(self.vocab_size, dtype=torch.int32, device=self.device).index_add_(0, ids, ones)

    def _edit_row(self, logits: Tensor, row: LogitsRow, state: SamplerState) -> None:
        params, sequence = state.params, row.sequence
        if params.logit_bias:
            if state.bias is None:
                values = [max(-_BIAS_LIMIT, min(_BIAS_LIMIT, b)) for b in params.logit_bias.values()]
                state.bias = (
                    torch.tensor(list(params.logit_bias), dtype=torch.int64, device=self.device),
                    torch.tensor(values, dtype=torch.float32, device=self.device),
                )
            logits.index_add_(0, *state.bias)
        if row.position - sequence.num_prompt < params.min_tokens and sequence.stop_ids:
            banned = list(sequence.stop_ids)
            kept = logits[banned]
            logits[banned] = -math.inf
            if sequence.grammar is not None and float(logits.max()) == -math.inf:
                logits[banned] = kept  # an answer that can only end goes before the least length

    def choose(self, logits: Tensor, rows: Seq[LogitsRow]) -> list[int]:
        """Take the likeliest token of greedy rows and draw the others, from edited logits."""
        ids: list[int] = logits.argmax(dim=-1).tolist()
        drawn = [i for i, row in enumerate(rows) if not self.state_of(row.sequence).greedy]
        if drawn:
            some = [rows[i] for i in drawn]
            probs = self.probabilities(logits[drawn] if len(drawn) < len(rows) else logits, some)
            uniforms = [uniform(row.sequence.seed, row.position, DRAW) for row in some]
            for i, token in zip(drawn, draw(probs, uniforms), strict=True):
                ids[i] = token
        return ids

    def probabilities(self, logits: Tensor, rows: Seq[LogitsRow]) -> Tensor:
        """Return float32 (R, V): temperature, then ``min_p``, ``top_k``, ``top_p``; greedy rows put 1 on one token."""
        states = [self.state_of(row.sequence) for row in rows]
        scaled = logits / self._column([state.params.temperature or 1.0 for state in states])
        filtered = [i for i, state in enumerate(states) if not (state.greedy or state.scaled_only)]
        if filtered:
            scaled[filtered] = filter_logits(scaled[filtered], [states[i].params for i in filtered])
        probs = torch.softmax(scaled, dim=-1)
        greedy = [i for i, state in enumerate(states) if state.greedy]
        if greedy:
            best = logits[greedy].argmax(dim=-1)
            probs[greedy] = torch.nn.functional.one_hot(best, self.vocab_size).to(probs.dtype)
        return probs

    def report(self, logits: Tensor, rows: Seq[LogitsRow], ids: Seq[int], errors: dict[int, EngineError]) -> list[Draw]:
        """Put draws, log-probabilities (from the unedited logits) and errors together."""
        draws = [Draw(token, error=errors.get(i)) for i, token in enumerate(ids)]
        wanted = [i for i, row in enumerate(rows) if self.state_of(row.sequence).top is not None and i not in errors]
        if wanted:
            tops = [self.state_of(rows[i].sequence).top or 0 for i in wanted]
            for i, logprob in zip(wanted, token_logprobs(logits[wanted], [ids[i] for i in wanted], tops), strict=True):
                draws[i].logprob = logprob
        return draws

    def _column(self, values: Seq[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device).unsqueeze(1)


def draw(probs: Tensor, uniforms: Seq[float]) -> list[int]:
    """Invert each row's cumulative distribution at its uniform number.

    Parameters
    ----------
    probs : float32 (R, V), not negative; a row need not sum to 1
    uniforms : R numbers in [0, 1)

    Returns
    -------
    R token ids of positive probability
    """
    # float64: over 100,000 tokens a float32 running sum would lose tokens of probability 1e-7.
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    at = torch.tensor(uniforms, dtype=torch.float64, device=probs.device).unsqueeze(1) * cumulative[:, -1:]
    # right=True gives the first token whose running sum exceeds the number, so one of positive probability.
    found: list[int] = torch.searchsorted(cumulative, at, right=True).squeeze(1).tolist()
    return [min(token, probs.shape[1] - 1) for token in found]


def token_logprobs(logits: Tensor, ids: Seq[int], tops: Seq[int]) -> list[TokenLogprob]:
    """Return the log-probability and rank of one token per row, with the row's likeliest alternatives.

    Parameters
    ----------
    logits : float32 (R, V), as the model gave them
    ids : R token ids
    tops : R counts of alternatives
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    index = torch.tensor(ids, dtype=torch.int64, device=logits.device).unsqueeze(1)
    chosen = logprobs.gather(1, index)
    ranks = (logprobs > chosen).sum(dim=-1).tolist()
    most = min(max(tops), logits.shape[1])
    values, best = (tensor.tolist() for tensor in logprobs.topk(most, dim=-1)) if most else ([[]] * len(ids),) * 2
    return [
        TokenLogprob(token, logprob, rank, allowed(best[i][: tops[i]], values[i][: tops[i]]))
        for i, (token, logprob, rank) in enumerate(zip(ids, chosen.squeeze(1).tolist(), ranks, strict=True))
    ]


def allowed(ids: Seq[int], logprobs: Seq[float]) -> tuple[tuple[int, float], ...]:
    """Pair alternatives with their log-probabilities, without those that a grammar rules out."""
    return tuple([pair for pair in zip(ids, logprobs, strict=True) if pair[1] != -math.inf])


def not_finite() -> NonFiniteLogits:
    """Return the error that a row with NaN or infinity ends its request with."""
    return NonFiniteLogits(
        "The model's logits hold NaN or infinity for this request; its weights or activations overflowed. "
        "Use bfloat16 or float32 if the model runs in float16."
    )
