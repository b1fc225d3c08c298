"""Drafts checked for a whole batch at once: what the host's rules keep, token for token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.device.draft_verifier import VerifiedDrafts, verify_drafts
from engine.draft_verifier import accept_draft
from engine.kernels.sampling import NOT_FINITE, SamplingTensors, draw, uniforms
from engine.rng import uniform
from engine.sampler import DRAW

VOCAB, MOST = 7, 4


def random_rows(seed: int, batch: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits (B, k + 1, V), draft distributions (B, k, V), drafts drawn from them and how many of them are real."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(batch, MOST + 1, VOCAB, generator=generator)
    # Near the target's own, so that drafts are accepted and rejected alike.
    draft_logits = logits[:, :MOST] + torch.randn(batch, MOST, VOCAB, generator=generator)
    probs = torch.softmax(draft_logits, -1)
    drafts = torch.multinomial(probs.flatten(0, 1), 1, generator=generator).view(batch, MOST)
    return logits, probs, drafts, torch.randint(0, MOST + 1, (batch,), generator=generator)


def params_of(seeds: Tensor, start: Tensor, temperature: float) -> SamplingTensors:
    positions = (start[:, None] + torch.arange(MOST + 1)).flatten()
    return SamplingTensors(
        temperature=torch.full((len(positions),), temperature),
        seeds=seeds.repeat_interleave(MOST + 1),
        positions=positions,
    )


def rows_of(checked: VerifiedDrafts) -> list[list[int]]:
    return [ids[:count] for ids, count in zip(checked.token_ids.tolist(), checked.counts.tolist(), strict=True)]


@pytest.mark.parametrize("seed", range(5))
def test_rejection_keeps_what_the_host_keeps(seed: int) -> None:
    batch = 60
    logits, probs, drafts, counts = random_rows(seed, batch)
    seeds, start = torch.arange(batch) * 77 + seed, torch.arange(batch) % 13
    checked = verify_drafts(
        logits.flatten(0, 1), params_of(seeds, start, 0.9), drafts, counts, probs, torch.ones(batch, dtype=torch.bool)
    )
    target = torch.softmax(logits / 0.9, -1)
    lengths = set()
    for row, found in enumerate(rows_of(checked)):
        n = int(counts[row])
        expected = accept_draft(
            drafts[row, :n].tolist(),
            probs[row, :n],
            target[row, : n + 1],
            seed=int(seeds[row]),
            position=int(start[row]),
        )
        assert found == expected
        lengths.add(len(found))
    assert lengths == set(range(1, MOST + 2))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_shared_draws_keep_what_equals_them(temperature: float) -> None:
    batch = 60
    logits, _, drafts, counts = random_rows(9, batch)
    seeds, start = torch.arange(batch) + 5, torch.arange(batch)
    params = params_of(seeds, start, temperature) if temperature else SamplingTensors()
    checked = verify_drafts(logits.flatten(0, 1), params, drafts, counts)
    for row, found in enumerate(rows_of(checked)):
        own = logits[row].argmax(-1).tolist()
        if temperature:
            at = torch.tensor([uniform(int(seeds[row]), int(start[row]) + j, DRAW) for j in range(MOST + 1)])
            own = draw(torch.softmax(logits[row] / temperature, -1), at.double()).tolist()
        n = int(counts[row])
        kept = next((j for j in range(n) if int(drafts[row, j]) != own[j]), n)
        assert found == own[: kept + 1]


def test_both_rules_in_one_batch_and_errors_only_of_what_is_given_out() -> None:
    logits, probs, drafts, _ = random_rows(3, 4)
    counts = torch.tensor([4, 4, 4, 0])
    seeds, start = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    params = params_of(seeds, start, 1.0)
    rejects = torch.tensor([True, False, True, False])
    mixed = rows_of(verify_drafts(logits.flatten(0, 1), params, drafts, counts, probs, rejects))
    by_rejection = rows_of(verify_drafts(logits.flatten(0, 1), params, drafts, counts, probs, torch.ones(4).bool()))
    by_draws = rows_of(verify_drafts(logits.flatten(0, 1), params, drafts, counts))
    assert mixed == [by_rejection[0], by_draws[1], by_rejection[2], by_draws[3]]
    bad = logits.clone()
    bad[3, 1:] = float("nan")  # beyond the only row that counts
    bad[1, 0] = float("nan")
    assert verify_drafts(bad.flatten(0, 1), params, drafts, counts).errors.tolist() == [0, NOT_FINITE, 0, 0]


def test_uniform_numbers_are_the_hosts() -> None:
    seeds, positions = torch.tensor([0, -1, 2**62, 5]), torch.tensor([0, 3, 9, 1])
    for stream in range(4):
        expected = [uniform(int(s) % 2**64, int(p), stream) for s, p in zip(seeds, positions, strict=True)]
        assert uniforms(seeds, positions, stream).tolist() == expected
