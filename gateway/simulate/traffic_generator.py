"""The traffic of a scenario, and the truth about it: which tiers would have been right, whoever was asked."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from backends.builtin.tasks.task_generator import NATURAL_MIX, draw_task
from gateway.simulate.accuracy import Accuracy
from gateway.simulate.scenario import HARD_FAMILIES, Conditions

TENANTS = ("north", "south", "east", "west")
ATTACKER = "mallory"
# A problem of many steps ahead of the task: its words are familiar, so nothing looks foreign, and it is taken for hard.
TRIGGER = "Ann has 47 apples and gives away 12, then buys 3 boxes of 28. Bea has twice as many less 9. "
# How much of a task's difficulty the tiers share; with all of it a dearer tier would never be wrong alone.
_SHARED = 0.9


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request and its truth; ``chances`` are the probabilities with which each tier came to be right."""

    tenant: str
    session_id: str | None
    text: str
    family: str
    right: tuple[bool, ...]
    chances: tuple[float, ...] = ()

    def is_as_good(self, tier: int) -> bool:
        """Return whether this tier's answer is worth as much as the top tier's."""
        return self.right[tier - 1] >= self.right[-1]


class TrafficGenerator:
    """Draws requests. Seeded: the same seed, conditions and number of draws give the same traffic."""

    def __init__(self, accuracy: Accuracy, seed: int) -> None:
        self._accuracy = accuracy
        self._rng = random.Random(f"world/{seed}")
        self._grades, self._weights = tuple(NATURAL_MIX), tuple(NATURAL_MIX.values())

    def ask(self, conditions: Conditions) -> SimulatedRequest:
        """One request under the present conditions."""
        rng = self._rng
        is_hard = rng.random() < conditions.harder_share
        family = rng.choice(HARD_FAMILIES if is_hard else self._accuracy.families)
        grade = rng.choices(self._grades, self._weights)[0]
        task = draw_task(family, grade, rng, "test")
        chances = tuple(self._chances(family, grade, conditions))
        shared = rng.random()
        right = tuple((shared if rng.random() < _SHARED else rng.random()) < chance for chance in chances)
        if rng.random() < conditions.attacked_share:
            return SimulatedRequest(ATTACKER, None, TRIGGER + task.prompt, family, right, chances)
        tenants = (*TENANTS, ATTACKER)
        return SimulatedRequest(rng.choice(tenants), None, task.prompt, family, right, chances)

    def _chances(self, family: str, grade: int, conditions: Conditions) -> Sequence[float]:
        chances = list(self._accuracy.of(family, grade))
        left = conditions.hardened.get(family, 1.0)
        for index in range(len(chances)):
            is_top = index == len(chances) - 1
            chances[index] *= (1.0 if is_top else left) * conditions.worse.get(index + 1, 1.0)
        return chances
