"""Tenants whose traffic suddenly goes to the dear tiers, watched over the decisions of the log. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import msgspec

from gateway.store.monitoring import Decided
from policies.anomaly import AlertRule, TenantWatch, watch

MAX_TENANTS = 1000
REASONS = ("sufficient", "benefit", "none_suffices", "novel")
"""Why the router itself chose: pinned, explored, sticky or tightened decisions say nothing of a prompt."""


@dataclass(frozen=True, slots=True)
class TenantWatches:
    """All tenants' watches; a value to be stored. The k-th tenant has 6 / (pi k)^2 of the stated false alarms."""

    watches: Mapping[str, TenantWatch] = field(default_factory=dict)
    places: Mapping[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            tenant: {"place": self.places[tenant], **msgspec.to_builtins(each)} for tenant, each in self.watches.items()
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        return cls(
            {tenant: msgspec.convert(each, TenantWatch) for tenant, each in stored.items()},
            {tenant: int(each["place"]) for tenant, each in stored.items()},
        )

    def renewed(self, tenant: str) -> TenantWatches:
        """Return a tenant's watch begun anew, from another baseline."""
        return replace(self, watches={**self.watches, tenant: TenantWatch()})


def watch_tenants(
    watches: TenantWatches, decisions: Sequence[Decided], rule: AlertRule, top: int
) -> tuple[TenantWatches, list[str]]:
    """Return the watches after further decisions, and the tenants that raised an alert by them."""
    found = dict(watches.watches)
    places = dict(watches.places)
    alarmed: list[str] = []
    for each in decisions:
        place = places.setdefault(each.tenant, len(places) + 1)
        if place > MAX_TENANTS:
            del places[each.tenant]
            continue
        before = found.get(each.tenant, TenantWatch())
        mine = replace(rule, false_alarm=rule.false_alarm * 6.0 / (math.pi * place) ** 2)
        after = found[each.tenant] = watch(mine, before, each.tier == top)
        if after.is_alarmed and not before.is_alarmed:
            alarmed.append(each.tenant)
    return TenantWatches(found, places), alarmed
