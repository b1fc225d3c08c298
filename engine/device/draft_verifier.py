"""Verifies drafts where the logits are: :func:`engine.draft_verifier.verify` for whole batches, without the host.

Every sequence has one row of logits per place of the longest draft and one beyond; places past a sequence's own draft
are padding. The random numbers are keyed as there, so that a device and a host accept the same drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.draft_verifier import ACCEPT, RESIDUAL
from engine.kernels.sampling import SamplingTensors, draw, probabilities, sample, uniforms
from engine.sampler import DRAW


@dataclass(slots=True)
class VerifiedDrafts:
    """Holds what became of B drafts of at most k tokens.

    Attributes
    ----------
    token_ids : int64 (B, k + 1), accepted drafts and one more token, then anything
    counts : int64 (B,), how many of a row's tokens are meant, 1 to k + 1
    errors : int32 (B,), see :class:`engine.kernels.sampling.SampledTokens`; of the rows that are given out
    """

    token_ids: Tensor
    counts: Tensor
    errors: Tensor


def verify_drafts(
    logits: Tensor,
    params: SamplingTensors,
    draft_ids: Tensor,
    num_drafts: Tensor,
    draft_probs: Tensor | None = None,
    rejects: Tensor | None = None,
) -> VerifiedDrafts:
    """Keep the longest believable prefix of every draft, and draw one token after it.

    Parameters
    ----------
    logits : (B * (k + 1), V)
    params : of all rows; ``positions`` grow by one within a sequence
    draft_ids : int64 (B, k)
    num_drafts : int64 (B,), at most k
    draft_probs : float32 (B, k, V), what the drafts of sequences in ``rejects`` were drawn from
    rejects : bool (B,), sequences judged by rejection sampling; the others keep drafts that equal the target's own draw

    References
    ----------
    Leviathan et al. 2023, Algorithm 1; the rules are those of :mod:`engine.draft_verifier`.
    """
    batch, most = draft_ids.shape
    sampled = sample(logits, params)
    token_ids = sampled.token_ids.view(batch, most + 1)
    is_real = torch.arange(most, device=logits.device) < num_drafts[:, None]
    kept = _leading((token_ids[:, :most] == draft_ids) & is_real)
    if draft_probs is not None:
        assert rejects is not None
        rejected_kept, rejected_ids = _reject(logits, params, draft_ids, num_drafts, is_real, draft_probs)
        kept = torch.where(rejects, rejected_kept, kept)
        token_ids = torch.where(rejects[:, None], rejected_ids, token_ids)
    # Rows after the last kept draft were never the request's own.
    given_out = torch.arange(most + 1, device=logits.device) <= kept[:, None]
    errors = torch.where(given_out, sampled.errors.view(batch, most + 1), 0).amax(dim=1)
    return VerifiedDrafts(token_ids, kept + 1, errors)


def _leading(stands: Tensor) -> Tensor:
    """Return int64 (B,): how many leading entries of each row of (B, k) are true."""
    return stands.to(torch.int64).cumprod(dim=1).sum(dim=1)


def _reject(
    logits: Tensor,
    params: SamplingTensors,
    draft_ids: Tensor,
    num_drafts: Tensor,
    is_real: Tensor,
    draft_probs: Tensor,
) -> tuple[Tensor, Tensor]:
    """Judge every draft by rejection sampling: accepted tokens (B,), and tokens (B, k + 1)."""
    batch, most = draft_ids.shape
    assert params.seeds is not None
    assert params.positions is not None
    target = probabilities(logits, params).view(batch, most + 1, -1)
    seeds, positions = params.seeds.view(batch, -1), params.positions.view(batch, -1)
    target_at = target[:, :most].gather(2, draft_ids[:, :, None]).squeeze(2)
    draft_at = draft_probs.gather(2, draft_ids[:, :, None]).squeeze(2)
    chance = uniforms(seeds[:, :most].reshape(-1), positions[:, :most].reshape(-1), ACCEPT).view(batch, most)
    # u < target / draft, without dividing: a drafted token has positive draft probability.
    kept = _leading((chance * draft_at < target_at) & is_real)
    row = kept[:, None, None].expand(-1, 1, target.shape[2])
    final = target.gather(1, row).squeeze(1)
    against = draft_probs.gather(1, row.clamp_max(most - 1)).squeeze(1)
    residual = (final - against).clamp_min(0.0)
    # Equal distributions reject only through rounding, and then the target itself is the right one to draw from.
    is_residual = (kept < num_drafts) & (residual.sum(dim=1) > 0.0)
    final = torch.where(is_residual[:, None], residual, final)
    last_seeds = seeds[:, 0]
    last_positions = positions[:, 0] + kept
    at = torch.where(
        is_residual, uniforms(last_seeds, last_positions, RESIDUAL), uniforms(last_seeds, last_positions, DRAW)
    )
    token_ids = torch.cat((draft_ids, draft_ids.new_zeros(batch, 1)), dim=1)
    return kept, token_ids.scatter(1, kept[:, None], draw(final, at)[:, None])
