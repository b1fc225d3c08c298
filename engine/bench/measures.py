"""Latencies and rates of one engine, each defined once, for us and for whoever we are compared with."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

PROMPT_TOKENS = 512
SHORT, LONG = 8, 136
PREFILL_PROMPTS, PREFILL_TOKENS = 16, 2048
OUTPUT_TOKENS = 128


class Contender(Protocol):
    """Serves prompts of token ids, greedy, with no early stop."""

    vocab_size: int

    def serve(self, prompts: Sequence[Sequence[int]], num_output: int) -> float:
        """Write ``num_output`` tokens for each prompt, all submitted at once; seconds until the last is done."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some passes, and how far they lay apart."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))

    def scaled(self, factor: float) -> dict[str, float]:
        return {
            "median": round(self.median * factor, 4),
            "min": round(self.least * factor, 4),
            "max": round(self.most * factor, 4),
        }


class Prompts:
    """Random token ids, never the same twice: no contender may gain by a prefix it has seen."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._rng = random.Random(seed)

    def draw(self, count: int, num_tokens: int) -> list[list[int]]:
        # Rows of one draw differ in their first token, so no block of one is another's.
        return [[self._rng.randrange(self._vocab_size) for _ in range(num_tokens)] for _ in range(count)]


def repeated(measure: Callable[[], float], repeats: int) -> Spread:
    """One unmeasured pass, then ``repeats``."""
    measure()
    return Spread.of([measure() for _ in range(repeats)])


def itl_s(contender: Contender, prompts: Prompts, batch: int) -> float:
    """(time for 136 tokens less time for 8) / 128, at ``batch`` prompts of 512 tokens."""
    short = contender.serve(prompts.draw(batch, PROMPT_TOKENS), SHORT)
    long = contender.serve(prompts.draw(batch, PROMPT_TOKENS), LONG)
    return (long - short) / (LONG - SHORT)


def ttft_s(contender: Contender, prompts: Prompts, num_tokens: int) -> float:
    """Seconds to the first token of one prompt on an idle engine."""
    return contender.serve(prompts.draw(1, num_tokens), 1)


def prefill_rate(contender: Contender, prompts: Prompts) -> float:
    """Prompt tokens a second, 16 prompts of 2,048 at once."""
    elapsed_s = contender.serve(prompts.draw(PREFILL_PROMPTS, PREFILL_TOKENS), 1)
    return PREFILL_PROMPTS * PREFILL_TOKENS / elapsed_s


def output_rate(contender: Contender, prompts: Prompts, count: int) -> float:
    """Output tokens a second, ``count`` requests of 512 in and 128 out at once."""
    return count * OUTPUT_TOKENS / contender.serve(prompts.draw(count, PROMPT_TOKENS), OUTPUT_TOKENS)
