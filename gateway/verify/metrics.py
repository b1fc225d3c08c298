"""Metrics of the checks for ``/metrics``. The names are listed in docs/metrics.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gateway.store.records import VerificationJob
from gateway.store.verifications import NOTHING, CheckResult, QueueState, Spent
from gateway.verify.check_budget import CheckLedger


class VerificationMetrics:
    """Counters of this process's worker, and the queue as it last saw it."""

    def __init__(self) -> None:
        self.verdicts: Counter[tuple[str, str, str]] = Counter()
        self.endings: Counter[str] = Counter()
        self.spent = NOTHING
        self.ledger = CheckLedger()
        self.state = QueueState()
        self.oldest_s = 0.0
        self.throttle = 1.0

    def note_verdict(self, job: VerificationJob, result: CheckResult) -> None:
        """Count a finished check."""
        self.verdicts[job.direction, str(job.tier), "good" if result.verdict else "not_good"] += 1
        self.endings["done"] += 1

    def note_spent(self, spent: Spent) -> None:
        self.spent += spent

    def collect(self) -> Iterable[Metric]:
        verdicts = CounterMetricFamily(
            "suffice_verdicts", "Checked answers by verdict.", labels=["direction", "tier", "verdict"]
        )
        for labels, count in self.verdicts.items():
            verdicts.add_metric(labels, count)
        yield verdicts
        endings = CounterMetricFamily("suffice_verifications", "Tries of checks by how they ended.", labels=["ending"])
        for ending, count in self.endings.items():
            endings.add_metric([ending], count)
        yield endings
        yield CounterMetricFamily("suffice_verification_cost_usd", "Cost of checks.", value=float(self.spent.cost_usd))
        yield CounterMetricFamily(
            "suffice_verification_compute_seconds", "Device seconds of checks.", value=self.spent.compute_s
        )
        hour_usd, served_usd = self.ledger.hour.cost_usd, self.ledger.served_hour_usd
        share = float(hour_usd / served_usd) if served_usd else 0.0
        yield GaugeMetricFamily(
            "suffice_verification_cost_share", "Cost of checks against that of serving, in the last hour.", share
        )
        jobs = GaugeMetricFamily("suffice_verification_jobs", "Checks waiting and under way.", labels=["status"])
        jobs.add_metric(["queued"], self.state.num_queued)
        jobs.add_metric(["running"], self.state.num_running)
        yield jobs
        yield GaugeMetricFamily(
            "suffice_verification_oldest_seconds", "Age of the oldest check that is not done.", self.oldest_s
        )
        yield GaugeMetricFamily(
            "suffice_verification_throttle",
            "Factor on every chance of being drawn; below 1 while behind.",
            self.throttle,
        )
