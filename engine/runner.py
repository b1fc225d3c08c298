"""One step on the device: lay the plan out as a batch, run the model, keep what was asked for, draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.batch import Batch
from engine.config import ModelConfig
from engine.errors import EngineError, NonFiniteLogits
from engine.kv_cache import KVCache
from engine.request import TokenLogprob
from engine.sampler import Row, Sampler, token_logprobs
from engine.scheduler import Scheduled, StepPlan
from engine.sequence import Sequence
from engine.speculate import verify

# Log-probabilities of a prompt go through the head this many rows at a time: a whole prompt's logits may take
# gigabytes (8,192 rows x 152,000 tokens x 4 bytes are 5 GB).
SCORE_ROWS = 128


class Model(Protocol):
    """What the engine needs of a decoder."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        """Last hidden states, (T, H), after the final norm; keys and values are written to ``kv``."""

    def logits(self, hidden: Tensor) -> Tensor:
        """(R, H) to float32 (R, V)."""


@dataclass(slots=True)
class StepResult:
    """What one step gave one sequence.

    ``token_ids`` is empty while a prompt is being computed; else the accepted drafts and one drawn token.
    """

    item: Scheduled
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    error: EngineError | None = None


def draws(item: Scheduled) -> bool:
    """Whether this step computes the sequence's last token, so that the next can be drawn."""
    sequence = item.sequence
    return item.num_tokens == sequence.num_left and sequence.num_output < sequence.max_output


def build_batch(items: list[Scheduled], block_size: int, device: torch.device) -> Batch:
    """Lay out the tokens to compute: from each sequence's first uncomputed token on, then its drafts."""
    tokens, lengths, tables = [], [], []
    for item in items:
        sequence = item.sequence
        end = sequence.num_computed + item.num_tokens
        chunk = sequence.token_ids[sequence.num_computed : end]
        if item.num_drafts:
            chunk += sequence.draft_ids
            end += item.num_drafts
        tokens.append(chunk)
        lengths.append(end)
        tables.append(sequence.block_table[: -(-end // block_size)])
    return Batch.build(tokens, lengths, tables, block_size=block_size, device=device)


class Runner:
    """Runs plans on one model and one KV pool.

    Parameters
    ----------
    model : may be shared with other runners; it holds no state of a step
    kv : this runner's own
    """

    def __init__(self, model: Model, kv: KVCache) -> None:
        self.model = model
        self.kv = kv
        self.sampler = Sampler(model.config.vocab_size, model.device)

    def run(self, plan: StepPlan) -> list[StepResult]:
        """Compute a plan's tokens and draw where a sequence is ready.

        Side effects: writes the KV pool, extends ``scores`` and ``pooled_sum`` of sequences that asked for them.
        """
        with torch.inference_mode():
            batch = build_batch(plan.items, self.kv.block_size, self.model.device)
            hidden = self.model.forward(batch, self.kv)
            results = [StepResult(item, [], []) for item in plan.items]
            rows: list[Row] = []
            flat: list[int] = []
            start = 0
            for item, result in zip(plan.items, results, strict=True):
                sequence = item.sequence
                if sequence.num_computed < sequence.num_prompt:
                    result.error = self._keep_prompt(item, hidden[start : start + item.num_tokens])
                if draws(item):
                    last = start + item.num_tokens - 1
                    for j in range(item.num_drafts + 1):
                        rows.append(Row(sequence, tuple(sequence.draft_ids[:j])))
                        flat.append(last + j)
                start += item.num_tokens + item.num_drafts
            if rows:
                logits = self.model.logits(hidden if len(flat) == start else hidden[flat])
                self._draw(logits, rows, [result for result in results if draws(result.item)])
            return results

    def _draw(self, logits: Tensor, rows: list[Row], results: list[StepResult]) -> None:
        if len(rows) > len(results):
            verdicts = verify(self.sampler, logits, rows, [result.item.sequence for result in results])
        else:
            verdicts = [[draw] for draw in self.sampler.sample(logits, rows)]
        for result, drawn in zip(results, verdicts, strict=True):
            error = next((draw.error for draw in drawn if draw.error), None)
            result.error = result.error or error
            if result.error is None:
                result.token_ids = [draw.token_id for draw in drawn]
                result.logprobs = [draw.logprob for draw in drawn if draw.logprob is not None]

    # What is kept of a prompt

    def _keep_prompt(self, item: Scheduled, hidden: Tensor) -> EngineError | None:
        """Collect hidden sums and log-probabilities of one chunk, (n, H)."""
        sequence = item.sequence
        if not sequence.pooled_done:
            self._pool(sequence, hidden)
        if sequence.num_to_score:
            return self._score(sequence, hidden)
        return None

    def _pool(self, sequence: Sequence, hidden: Tensor) -> None:
        inside = hidden[: sequence.num_prompt - sequence.num_computed]
        total = inside.sum(dim=0, dtype=torch.float32)
        sequence.pooled_sum = total if sequence.pooled_sum is None else sequence.pooled_sum + total
        sequence.pooled_done = sequence.num_computed + inside.shape[0] >= sequence.num_prompt

    def _score(self, sequence: Sequence, hidden: Tensor) -> EngineError | None:
        """Score the prompt tokens that this chunk's rows predict.

        Row i of the chunk is position ``num_computed + i`` and predicts the token one further, so scoring wants rows
        ``[first, last)``:  first = next token to score - 1 - num_computed,  last = num_prompt - 1 - num_computed.
        """
        top = sequence.request.sampling.prompt_logprobs or 0
        at = sequence.num_prompt - sequence.num_to_score
        first = at - 1 - sequence.num_computed
        last = min(hidden.shape[0], sequence.num_prompt - 1 - sequence.num_computed)
        for begin in range(first, last, SCORE_ROWS):
            end = min(begin + SCORE_ROWS, last)
            logits = self.model.logits(hidden[begin:end])
            if not bool(logits.isfinite().all()):
                return NonFiniteLogits(f"The logits of prompt positions {at} and on hold NaN or infinity.")
            ids = sequence.token_ids[at : at + end - begin]
            sequence.scores += token_logprobs(logits, ids, [top] * len(ids))
            at += end - begin
        return None
