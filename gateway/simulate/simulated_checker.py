"""A checker whose errors are known: it looks the truth up, and lies about it as often as the scenario says."""

from __future__ import annotations

import random
from collections.abc import Callable
from decimal import Decimal

from gateway.access.spending_lease import SpendingHold
from gateway.models.catalog import Catalog
from gateway.simulate.scenario import SimulatedJudge
from gateway.simulate.traffic_generator import SimulatedRequest
from gateway.store.records import VerificationJob
from gateway.store.verifications import CheckResult, Spent
from gateway.verify.answer_checker import CheckMethod, SpendMeter

# Share of sound answers among those it is shown that it was calibrated for, and the errors it was calibrated with.
_CALIBRATED_FOR, _CALIBRATED = 0.93, SimulatedJudge()
# What reading an answer costs of what writing one does: one pass over its tokens instead of a pass for each.
READ_SHARE = Decimal("0.1")


class KnownChecker:
    """Stands where :class:`gateway.verify.answer_checker.AnswerChecker` does.

    Its probabilities are calibrated for the errors it is supposed to have; a scenario may give it others.

    Parameters
    ----------
    catalog : for prices
    truth : of a request, by its id
    judge : the errors at present
    seed : of its lies
    """

    def __init__(
        self, catalog: Catalog, truth: Callable[[str], SimulatedRequest], judge: Callable[[], SimulatedJudge], seed: int
    ) -> None:
        self._catalog = catalog
        self._truth = truth
        self._judge = judge
        self._rng = random.Random(f"judge/{seed}")

    def can_only_read(self, job: VerificationJob) -> bool:
        """Reading serves for answers that were served by the cheaper tier."""
        return job.direction == "up"

    async def check(
        self, job: VerificationJob, how: CheckMethod, spend: SpendMeter, hold: SpendingHold | None = None
    ) -> CheckResult:
        """Say whether the cheaper of the two answers was good enough."""
        asked, errors = self._truth(job.request_id), self._judge()
        cheap = min(job.tier, job.against_tier)
        is_sound = asked.is_as_good(cheap)
        says_sound = self._rng.random() < (errors.knows_sound if is_sound else 1.0 - errors.knows_fault)
        other = self._catalog.ladder[job.against_tier - 1]
        price = other.price_per_request_usd * (READ_SHARE if how == "score" else 1)
        spend(Spent(price))
        return CheckResult(p_good=_calibrated(says_sound=says_sound), grader="known", grader_version="1")


def _calibrated(*, says_sound: bool) -> float:
    """P(sound | what it says), by Bayes, for the errors and the base rate it was calibrated with."""
    if_sound = _CALIBRATED.knows_sound if says_sound else 1.0 - _CALIBRATED.knows_sound
    if_fault = 1.0 - _CALIBRATED.knows_fault if says_sound else _CALIBRATED.knows_fault
    sound = _CALIBRATED_FOR * if_sound
    return sound / (sound + (1.0 - _CALIBRATED_FOR) * if_fault)
