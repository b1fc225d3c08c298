"""Bounds the cost of checks: absolute limits, and a share of what serving costs. Pure; amounts are given."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from gateway.config.sections import VerificationConfig
from gateway.store.verifications import NOTHING, Spent


@dataclass(frozen=True, slots=True)
class CheckLedger:
    """Holds what was spent on checks and on serving lately.

    Parameters
    ----------
    hour, day : on checks, in the last hour and day
    served_hour_usd : on serving, in the last hour
    """

    hour: Spent = NOTHING
    day: Spent = NOTHING
    served_hour_usd: Decimal = Decimal(0)

    def plus(self, spent: Spent) -> CheckLedger:
        """Return the same after one more check."""
        return CheckLedger(self.hour + spent, self.day + spent, self.served_hour_usd)


class CheckBudget:
    """Says whether a check that will cost so much may begin."""

    def __init__(self, config: VerificationConfig) -> None:
        self._share = Decimal(repr(config.max_cost_share))
        self._allowance_usd = Decimal(repr(config.allowance_usd))
        self._usd = (_dollars(config.max_usd_per_hour), _dollars(config.max_usd_per_day))
        self._compute_s = (config.max_compute_s_per_hour, config.max_compute_s_per_day)

    def allows(self, ledger: CheckLedger, expected: Spent) -> bool:
        """Return whether the spending stays within every limit with ``expected`` on top.

        A share of serving cost would forbid the first check of a quiet hour for ever, so a small allowance comes first.
        """
        windows = (ledger.hour + expected, ledger.day + expected)
        for window, most_usd, most_s in zip(windows, self._usd, self._compute_s, strict=True):
            if most_usd is not None and (most_usd == 0 or window.cost_usd > most_usd):
                return False
            if most_s is not None and (most_s == 0 or window.compute_s > most_s):
                return False
        share_usd = max(self._allowance_usd, self._share * ledger.served_hour_usd)
        return share_usd > 0 and windows[0].cost_usd <= share_usd


def _dollars(amount: float | None) -> Decimal | None:
    return None if amount is None else Decimal(repr(amount))
