"""Whether a policy holds its floor, tier by tier and as a whole, from what was checked. Pure: rows in, findings out.

Answers whose checks failed or are still to come are taken to be missing at random: the chance of having been checked is
the chance of having been drawn times the share of drawn ones that are done. Faulty answers, which need no check, are
all there.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import numpy as np

from gateway.control.control_state import CLOSED, GroupQuarantines, Quarantine, groups_of, stored_least
from gateway.store.monitoring import CheckedRow, DrawnCount, Key, Traffic
from policies.certificate import Certificate, CertifiedThreshold, CheckedSample, FloorStatus, certify, certify_threshold
from policies.intervals import binomial_lower, binomial_upper, bounded_upper
from policies.judge_correction import GoldCounts
from policies.policy import Policy

# Chosen before any row was seen, as the test over it demands.
THRESHOLDS: tuple[float, ...] = (*(step / 50 for step in range(50)), 0.99, 0.995)
RAW_SAMPLES = 100
RAW_TRIGGER = 0.15


@dataclass(frozen=True, slots=True)
class TierFinding:
    """Holds the finding about one tier's answers under a policy.

    Attributes
    ----------
    cheapest : the lowest threshold on P(as good) with which this tier alone would hold the floor; None: none does
    num_above : checked answers at or above it; without any it holds only because nothing is left
    threshold : what it must reach now
    quarantine : what the doubt about it asks on top; None when there is none
    """

    tier: int
    certificate: Certificate
    cheapest: float | None
    num_above: int
    threshold: float
    quarantine: Quarantine | None
    num_undrawable: int

    def as_dict(self) -> dict[str, Any]:
        asked = None if self.quarantine is None else self.quarantine.as_dict()
        return certificate_view(self.certificate) | {
            "tier": self.tier,
            "cheapest_threshold": self.cheapest,
            "num_checked_above": self.num_above,
            "threshold": stored_least(self.threshold),
            "tightened": asked,
            "is_closed": self.quarantine is not None and self.quarantine.is_closed,
            "num_undrawable": self.num_undrawable,
        }


@dataclass(frozen=True, slots=True)
class FloorFinding:
    """Holds the finding about a policy under a router.

    ``is_corrected``: for the grader's errors, by the gold set.
    """

    policy: Policy
    router_version: str
    status: FloorStatus
    certificate: Certificate
    is_corrected: bool
    tiers: tuple[TierFinding, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return certificate_view(self.certificate) | {
            "status": self.status.value,
            "policy": self.policy.name,
            "policy_version": self.policy.version,
            "router_version": self.router_version,
            "floor": self.policy.quality_floor,
            "confidence": self.policy.confidence,
            "is_corrected_by_gold": self.is_corrected,
            "tiers": [each.as_dict() for each in self.tiers],
            "raw_upgrade_rate": dict(self.raw),
        }


@dataclass(frozen=True, slots=True)
class FloorEvidence:
    """Everything that findings rest on, for all policies together.

    ``groups`` are the quarantined tenants and domains: their answers count only where they would still be the tier's.
    ``versions`` are earlier versions of policies that count as the active one.
    """

    rows: Sequence[CheckedRow]
    traffic: Mapping[Key, Traffic]
    drawn: Mapping[tuple[Key, bool], DrawnCount]
    gold: GoldCounts | None
    groups: GroupQuarantines = field(default_factory=dict)
    versions: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def keeps(self, row: CheckedRow) -> bool:
        """Return whether no group's doubt would move such a request up today."""
        groups = self.groups.get(row.policy_name, {}).get(row.router_version)
        if not groups:
            return True
        tiers = [groups[each] for each in groups_of(row.tenant, row.domain) if each in groups]
        estimate = -1.0 if row.p_as_good is None else row.p_as_good
        return all(row.tier not in asked or estimate >= asked[row.tier].least for asked in tiers)


def recent(evidence: FloorEvidence, policy: Policy, router_version: str, num: int) -> FloorEvidence:
    """Return a policy's last checked answers with the traffic they stand for: the evidence after a change."""
    mine = (policy.name, policy.version, router_version)
    rows = [row for row in evidence.rows if row.is_up and _key3(row) == mine]
    rows = sorted(rows, key=lambda row: (row.finished_at, row.verification_id))[-num:]
    sums: dict[Key, float] = {}
    for row in rows:
        sums[*mine, row.tier] = sums.get((*mine, row.tier), 0.0) + 1.0 / row.inclusion
    traffic = {key: Traffic(math.ceil(each)) for key, each in sums.items()}
    return FloorEvidence(rows, traffic, {}, evidence.gold, evidence.groups)


def find_floor(
    policy: Policy, router_version: str, top: int, evidence: FloorEvidence, quarantine: Mapping[int, Quarantine]
) -> FloorFinding:
    """Judge a policy as it is active now; decisions of another version or another router stay out.

    Parameters
    ----------
    policy : with the thresholds derived for it
    top : number of the dearest tier it permits; its answers lose nothing
    quarantine : quarantined tiers; of their earlier answers only those count that would still be theirs
    """
    parts, num_top = _parts(policy, router_version, top, evidence, quarantine)
    tiers = tuple(_tier(policy, tier, part, evidence, quarantine.get(tier)) for tier, part in parts.items())
    status, certificate = _over_all(parts, num_top, policy, evidence.gold)
    rows = [row for part in parts.values() for row in part.rows]
    is_corrected = evidence.gold is not None
    return FloorFinding(policy, router_version, status, certificate, is_corrected, tiers, raw_upgrade_rate(rows))


def certificate_of(
    policy: Policy, router_version: str, top: int, evidence: FloorEvidence, quarantine: Mapping[int, Quarantine]
) -> Certificate:
    """Return the certificate of :func:`find_floor` alone; its tiers and their thresholds take most of the time."""
    parts, num_top = _parts(policy, router_version, top, evidence, quarantine)
    status, certificate = _over_all(parts, num_top, policy, evidence.gold)
    return replace(certificate, status=status)


def raw_upgrade_rate(rows: Sequence[CheckedRow], num: int = RAW_SAMPLES) -> dict[str, Any]:
    """Return the share of the last checked answers whose verdict was "not good enough", with its exact 95 % interval.

    Shown because people ask for it; nothing follows from it, since a grader that errs moves it by itself.
    """
    last = sorted((row for row in rows if row.is_up), key=lambda row: (row.finished_at, row.verification_id))[-num:]
    flagged = round(sum(1 - row.verdict for row in last))
    return {
        "value": flagged / len(last) if last else None,
        "low": binomial_lower(flagged, len(last), 0.975) if last else 0.0,
        "high": binomial_upper(flagged, len(last), 0.975) if last else 1.0,
        "num_checked": len(last),
        "trigger": RAW_TRIGGER,
    }


def released_level(
    rows: Sequence[CheckedRow], policy: Policy, tier: int, asked: Quarantine, min_checked: int
) -> float | None:
    """Return the lowest P(as good) above which this tier was shown to hold the floor since its quarantine began.

    Rests on the tier's own answers checked since then, and on those it was asked for beside the answer of a tier that
    doubt had moved the request up to; each kind thinned to equal probability, so that they are a random sample of the
    requests above each threshold. The bound may be looked at as often as one likes. None: nothing is shown yet.
    Thresholds are tried from the safest, and the first that fails ends it.
    """
    since = datetime.fromisoformat(asked.since)
    recent = [row for row in rows if row.tier == tier and row.p_as_good is not None and row.created_at >= since]
    served, beside = (
        [row for row in recent if row.is_up],
        [row for row in recent if row.is_quarantine_check and not row.is_up],
    )
    sample = thinned(served) + thinned(beside)
    lowest: float | None = None
    asked_always = policy.threshold(tier)
    # The policy's own threshold is among them, or what lies between it and the next of the grid were never given back.
    for threshold in sorted({asked_always, *(each for each in THRESHOLDS if each >= asked_always)}, reverse=True):
        if threshold >= asked.least:
            continue
        losses = np.array([row.loss for row in sample if row.p_as_good is not None and row.p_as_good >= threshold])
        if len(losses) < min_checked:
            continue
        if bounded_upper(losses, np.ones(len(losses)), policy.confidence) > 1.0 - policy.quality_floor:
            break
        lowest = threshold
    return lowest


def thinned(rows: Sequence[CheckedRow]) -> list[CheckedRow]:
    """A part of the rows in which each request had the same chance to be; always the same part for the same rows."""
    least = min((row.inclusion for row in rows), default=1.0)
    return [row for row in rows if random.Random(row.verification_id).random() * row.inclusion < least]


@dataclass(frozen=True, slots=True)
class _TierSample:
    """One tier's rows and the samples made of them: by probabilities, and by verdicts for the gold correction."""

    rows: tuple[CheckedRow, ...]
    checked: tuple[CheckedSample, CheckedSample]
    num_undrawable: int


def _parts(
    policy: Policy, router_version: str, top: int, evidence: FloorEvidence, quarantine: Mapping[int, Quarantine]
) -> tuple[dict[int, _TierSample], int]:
    """Return the tiers below the top, rising, and how many requests the top answered."""
    mine = {key[3]: key for key in evidence.traffic if key[:3] == (policy.name, policy.version, router_version)}
    num_top = sum(evidence.traffic[key].num_requests for tier, key in mine.items() if tier >= top)
    below = sorted(tier for tier in mine if tier < top)
    return {tier: _part(mine[tier], evidence, quarantine.get(tier)) for tier in below}, num_top


def _part(key: Key, evidence: FloorEvidence, asked: Quarantine | None) -> _TierSample:
    traffic = evidence.traffic[key]
    count = evidence.drawn.get((key, True), DrawnCount())
    done_share = count.num_done / count.num_drawn if count.num_drawn else 1.0
    rows = tuple(row for row in evidence.rows if row.is_up and (*_key3(row), row.tier) == key)
    shares = [row.inclusion if row.is_known else row.inclusion * done_share for row in rows]
    inclusion = np.array([max(each, 1e-6) for each in shares], dtype=np.float64)
    estimates = np.array([-1.0 if row.p_as_good is None else row.p_as_good for row in rows], dtype=np.float64)
    kept = np.array([evidence.keeps(row) for row in rows], dtype=np.bool_)
    if asked is not None:
        kept &= estimates >= asked.least
    num_requests = max(traffic.num_requests, len(rows))
    least = min(float(inclusion.min()), max(traffic.least * done_share, 1e-6)) if len(rows) else None
    soft = np.array([row.loss for row in rows], dtype=np.float64)
    flags = np.array([1.0 - row.verdict for row in rows], dtype=np.float64)
    samples = [CheckedSample(np.where(kept, each, 0.0), inclusion, num_requests, least, kept) for each in (soft, flags)]
    return _TierSample(rows, (samples[0], samples[1]), traffic.num_undrawable)


def _key3(row: CheckedRow) -> tuple[str, str, str]:
    return row.policy_name, row.policy_version, row.router_version


def _tier(
    policy: Policy, tier: int, part: _TierSample, evidence: FloorEvidence, asked: Quarantine | None
) -> TierFinding:
    _, certificate = _over_all({tier: part}, 0, policy, evidence.gold)
    estimates = np.array([-1.0 if row.p_as_good is None else row.p_as_good for row in part.rows], dtype=np.float64)
    found = CertifiedThreshold(None, None)
    if len(part.rows):
        found = _cheapest(estimates, part.checked, policy, evidence.gold)
    num_above = 0 if found.threshold is None else int((estimates >= found.threshold).sum())
    threshold = max(policy.threshold(tier), asked.least if asked is not None else 0.0)
    return TierFinding(tier, certificate, found.threshold, num_above, threshold, asked, part.num_undrawable)


def _cheapest(
    estimates: Any, checked: tuple[CheckedSample, CheckedSample], policy: Policy, gold: GoldCounts | None
) -> CertifiedThreshold:
    sample = checked[0] if gold is None else checked[1]
    return certify_threshold(estimates, sample, THRESHOLDS, policy.quality_floor, policy.confidence, gold)


def _over_all(
    parts: Mapping[int, _TierSample], num_top: int, policy: Policy, gold: GoldCounts | None
) -> tuple[FloorStatus, Certificate]:
    """The finding over all requests: held only if it is with every answer that could not be drawn taken for lost."""
    status, found = _judge([part.checked for part in parts.values()], num_top, policy, gold)
    num_unseen = sum(part.num_undrawable for part in parts.values())
    if not num_unseen:
        return status, found
    num_requests = found.num_requests + num_unseen
    loss_high = (found.loss_high * found.num_requests + num_unseen) / num_requests
    if status is FloorStatus.HELD and loss_high > 1.0 - policy.quality_floor:
        status = FloorStatus.INSUFFICIENT
    return status, replace(found, status=status, loss_high=loss_high, num_requests=num_requests)


def _judge(
    parts: Sequence[tuple[CheckedSample, CheckedSample]], num_lossless: int, policy: Policy, gold: GoldCounts | None
) -> tuple[FloorStatus, Certificate]:
    """Held by what corrects the grader where that is possible; broken by what the grader's probabilities say."""
    soft = certify(_joined([each[0] for each in parts], num_lossless), policy.quality_floor, policy.confidence)
    if gold is None:
        return soft.status, soft
    flags = _joined([each[1] for each in parts], num_lossless)
    corrected = certify(flags, policy.quality_floor, policy.confidence, gold)
    if corrected.status is FloorStatus.HELD:
        return FloorStatus.HELD, corrected
    return (FloorStatus.BROKEN if soft.status is FloorStatus.BROKEN else FloorStatus.INSUFFICIENT), corrected


def _joined(parts: Sequence[CheckedSample], num_lossless: int) -> CheckedSample:
    """Several tiers' samples as one, with requests that lose nothing beside them."""
    if not parts:
        return CheckedSample(np.zeros(0), np.zeros(0), num_lossless)
    leasts = [part.least_inclusion for part in parts if part.least_inclusion is not None]
    return CheckedSample(
        np.concatenate([part.losses for part in parts]),
        np.concatenate([part.inclusion for part in parts]),
        sum(part.num_requests for part in parts) + num_lossless,
        min(leasts, default=None),
        np.concatenate(
            [np.ones(len(part.losses), dtype=np.bool_) if part.kept is None else part.kept for part in parts]
        ),
    )


def certificate_view(certificate: Certificate) -> dict[str, Any]:
    """For JSON."""
    return {
        "status": certificate.status.value,
        "loss": certificate.loss if certificate.num_requests else None,
        "loss_low": certificate.loss_low,
        "loss_high": certificate.loss_high,
        "quality_low": certificate.quality_low,
        "num_checked": certificate.num_checked,
        "num_requests": certificate.num_requests,
    }


def quarantine_levels(finding: FloorFinding, min_checked: int) -> dict[int, float]:
    """Return each tier's quarantine when the floor is in doubt: the certified threshold, or closed.

    Only tiers whose own estimate is beyond what the floor permits; when none is, every tier that was checked.
    """
    permitted = 1.0 - finding.policy.quality_floor
    checked = [each for each in finding.tiers if each.certificate.num_checked > 0]
    at_fault = [
        each
        for each in checked
        if each.certificate.loss > permitted and each.certificate.num_checked >= min_checked // 4
    ]
    asked: dict[int, float] = {}
    for each in at_fault or checked:
        is_shown = each.num_above >= min_checked // 4
        asked[each.tier] = each.cheapest if each.cheapest is not None and is_shown else CLOSED
    return asked
