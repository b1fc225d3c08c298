"""Defines latencies and rates of one engine, each once, for us and for whoever we are compared with."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

PROMPT_TOKENS = 512
SHORT, LONG = 8, 136
PREFILL_PROMPTS, PREFILL_TOKENS = 16, 2048
OUTPUT_TOKENS = 128
# Tokens beyond the last that an answer may go on for, so that none ends while others are being timed.
SLACK = 32
# After so many seconds a figure has had passes enough.
_LONG_S = 25.0


class MeasuredEngine(Protocol):
    """Serves prompts of token ids, greedy, with no early stop."""

    vocab_size: int

    def serve(self, prompts: Sequence[Sequence[int]], num_output: int) -> float:
        """Write ``num_output`` tokens for each prompt, all submitted at once; seconds until the last is done."""

    def decode(self, prompts: Sequence[Sequence[int]], first: int, last: int) -> float:
        """Return the seconds from when every prompt's answer has ``first`` tokens until every one has ``last``."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Holds the median of some passes, how far they lay apart, and how many they were."""

    median: float
    least: float
    most: float
    passes: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values), len(values))

    def scaled(self, factor: float) -> dict[str, float]:
        return {
            "median": round(self.median * factor, 4),
            "min": round(self.least * factor, 4),
            "max": round(self.most * factor, 4),
            "passes": self.passes,
        }


class PromptSource:
    """Draws random token ids, never the same twice: none may gain by a prefix it has seen."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._rng = random.Random(seed)

    def draw(self, count: int, num_tokens: int) -> list[list[int]]:
        # Rows of one draw differ in their first token, so no block of one is another's.
        return [[self._rng.randrange(self._vocab_size) for _ in range(num_tokens)] for _ in range(count)]


def repeated(measure: Callable[[], float], repeats: int, *, warm: int = 0) -> Spread:
    """Do ``warm`` unmeasured passes, then ``repeats``, fewer where those done have taken long."""
    for _ in range(warm):
        measure()
    began_s = time.perf_counter()
    values = [measure()]
    while len(values) < repeats and time.perf_counter() - began_s < _LONG_S:
        values.append(measure())
    return Spread.of(values)


def itl_s(engine: MeasuredEngine, texts: Sequence[Sequence[int]]) -> float:
    """Return (when all have 136 tokens less when all have 8) / 128, at 512-token prompts.

    Only decoding is timed, so passes may read the same prompts, and the first 8 tokens compile and capture.
    """
    return engine.decode(texts, SHORT, LONG) / (LONG - SHORT)


def ttft_s(engine: MeasuredEngine, prompts: PromptSource, num_tokens: int) -> float:
    """Return the seconds to the first token of one prompt on an idle engine."""
    return engine.serve(prompts.draw(1, num_tokens), 1)


def warm_prefill(engine: MeasuredEngine, prompts: PromptSource) -> None:
    """Do a third of :func:`prefill_rate`: steps as large as its own."""
    engine.serve(prompts.draw(PREFILL_PROMPTS // 3, PREFILL_TOKENS), 1)


def warm_output(engine: MeasuredEngine, prompts: PromptSource, count: int) -> None:
    """Do a short :func:`output_rate`: as many requests, few tokens."""
    engine.serve(prompts.draw(count, 16), 4)


def prefill_rate(engine: MeasuredEngine, prompts: PromptSource) -> float:
    """Return the prompt tokens a second, 16 prompts of 2,048 at once."""
    elapsed_s = engine.serve(prompts.draw(PREFILL_PROMPTS, PREFILL_TOKENS), 1)
    return PREFILL_PROMPTS * PREFILL_TOKENS / elapsed_s


def output_rate(engine: MeasuredEngine, prompts: PromptSource, count: int) -> float:
    """Return the output tokens a second, ``count`` requests of 512 in and 128 out at once."""
    return count * OUTPUT_TOKENS / engine.serve(prompts.draw(count, PROMPT_TOKENS), OUTPUT_TOKENS)
