"""Runs one step on the device: lay the plan out as a batch, run the model, keep what was asked for, draw.

A step has two halves, so that the host may plan the next one while the device works: :meth:`StepRunner.launch` starts
it, :meth:`StepRunner.collect` waits for what it gave. At most one further step is launched in between, and that one
takes the tokens it needs from the first by itself, since nobody has told the host yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from engine.batch import Batch
from engine.config import ModelConfig
from engine.draft_verifier import verify
from engine.errors import EngineError, NonFiniteLogits
from engine.kv_cache import KVCache
from engine.request import TokenLogprob
from engine.sampler import LogitsRow, Sampler, token_logprobs
from engine.scheduler import ScheduledSequence, StepPlan
from engine.sequence import Sequence

# Log-probabilities of a prompt go through the head this many rows at a time: a whole prompt's logits may take
# gigabytes (8,192 rows x 152,000 tokens x 4 bytes are 5 GB).
SCORE_ROWS = 128


class StepModel(Protocol):
    """Offers what the engine needs of a decoder."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def weight_bytes(self) -> int: ...

    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        """Return the last hidden states, (T, H), after the final norm; keys and values are written to ``kv``."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Turn (R, H) into float32 (R, V)."""


@dataclass(slots=True)
class StepResult:
    """Holds what one step gave one sequence.

    ``token_ids`` is empty while a prompt is being computed; else the accepted drafts and one drawn token.
    """

    item: ScheduledSequence
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    error: EngineError | None = None


@dataclass(slots=True)
class Flight:
    """Holds a launched step: its plan, and what its runner needs to collect it.

    Attributes
    ----------
    device_s : time the device spent on it from the launch on, once collected, where the device can tell
    draft_s : time that went into drafting before the launch
    is_typical : its time says what such steps take; False where kernels were compiled or a graph was captured
    """

    plan: StepPlan
    results: list[StepResult] = field(default_factory=list)
    device_s: float | None = None
    draft_s: float = 0.0
    is_typical: bool = True


class StepRunner(Protocol):
    """Runs the plans of one engine.

    Attributes
    ----------
    padded : tokens that a decode of so many sequences computes when the longest draft has so many; None where every
        sequence has just its own
    """

    kv: KVCache

    @property
    def padded(self) -> Callable[[int, int], int] | None: ...

    def whole_tiles(self, num_tokens: int) -> int:
        """Return the most tokens, up to ``num_tokens``, of which a step wastes none on padding."""

    def on_stream(self) -> AbstractContextManager[object]:
        """Put what a step does on the device on one stream, in the order in which it is asked for."""

    def launch(self, plan: StepPlan) -> Flight:
        """Start a step; the one launched before may still be in flight.

        Side effects: writes the KV pool, extends ``scores`` and ``pooled_sum`` of sequences that asked for them.
        """

    def draw(self, flight: Flight) -> None:
        """Start what of a launched step had to wait until the tokens of the one before were settled."""

    def collect(self, flight: Flight) -> list[StepResult]:
        """Wait for a step's results, one per item of its plan."""

    def must_wait(self, sequence: Sequence) -> bool:
        """Tell whether the host must know a sequence's latest token before its next one can be computed."""

    def close(self) -> None:
        """Wait for what is in flight and give back what is held. Idempotent."""


def build_batch(
    items: list[ScheduledSequence], block_size: int, device: torch.device, due: Mapping[int, int] = MappingProxyType({})
) -> Batch:
    """Lay out the tokens to compute: from each sequence's first uncomputed token on, then its drafts.

    ``due`` has the tokens that sequences (by ``id``) got from the step in flight.
    """
    tokens, lengths, tables = [], [], []
    for item in items:
        sequence = item.sequence
        end = item.start + item.num_tokens
        chunk = sequence.token_ids[item.start : end]
        if len(chunk) < item.num_tokens:
            chunk.append(due[id(sequence)])
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

    padded = None

    def __init__(self, model: StepModel, kv: KVCache) -> None:
        self.model = model
        self.kv = kv
        self.sampler = Sampler(model.config.vocab_size, model.device)
        self._due: dict[int, int] = {}

    def whole_tiles(self, num_tokens: int) -> int:
        return num_tokens

    def on_stream(self) -> AbstractContextManager[object]:
        return nullcontext()

    def launch(self, plan: StepPlan) -> Flight:
        """Compute a plan's tokens and draw where a sequence is ready, all at once: the host is the device here.

        Results are still only handed out by :meth:`collect`, so the engine may step as it does beside a GPU.
        """
        results = self._run(plan)
        # A draw that failed has no token. Whatever is computed from the stand-in is thrown away with the sequence.
        self._due = {
            id(result.item.sequence): max(result.token_ids[0], 0) if result.token_ids else 0
            for result in results
            if result.item.draws
        }
        return Flight(plan, results)

    def draw(self, flight: Flight) -> None:
        pass

    def collect(self, flight: Flight) -> list[StepResult]:
        return flight.results

    def must_wait(self, sequence: Sequence) -> bool:
        return False

    def close(self) -> None:
        self._due = {}

    def _run(self, plan: StepPlan) -> list[StepResult]:
        kept = [KeptPrompt.of(item.sequence) for item in plan.items if item.start < item.sequence.num_prompt]
        try:
            return self._compute(plan)
        except torch.OutOfMemoryError:
            for prompt in kept:
                prompt.restore()
            raise

    def _compute(self, plan: StepPlan) -> list[StepResult]:
        with torch.inference_mode():
            batch = build_batch(plan.items, self.kv.block_size, self.model.device, self._due)
            hidden = self.model.forward(batch, self.kv)
            results = [StepResult(item, [], []) for item in plan.items]
            rows: list[LogitsRow] = []
            flat: list[int] = []
            start = 0
            for item, result in zip(plan.items, results, strict=True):
                sequence = item.sequence
                if item.start < sequence.num_prompt:
                    result.error = keep_prompt(self.model, item, hidden[start : start + item.num_tokens])
                if item.draws:
                    last = start + item.num_tokens - 1
                    # A token that is due counts as a draft here: it was drawn, but it is not in ``token_ids`` yet.
                    due = (self._due[id(sequence)],) if sequence.num_due else ()
                    for j in range(item.num_drafts + 1):
                        rows.append(LogitsRow(sequence, (*due, *sequence.draft_ids[:j])))
                        flat.append(last + j)
                start += item.num_tokens + item.num_drafts
            if rows:
                logits = self.model.logits(hidden if len(flat) == start else hidden[flat])
                draw_by_host(self.sampler, logits, rows, [result for result in results if result.item.draws])
            return results


def draw_by_host(sampler: Sampler, logits: Tensor, rows: list[LogitsRow], results: list[StepResult]) -> None:
    """Draw, and check drafts, with all that the sampler can do; fills the results of sequences that draw.

    Parameters
    ----------
    logits : float32 (R, V)
    rows : R of them, those of one sequence next to each other
    results : of the sequences, in the rows' order
    """
    if len(rows) > len(results):
        verdicts = verify(sampler, logits, rows, [result.item.sequence for result in results])
    else:
        verdicts = [[draw] for draw in sampler.sample(logits, rows)]
    for result, drawn in zip(results, verdicts, strict=True):
        error = next((draw.error for draw in drawn if draw.error), None)
        result.error = result.error or error
        if result.error is None:
            result.token_ids = [draw.token_id for draw in drawn]
            result.logprobs = [draw.logprob for draw in drawn if draw.logprob is not None]


# What is kept of a prompt


@dataclass(frozen=True, slots=True)
class KeptPrompt:
    """Remembers what was kept of a sequence's prompt at some time."""

    sequence: Sequence
    num_scores: int
    pooled_sum: Tensor | None
    pooled_done: bool

    @classmethod
    def of(cls, sequence: Sequence) -> KeptPrompt:
        return cls(sequence, len(sequence.scores), sequence.pooled_sum, sequence.pooled_done)

    def restore(self) -> None:
        """Forget what was kept since: another try would add to it again."""
        del self.sequence.scores[self.num_scores :]
        self.sequence.pooled_sum, self.sequence.pooled_done = self.pooled_sum, self.pooled_done


def keep_prompt(model: StepModel, item: ScheduledSequence, hidden: Tensor) -> EngineError | None:
    """Collect hidden sums and log-probabilities of one chunk, (n, H)."""
    sequence = item.sequence
    if not sequence.pooled_done:
        _pool(item, hidden)
    if sequence.num_to_score:
        return _score(model, item, hidden)
    return None


def _pool(item: ScheduledSequence, hidden: Tensor) -> None:
    sequence = item.sequence
    inside = hidden[: sequence.num_prompt - item.start]
    total = inside.sum(dim=0, dtype=torch.float32)
    sequence.pooled_sum = total if sequence.pooled_sum is None else sequence.pooled_sum + total
    sequence.pooled_done = item.start + inside.shape[0] >= sequence.num_prompt


def _score(model: StepModel, item: ScheduledSequence, hidden: Tensor) -> EngineError | None:
    """Score the prompt tokens that a chunk's rows predict.

    Row i of the chunk is position ``item.start + i`` and predicts the token one further, so scoring wants rows
    ``[first, last)``:  first = next token to score - 1 - item.start,  last = num_prompt - 1 - item.start.
    """
    sequence = item.sequence
    top = sequence.request.sampling.prompt_logprobs or 0
    at = sequence.num_prompt - sequence.num_to_score
    first = at - 1 - item.start
    last = min(hidden.shape[0], sequence.num_prompt - 1 - item.start)
    for begin in range(first, last, SCORE_ROWS):
        end = min(begin + SCORE_ROWS, last)
        logits = model.logits(hidden[begin:end])
        if not bool(logits.isfinite().all()):
            return NonFiniteLogits(f"The logits of prompt positions {at} and on hold NaN or infinity.")
        ids = sequence.token_ids[at : at + end - begin]
        sequence.scores += token_logprobs(logits, ids, [top] * len(ids))
        at += end - begin
    return None
