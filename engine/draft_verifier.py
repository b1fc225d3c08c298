"""Verifies drafts (speculative decoding): cheap guesses that never change what the target model would have said.

Three rules decide how far a draft is believed; each leaves the target's distribution exactly as it is:

greedy     a drafted token stands if it is the target's likeliest. The output is the target's own, token for token.
seeded     the target's token is drawn with the request's own (seed, position) number, as it would be without drafts,
           and a drafted token stands if it is that token. The output is the same with and without speculation.
sampled    rejection sampling: a drafted token stands with probability min(1, target / draft), else one is drawn from
           the normalised positive part of target - draft.

References
----------
Leviathan, Kalman, Matias 2023, "Fast Inference from Transformers via Speculative Decoding", Algorithm 1, Appendix A.1.
Daliri, Musco, Suresh 2024, "Coupling without Communication and Drafter-Invariant Speculative Decoding", section 1.1,
for agreeing on draws through shared random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.rng import uniform
from engine.sampler import DRAW, Draw, LogitsRow, Sampler, draw
from engine.scheduler import StepPlan
from engine.sequence import Sequence

ACCEPT = 1  # the stream of `uniform` that decides acceptance
RESIDUAL = 2  # the stream that draws what replaces a rejected token


def verify(sampler: Sampler, logits: Tensor, rows: Seq[LogitsRow], sequences: Seq[Sequence]) -> list[list[Draw]]:
    """Keep the longest believable prefix of each sequence's draft, and draw one token after it.

    Parameters
    ----------
    logits : float32 (R, V), the target's, may be overwritten; each sequence has one row per draft and one beyond, in
        order
    rows : R of them, with ``drafts`` growing by one within a sequence
    sequences : those with rows, in the rows' order; ``draft_probs`` is float32 (k, V), the distributions its drafts
        were drawn from, or None if each was certain (n-grams, greedy drafts)

    Returns
    -------
    For each sequence the accepted drafts and one more token
    """
    sampler.mask(logits, rows)
    errors = sampler.errors(logits)
    edited = sampler.edit(logits, rows, errors)
    ids = sampler.choose(edited, rows)
    starts: list[int] = []
    kept: list[int] = []
    start = 0
    for sequence in sequences:
        starts.append(start)
        kept.append(_matching(sequence.draft_ids, ids[start:]))
        start += len(sequence.draft_ids) + 1
    _reject(sampler, edited, rows, sequences, starts, kept, ids)
    chosen = [i for start, count in zip(starts, kept, strict=True) for i in range(start, start + count + 1)]
    # Only what is given out may fail a request: rows after a rejected draft were never the request's own.
    reports = sampler.report(
        logits[chosen] if len(chosen) < len(rows) else logits,
        [rows[i] for i in chosen],
        [ids[i] for i in chosen],
        {place: errors[i] for place, i in enumerate(chosen) if i in errors},
    )
    verdicts, place = [], 0
    for count in kept:
        verdicts.append(reports[place : place + count + 1])
        place += count + 1
    return verdicts


def cut_drafts(plan: StepPlan) -> None:
    """Leave out of a plan's drafts what comes after the first token that a grammar does not allow, or from it on.

    It would be rejected. That very token is checked all the same where it was drawn from a distribution: what replaces
    it is drawn from the rest of the target's, and leaving the token out would change how often.
    """
    for item in plan.items:
        sequence = item.sequence
        if not item.num_drafts or sequence.grammar is None:
            continue
        drawn = sequence.draft_probs is not None and uses_rejection(sequence)
        kept = min(sequence.grammar.num_allowed(sequence.draft_ids) + drawn, item.num_drafts)
        sequence.draft_ids = sequence.draft_ids[:kept]
        if sequence.draft_probs is not None:
            sequence.draft_probs = sequence.draft_probs[:kept] if kept else None
        plan.num_tokens -= item.num_drafts - kept
        item.num_drafts = kept


def _matching(draft_ids: Seq[int], target_ids: Seq[int]) -> int:
    """Return the length of the common prefix."""
    for index, token in enumerate(draft_ids):
        if target_ids[index] != token:
            return index
    return len(draft_ids)


def _reject(
    sampler: Sampler,
    edited: Tensor,
    rows: Seq[LogitsRow],
    sequences: Seq[Sequence],
    starts: Seq[int],
    kept: list[int],
    ids: list[int],
) -> None:
    """Redo ``kept`` and ``ids`` of sequences that are sampled without a seed, by rejection."""
    for index, sequence in enumerate(sequences):
        if not sequence.draft_ids or sequence.draft_probs is None or not uses_rejection(sequence):
            continue
        start, num_drafts = starts[index], len(sequence.draft_ids)
        span = slice(start, start + num_drafts + 1)
        target = sampler.probabilities(edited[span], rows[span])
        tokens = accept_draft(
            sequence.draft_ids,
            sequence.draft_probs,
            target,
            seed=sequence.seed,
            position=len(sequence.token_ids),
        )
        kept[index] = len(tokens) - 1
        ids[start : start + len(tokens)] = tokens


def uses_rejection(sequence: Sequence) -> bool:
    """Tell whether drafts for this sequence are drawn and judged by rejection sampling."""
    sampling = sequence.request.sampling
    return sampling.temperature > 0.0 and sampling.seed is None


def accept_draft(
    draft_ids: Seq[int], draft_probs: Tensor, target_probs: Tensor, *, seed: int, position: int
) -> list[int]:
    """Keep the longest draft prefix that leaves the target distribution unchanged.

    Parameters
    ----------
    draft_ids : k tokens proposed by the draft model
    draft_probs : float32 (k, V), the distributions they were drawn from
    target_probs : float32 (k + 1, V), the target at the same positions and one beyond
    seed, position : key the random numbers; ``position`` is that of the first drafted token

    Returns
    -------
    n + 1 tokens, the n <= k accepted ones and one drawn from the residual or, if all stood, from the target

    References
    ----------
    Leviathan et al. 2023, Algorithm 1.
    """
    num_drafts = len(draft_ids)
    index = torch.tensor(draft_ids, dtype=torch.int64, device=target_probs.device).unsqueeze(1)
    target_at = target_probs[:num_drafts].gather(1, index).squeeze(1).tolist()
    draft_at = draft_probs.gather(1, index).squeeze(1).tolist()
    accepted = 0
    while accepted < num_drafts:
        # u < target / draft, without dividing: a drafted token has positive draft probability.
        if uniform(seed, position + accepted, ACCEPT) * draft_at[accepted] >= target_at[accepted]:
            break
        accepted += 1
    final, stream = target_probs[accepted], DRAW
    if accepted < num_drafts:
        residual = (final - draft_probs[accepted]).clamp_(min=0.0)
        # Equal distributions reject only through rounding, and then the target itself is the right one to draw from.
        if float(residual.sum()) > 0.0:
            final, stream = residual, RESIDUAL
    last = draw(final.unsqueeze(0), [uniform(seed, position + accepted, stream)])
    return [*draft_ids[:accepted], *last]
