"""Draws the load that every engine gets: prompts of mixed length, answers of mixed length, greedy, no early stop."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """Holds one request: prompt token ids and how many tokens to write."""

    prompt_ids: tuple[int, ...]
    num_output: int


def mixed_jobs(
    count: int,
    *,
    seed: int,
    vocab_size: int,
    prompt_range: tuple[int, int] = (16, 160),
    output_range: tuple[int, int] = (16, 128),
) -> list[Job]:
    """Draw ``count`` jobs with lengths uniform in the ranges (ends included) and random tokens.

    Random tokens keep every contender from gaining by a shared prefix.
    """
    rng = random.Random(seed)
    jobs = []
    for _ in range(count):
        num_prompt, num_output = rng.randint(*prompt_range), rng.randint(*output_range)
        jobs.append(Job(tuple(rng.randrange(vocab_size) for _ in range(num_prompt)), num_output))
    return jobs


def describe(jobs: list[Job]) -> dict[str, object]:
    """Counts for the card."""
    prompts, outputs = [len(job.prompt_ids) for job in jobs], [job.num_output for job in jobs]
    return {
        "requests": len(jobs),
        "prompt_tokens": sum(prompts),
        "prompt_range": [min(prompts), max(prompts)],
        "output_tokens": sum(outputs),
        "output_range": [min(outputs), max(outputs)],
    }
