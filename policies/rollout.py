"""A new router's way to traffic: shadow, then 10, 50 and 100 % by sticky key, and back at once when it does harm.

A pure machine: the caller stores the state, tells it what was observed, and serves by :func:`takes_new`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from policies.drift_test import DriftDesign, DriftState, observe


class RolloutStage(StrEnum):
    """``shadow`` serves nothing; ``partial`` a share; ``complete`` and ``rolled_back`` are final."""

    SHADOW = "shadow"
    PARTIAL = "partial"
    COMPLETE = "complete"
    ROLLED_BACK = "rolled_back"


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """States how fast a rollout goes, and what stops it.

    Parameters
    ----------
    guard : test of the new router's checked answers; it runs through all stages with one false-alarm probability
    shares : shares of traffic after shadow, rising, the last one 1
    min_stage_s : least seconds in each stage
    min_shadow_decisions : least shadow decisions before the first share
    min_checked : least checked answers of the new router in each serving stage, counted by what they are worth: of
        answers with different weights as many as equal ones would have to be (Kish)
    max_stage_s : a stage that has fewer of either after so many seconds ends in a roll-back: none goes on for ever, and
        none passes without evidence

    Raises
    ------
    ValueError
        A field outside its range.
    """

    guard: DriftDesign
    shares: tuple[float, ...] = (0.1, 0.5, 1.0)
    min_stage_s: float = 3600.0
    min_shadow_decisions: int = 200
    min_checked: int = 50
    max_stage_s: float = 604_800.0

    def __post_init__(self) -> None:
        if not self.shares or self.shares[-1] != 1.0 or self.shares[0] <= 0.0:
            raise ValueError(f"shares is {self.shares!r}; expected rising shares that end at 1.")
        if any(later <= earlier for earlier, later in zip(self.shares, self.shares[1:], strict=False)):
            raise ValueError(f"shares is {self.shares!r}; expected rising shares.")
        if not self.min_stage_s >= 0 or self.min_shadow_decisions < 0 or self.min_checked < 0:
            raise ValueError("min_stage_s, min_shadow_decisions and min_checked must be 0 or more.")
        if not self.max_stage_s >= self.min_stage_s:
            raise ValueError(f"max_stage_s is {self.max_stage_s!r}; expected at least min_stage_s.")


@dataclass(frozen=True, slots=True)
class Rollout:
    """Holds the progress of a rollout; a value to be stored.

    ``step`` is -1 in shadow, else the index into the plan's shares; the counts are of the present stage, the weights
    the sum of the checked answers' and of their squares.
    """

    version: str
    stage: RolloutStage
    entered_s: float
    guard: DriftState
    step: int = -1
    num_decisions: int = 0
    num_checked: int = 0
    reason: str = ""
    weights: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def start(cls, version: str, plan: RolloutPlan, now_s: float) -> Rollout:
        """In shadow."""
        return cls(version, RolloutStage.SHADOW, now_s, DriftState.start(plan.guard))

    @property
    def is_final(self) -> bool:
        """Return whether nothing can change it any more."""
        return self.stage in (RolloutStage.COMPLETE, RolloutStage.ROLLED_BACK)

    @property
    def effective_checked(self) -> float:
        """Return the effective number of this stage's checked answers, in answers of equal weight."""
        total, squares = self.weights
        return total * total / squares if squares > 0.0 else 0.0


def share(plan: RolloutPlan, state: Rollout) -> float:
    """Return share of sticky keys that the new router serves now."""
    if state.stage is RolloutStage.COMPLETE:
        return 1.0
    return plan.shares[state.step] if state.stage is RolloutStage.PARTIAL else 0.0


def takes_new(version: str, sticky_key: str, share_now: float) -> bool:
    """Whether the new router serves this key: always the same answer for a key, and a rising share keeps its keys."""
    digest = hashlib.sha256(f"{version}\0{sticky_key}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < share_now * 2**64


def record(
    plan: RolloutPlan,
    state: Rollout,
    *,
    num_decisions: int = 0,
    losses: Sequence[float] = (),
    weights: Sequence[float] | None = None,
    now_s: float,
) -> Rollout:
    """Count what happened, roll back on the guard's alarm, and move on where the plan allows.

    Parameters
    ----------
    num_decisions : decisions of the new router since the last call, in shadow or served
    losses : its checked answers since then, 0..1
    weights : theirs, as :func:`policies.drift_test.observe` takes them
    now_s : clock, seconds
    """
    if state.is_final:
        return state
    weights = weights or (1.0,) * len(losses)
    guard = observe(plan.guard, state.guard, losses, weights)
    total, squares = state.weights
    counted = replace(
        state,
        guard=guard,
        num_decisions=state.num_decisions + num_decisions,
        num_checked=state.num_checked + len(losses),
        weights=(total + sum(weights), squares + sum(each * each for each in weights)),
    )
    if guard.is_alarmed:
        alarm = f"The guard rose after {guard.alarmed_at} checked answers: more needed an upgrade than is in order."
        return roll_back(counted, alarm, now_s)
    if _may_advance(plan, counted, now_s):
        return _advance(plan, counted, now_s)
    if now_s - counted.entered_s >= plan.max_stage_s:
        return roll_back(counted, _what_is_missing(plan, counted), now_s)
    return counted


def _what_is_missing(plan: RolloutPlan, state: Rollout) -> str:
    days = plan.max_stage_s / 86_400
    if state.stage is RolloutStage.SHADOW:
        return f"{state.num_decisions} shadow decisions after {days:g} d; {plan.min_shadow_decisions} are needed."
    return f"Checks worth {state.effective_checked:.0f} answers after {days:g} d; {plan.min_checked} are needed."


def is_behind(plan: RolloutPlan, state: Rollout, now_s: float) -> bool:
    """Return whether a serving stage has less than half of its evidence when half of its time is over."""
    is_late = now_s - state.entered_s >= plan.max_stage_s / 2
    return state.stage is RolloutStage.PARTIAL and is_late and state.effective_checked < plan.min_checked / 2


def roll_back(state: Rollout, reason: str, now_s: float) -> Rollout:
    """End it: the former router serves everything again."""
    return replace(state, stage=RolloutStage.ROLLED_BACK, step=-1, entered_s=now_s, reason=reason)


def _may_advance(plan: RolloutPlan, state: Rollout, now_s: float) -> bool:
    if now_s - state.entered_s < plan.min_stage_s:
        return False
    if state.stage is RolloutStage.SHADOW:
        return state.num_decisions >= plan.min_shadow_decisions
    # Sums of equal weights are a little off what they add up to.
    return state.effective_checked >= plan.min_checked - 1e-6


def _advance(plan: RolloutPlan, state: Rollout, now_s: float) -> Rollout:
    """One stage on; a stage at the full share still has to pass before the rollout is complete."""
    if state.stage is RolloutStage.PARTIAL and plan.shares[state.step] == 1.0:
        return replace(state, stage=RolloutStage.COMPLETE, entered_s=now_s, reason="Every stage passed.")
    return replace(
        state,
        stage=RolloutStage.PARTIAL,
        step=state.step + 1,
        entered_s=now_s,
        num_decisions=0,
        num_checked=0,
        weights=(0.0, 0.0),
    )
