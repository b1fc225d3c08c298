"""Whether one tenant or one domain falls below a policy's floor while the rest holds it. Pure: rows in, findings out.

A group is judged as its policy is, on its own checked answers and its own traffic. One test a group would find one in
twenty sound groups guilty, so the error that the policy permits is split evenly over all that are judged.

A group is singled out only where it explains the doubt: what is left without it must have been checked enough and lie
within what the floor permits. Where it does not, the matter is the whole policy's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from gateway.control.control_state import Quarantine, groups_of
from gateway.control.floor_findings import (
    FloorEvidence,
    FloorFinding,
    certificate_of,
    certificate_view,
    find_floor,
    quarantine_levels,
)
from gateway.store.monitoring import CheckedRow, Key, Traffic
from policies.certificate import Certificate, FloorStatus
from policies.policy import Policy

MAX_GROUPS = 200
# Of one policy, in one look; more at once are no longer exceptions.
MAX_SINGLED_OUT = 20

TierQuarantines = Mapping[int, Quarantine]
GroupTraffic = Mapping[tuple[str, Key], Traffic]
"""(group, key) -> its part of the traffic."""


@dataclass(frozen=True, slots=True)
class GroupScope:
    """Holds what a group is judged by: the active policy with the serving router, and the dearest tier it permits."""

    policy: Policy
    router_version: str
    top: int
    quarantine: TierQuarantines
    min_checked: int


@dataclass(frozen=True, slots=True)
class GroupFinding:
    """Holds the finding about one group, and its quarantines."""

    group: str
    scope: GroupScope
    certificate: Certificate
    asked: TierQuarantines

    def as_dict(self) -> dict[str, Any]:
        family, _, name = self.group.partition(":")
        return certificate_view(self.certificate) | {
            "family": family,
            "name": name,
            "policy": self.scope.policy.name,
            "router_version": self.scope.router_version,
            "floor": self.scope.policy.quality_floor,
            "confidence": self.certificate.confidence,
            "tightened": {str(tier): each.as_dict() for tier, each in self.asked.items()},
        }


def groups_to_judge(rows: Sequence[CheckedRow], scope: GroupScope) -> list[str]:
    """Groups with enough checked answers, those with the most first."""
    counts = Counter(group for row in rows if row.is_up and _is_of(row, scope) for group in _groups(row))
    found = [group for group, num in counts.most_common(MAX_GROUPS) if num >= scope.min_checked]
    return sorted(found, key=lambda group: (-counts[group], group))


def judge_groups(
    scope: GroupScope,
    groups: Sequence[str],
    evidence: FloorEvidence,
    traffic: GroupTraffic,
    asked: Mapping[str, TierQuarantines],
) -> list[GroupFinding]:
    """Return every group's certificate; ``asked`` is what is asked of groups by now."""
    found = []
    for group in groups:
        mine = _GroupCase.of(scope, group, evidence, traffic, asked, len(groups))
        found.append(GroupFinding(group, scope, mine.certificate(), asked.get(group, {})))
    return found


def single_out(
    scope: GroupScope,
    groups: Sequence[str],
    evidence: FloorEvidence,
    traffic: GroupTraffic,
    asked: Mapping[str, TierQuarantines],
    now: str,
) -> dict[str, dict[int, Quarantine]]:
    """Return the quarantines of groups that break the floor by themselves; empty where the rest is no better.

    The group that loses most is taken first and the others are judged again without what it takes away, so that a
    domain is not blamed for its one bad tenant, nor a tenant for a bad domain.
    """
    found: dict[str, dict[int, Quarantine]] = {}
    left = list(groups)
    while left and len(found) < MAX_SINGLED_OUT:
        present = {**asked, **found}
        rest = _with_quarantines(scope, evidence, present)
        matters = [_GroupCase.of(scope, group, rest, traffic, present, len(groups)) for group in left]
        broken = [(each, certificate) for each in matters if _is_broken(certificate := each.certificate(), scope)]
        if not broken:
            break
        # Of equals the tenant: its name says whom to ask.
        worst, _ = max(broken, key=lambda each: (each[1].loss, each[0].group.startswith("tenant:")))
        left = [each.group for each, _ in broken if each is not worst]
        if more := _more(worst.finding(), present.get(worst.group, {}), scope, now):
            found[worst.group] = more
    return found if found and _rest_holds(scope, found, _with_quarantines(scope, evidence, {**asked, **found})) else {}


def rows_of(group: str, rows: Sequence[CheckedRow]) -> list[CheckedRow]:
    """Return a group's own."""
    return [row for row in rows if group in _groups(row)]


@dataclass(frozen=True, slots=True)
class _GroupCase:
    """A group ready to be judged: its own rows and traffic, and the policy with the group's part of the error."""

    group: str
    scope: GroupScope
    policy: Policy
    evidence: FloorEvidence
    quarantine: TierQuarantines

    @classmethod
    def of(
        cls,
        scope: GroupScope,
        group: str,
        evidence: FloorEvidence,
        traffic: GroupTraffic,
        asked: Mapping[str, TierQuarantines],
        num_groups: int,
    ) -> Self:
        policy = replace(scope.policy, confidence=1.0 - (1.0 - scope.policy.confidence) / num_groups)
        mine = {key: each for (name, key), each in traffic.items() if name == group}
        part = replace(evidence, rows=rows_of(group, evidence.rows), traffic=mine)
        return cls(group, scope, policy, part, _most(scope.quarantine, asked.get(group, {})))

    def certificate(self) -> Certificate:
        return certificate_of(self.policy, self.scope.router_version, self.scope.top, self.evidence, self.quarantine)

    def finding(self) -> FloorFinding:
        return find_floor(self.policy, self.scope.router_version, self.scope.top, self.evidence, self.quarantine)


def _is_broken(certificate: Certificate, scope: GroupScope) -> bool:
    return certificate.status is FloorStatus.BROKEN and certificate.num_checked >= scope.min_checked


def _more(finding: FloorFinding, before: TierQuarantines, scope: GroupScope, now: str) -> dict[int, Quarantine]:
    """Return the quarantines of before with those that the finding adds; empty when it adds none."""
    certificate = finding.certificate
    reason = f"floor {scope.policy.quality_floor} broken, loss {certificate.loss:.4f} of {certificate.num_checked}"
    more = {
        tier: Quarantine(least, reason, now)
        for tier, least in quarantine_levels(finding, scope.min_checked).items()
        if tier not in before or least > before[tier].least
    }
    return {**before, **more} if more else {}


def _rest_holds(scope: GroupScope, found: Collection[str], evidence: FloorEvidence) -> bool:
    """Whether others were checked enough, and the policy's loss is what it permits without what the groups give up."""
    others = [row for row in evidence.rows if row.is_up and _is_of(row, scope) and not set(_groups(row)) & set(found)]
    certificate = certificate_of(scope.policy, scope.router_version, scope.top, evidence, scope.quarantine)
    return len(others) >= scope.min_checked and certificate.loss <= 1.0 - scope.policy.quality_floor


def _with_quarantines(
    scope: GroupScope, evidence: FloorEvidence, asked: Mapping[str, TierQuarantines]
) -> FloorEvidence:
    others = dict(evidence.groups)
    mine = {**others.get(scope.policy.name, {}), scope.router_version: asked}
    return replace(evidence, groups={**others, scope.policy.name: mine})


def _most(first: TierQuarantines, second: TierQuarantines) -> dict[int, Quarantine]:
    found = dict(first)
    for tier, asked in second.items():
        if tier not in found or asked.least > found[tier].least:
            found[tier] = asked
    return found


def _is_of(row: CheckedRow, scope: GroupScope) -> bool:
    policy = scope.policy
    mine = (policy.name, policy.version, scope.router_version)
    return (row.policy_name, row.policy_version, row.router_version) == mine


def _groups(row: CheckedRow) -> tuple[str, ...]:
    return groups_of(row.tenant, row.domain)
