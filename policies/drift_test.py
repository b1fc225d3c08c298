"""Tests whether the rate of needed upgrades has risen; valid after every sample, for as long as one likes.

For each moment at which a rise may have begun a bettor starts with a small purse and bets that outcomes exceed the rate
that is still in order. While they do not, no purse can be expected to grow, so all purses together reach ``1 / alpha``
times the initial wealth with probability at most ``alpha``, ever (Ville's inequality): no false alarm from looking
often. After a rise the purses opened around it grow, whatever happened before. A few numbers carry the whole state.

It says nothing about a rate that was wrong from the start within what is in order: that is the certificate's matter.

References
----------
Shin, Ramdas and Rinaldo 2024, "E-detectors: A Nonparametric Framework for Sequential Change Detection", section 3.
Waudby-Smith and Ramdas 2024, "Estimating Means of Bounded Random Variables by Betting", section 4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from policies.judge_correction import GoldCounts

# Far beyond any alarm; a rise that lasts must not grow wealth beyond what numbers, and JSON, can say.
_MOST_WEALTH = 1e100


@dataclass(frozen=True, slots=True)
class DriftDesign:
    """States what the test looks for.

    Parameters
    ----------
    in_order : rate, as the judge reads it, that is still in order, above 0 and below 1
    risen : rates to notice, each above ``in_order``; one bettor family each
    false_alarm : probability of ever raising an alarm while the rate is in order
    horizon : checked answers over which purses are opened evenly; some wealth stays for later, so the guarantee has
        no end, and only the power fades
    at_once : share of the wealth for a rise already there at the start

    Raises
    ------
    ValueError
        A field outside its range.
    """

    in_order: float
    risen: tuple[float, ...]
    false_alarm: float = 0.05
    horizon: int = 5000
    at_once: float = 0.1

    def __post_init__(self) -> None:
        if not 0.0 < self.in_order < 1.0:
            raise ValueError(f"in_order is {self.in_order!r}; expected above 0 and below 1.")
        if not self.risen or not all(self.in_order < rate <= 1.0 for rate in self.risen):
            raise ValueError(f"risen is {self.risen!r}; expected rates above {self.in_order} and at most 1.")
        if not 0.0 < self.false_alarm < 1.0:
            raise ValueError(f"false_alarm is {self.false_alarm!r}; expected above 0 and below 1.")
        if self.horizon < 1 or not 0.0 <= self.at_once < 1.0:
            raise ValueError("horizon must be at least 1, at_once from 0 to below 1.")

    @classmethod
    def for_truth(
        cls, in_order: float, risen: float, gold: GoldCounts | None = None, *, false_alarm: float = 0.05, **rest: Any
    ) -> DriftDesign:
        """Return a design in true rates, read through the judge: its errors, as uncertain as they are, are not drift.

        A fifth of the permitted false alarms is spent on what the gold set leaves open about the judge.

        Raises
        ------
        ValueError
            The judge is too poor, or too little known, to tell the two rates apart.
        """
        if gold is None:
            return cls(in_order, (risen,), false_alarm, **rest)
        least = gold.flag_rate_upper(in_order, 1.0 - false_alarm / 5)
        seen = gold.flag_rate(risen) if gold.num_faults and gold.num_sound else math.nan
        if not least < seen:
            raise ValueError(
                f"The judge's errors let a rate of {in_order:.3f} read as {least:.3f} and one of {risen:.3f} as "
                f"{seen:.3f}; a larger gold set or a better judge is needed to tell them apart."
            )
        return cls(least, (seen,), 0.8 * false_alarm, **rest)


@dataclass(frozen=True, slots=True)
class DriftState:
    """Holds the state of the test; a value, stored as JSON between looks.

    ``purses`` is the wealth of each bettor family, ``unopened`` the wealth not yet at stake. ``alarmed_at`` is the
    number of answers at the first alarm and stays; a new baseline starts a new state.
    """

    purses: tuple[float, ...]
    unopened: float
    num_checked: int = 0
    alarmed_at: int | None = None

    @classmethod
    def start(cls, design: DriftDesign) -> DriftState:
        """Before the first answer."""
        return cls((0.0,) * len(design.risen), 1.0)

    @property
    def evidence(self) -> float:
        """Wealth as a multiple of the first: at least x with probability at most 1 / x while the rate is in order."""
        return self.unopened + sum(self.purses)

    @property
    def is_alarmed(self) -> bool:
        """Return whether an alarm was ever raised."""
        return self.alarmed_at is not None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "purses": list(self.purses),
            "unopened": self.unopened,
            "num_checked": self.num_checked,
            "alarmed_at": self.alarmed_at,
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> DriftState:
        """Return what :meth:`as_dict` wrote."""
        alarmed_at = stored["alarmed_at"]
        return cls(
            tuple(float(each) for each in stored["purses"]),
            float(stored["unopened"]),
            int(stored["num_checked"]),
            None if alarmed_at is None else int(alarmed_at),
        )


def observe(
    design: DriftDesign, state: DriftState, losses: Sequence[float], weights: Sequence[float] | None = None
) -> DriftState:
    """Return the state after further answers, in the order of their checking.

    Parameters
    ----------
    losses : 0 (as good) .. 1 (an upgrade was needed)
    weights : part of the stake that is bet on each, above 0 and at most 1: where inclusion probabilities differ, the
        least one over its own, so that no stratum weighs more than it has traffic. 1 for all when not given

    Raises
    ------
    ValueError
        A loss outside 0..1, or a weight outside its range.
    """
    for loss, weight in zip(losses, weights or (1.0,) * len(losses), strict=True):
        if not 0.0 <= loss <= 1.0 or not 0.0 < weight <= 1.0:
            raise ValueError(f"A loss is {loss!r} with the weight {weight!r}; expected 0 to 1, the weight above 0.")
        state = _step(design, state, loss, weight)
    return state


def _step(design: DriftDesign, state: DriftState, loss: float, weight: float) -> DriftState:
    opened = _opening(design, state)
    each = opened / len(design.risen)
    purses = tuple(
        min((purse + each) * (1.0 + weight * (_growth(design.in_order, rate, loss) - 1.0)), _MOST_WEALTH)
        for purse, rate in zip(state.purses, design.risen, strict=True)
    )
    num_checked = state.num_checked + 1
    moved = replace(state, purses=purses, unopened=state.unopened - opened, num_checked=num_checked)
    if moved.alarmed_at is None and moved.evidence >= 1.0 / design.false_alarm:
        return replace(moved, alarmed_at=num_checked)
    return moved


def _opening(design: DriftDesign, state: DriftState) -> float:
    """Wealth put at stake before the next answer: some at once, nine tenths of the rest evenly, then ever less."""
    if state.num_checked == 0:
        return design.at_once
    if state.num_checked < design.horizon:
        return 0.9 * (1.0 - design.at_once) / design.horizon
    return state.unopened / design.horizon


def _growth(in_order: float, risen: float, loss: float) -> float:
    """Likelihood ratio of the two rates for a loss of 0 or 1, linear between: its mean is 1 at ``in_order``."""
    return loss * risen / in_order + (1.0 - loss) * (1.0 - risen) / (1.0 - in_order)
