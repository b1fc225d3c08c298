"""Holds what an engine says of itself, cheap enough to read before every routed request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Holds a snapshot of an engine.

    Attributes
    ----------
    num_running, num_waiting : sequences with blocks, and without
    kv_free_fraction : blocks that could be given out now, cached ones included
    predicted_wait_s : from submission to the first scheduled step, for a live request made now
    acceptance_rate : accepted / proposed draft tokens, recent; None without speculation
    num_steps : steps done since the start
    last_step_s : seconds since the last step ended
    stalled_s : seconds during which there was work and no step ended; what a watchdog looks at
    prefix_hit_rate : prompt tokens read from the cache / prompt tokens, since the start
    num_preemptions, num_failed_steps : since the start
    """

    num_running: int
    num_waiting: int
    kv_free_fraction: float
    predicted_wait_s: float
    acceptance_rate: float | None
    num_steps: int
    last_step_s: float
    stalled_s: float
    prefix_hit_rate: float
    num_preemptions: int
    num_failed_steps: int
    num_prompt_tokens: int
    num_output_tokens: int


class Ewma:
    """Keeps an exponentially weighted mean; the first observation is taken whole."""

    __slots__ = ("value", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.value: float | None = None

    def observe(self, x: float) -> None:
        self.value = x if self.value is None else self.value + self.weight * (x - self.value)
