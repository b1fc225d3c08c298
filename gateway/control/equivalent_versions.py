"""Carries evidence over an edit that decides nothing anew: versions of a policy with one rule are judged as one.

The rule is what decides an answer's tier: active thresholds, tiers, prices, exploration and the rest. How
many answers are drawn, and how sure a certificate is to be, are none of it; nor is the floor itself, where the
thresholds it stands for are the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from gateway.config.errors import SettingsError
from gateway.config.policy_body import from_body
from gateway.control.control_plane import ControlPlane
from gateway.control.floor_findings import FloorEvidence
from gateway.models.loader import complete_policies
from gateway.store.monitoring import DrawnCount, Key, Traffic
from policies.errors import PolicyError
from policies.escalation import EscalationMode
from policies.policy import Policy
from policies.types import ThresholdMode

T = TypeVar("T")

Versions = Mapping[tuple[str, str], str]
"""(policy's name, earlier version) -> the active version, which decides by the same rule."""

_NO_RULE = frozenset(
    {
        "name",
        "version",
        "quality_floor",
        "confidence",
        "thresholds",
        "sampling",
        "sampling_share",
        "budget_usd_per_day",
    }
)
_MAX_REMEMBERED = 1000


def rule_of(policy: Policy, num_tiers: int) -> tuple[Any, ...]:
    """Return the rule a completed policy decides by; policies with equal rules send every request to the same tier."""
    fields = dataclasses.fields(policy)
    rule = [(each.name, getattr(policy, each.name)) for each in fields if each.name not in _NO_RULE]
    if policy.mode is ThresholdMode.FLOOR:
        rule.append(("thresholds", tuple(policy.threshold(tier) for tier in range(1, num_tiers))))
    if policy.escalation.mode is not EscalationMode.OFF:
        rule.append(("quality_floor", policy.quality_floor))
    return tuple(rule)


class EquivalentVersions:
    """Finds the earlier versions that decide like the active ones; a version is read once for each router.

    Parameters
    ----------
    plane : the active policies, and where versions are stored
    """

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._rules: dict[tuple[str, str, str], tuple[Any, ...] | None] = {}

    async def versions(self, keys: Iterable[Key]) -> Versions:
        """Among what traffic was decided by.

        Raises
        ------
        StoreUnavailable and its kinds
        """
        plane = self._plane
        found: dict[tuple[str, str], str] = {}
        for name, version in {(key[0], key[1]) for key in keys if key[2] == plane.routers.version}:
            present = plane.policies.get(name)
            if present is None or version == present.version:
                continue
            if await self._rule(name, version) == rule_of(present, len(plane.ladder)):
                found[name, version] = present.version
        return found

    async def _rule(self, name: str, version: str) -> tuple[Any, ...] | None:
        """None for a version that is not stored, or cannot be used with this ladder any more."""
        key = (name, version, self._plane.routers.version)
        if key not in self._rules:
            if len(self._rules) >= _MAX_REMEMBERED:
                self._rules.clear()
            self._rules[key] = await self._read(name, version)
        return self._rules[key]

    async def _read(self, name: str, version: str) -> tuple[Any, ...] | None:
        plane = self._plane
        stored = await plane.store.store.get_policy_version(name, version)
        if stored is None:
            return None
        try:
            policy = from_body(name, stored.body, plane.ladder, version=version)
            policy = complete_policies({name: policy}, plane.routers.serving.router)[name]
        except (SettingsError, PolicyError):
            return None
        return rule_of(policy, len(plane.ladder))


def carry_evidence(evidence: FloorEvidence, versions: Versions) -> FloorEvidence:
    """Return the evidence as if the active versions had decided all that they would have decided alike."""
    if not versions:
        return evidence
    rows = [
        replace(row, policy_version=versions.get((row.policy_name, row.policy_version), row.policy_version))
        for row in evidence.rows
    ]
    traffic: dict[Key, Traffic] = {}
    for key, each in evidence.traffic.items():
        _add_traffic(traffic, _renamed(key, versions), each)
    drawn: dict[tuple[Key, bool], DrawnCount] = {}
    for (key, is_up), count in evidence.drawn.items():
        place = (_renamed(key, versions), is_up)
        before = drawn.get(place, DrawnCount())
        drawn[place] = DrawnCount(before.num_drawn + count.num_drawn, before.num_done + count.num_done)
    return replace(evidence, rows=rows, traffic=traffic, drawn=drawn, versions=versions)


def carry_traffic(traffic: Mapping[tuple[str, Key], Traffic], versions: Versions) -> dict[tuple[str, Key], Traffic]:
    """Return the same for the traffic of groups."""
    found: dict[tuple[str, Key], Traffic] = {}
    for (group, key), each in traffic.items():
        _add_traffic(found, (group, _renamed(key, versions)), each)
    return found


def _add_traffic(found: dict[T, Traffic], place: T, more: Traffic) -> None:
    before = found.get(place, Traffic())
    found[place] = Traffic(
        before.num_requests + more.num_requests,
        before.num_undrawable + more.num_undrawable,
        min(before.least, more.least),
    )


def _renamed(key: Key, versions: Versions) -> Key:
    return (key[0], versions.get((key[0], key[1]), key[1]), key[2], key[3])
