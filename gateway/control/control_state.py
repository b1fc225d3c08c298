"""Holds the active control state as one immutable value, decoded from the rows of the ``control`` table.

Every row is a JSON object with a version of its own, raised by each change to it; ``generation`` counts all changes and
is what the servers look at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from gateway.control.stored_value import StoredValue

GENERATION = "generation"
KILL_SWITCH = "kill_switch"
POLICIES = "policies"
ROUTER = "router"
TIGHTENING = "tightening"
GROUPS = "tightening_groups"

NO_ROUTER = "none"
"""How the database and the API write that no router serves."""

CLOSED = math.inf
"""Least P(as good) of a closed tier: no estimate reaches it, so the tier takes nothing but explored requests."""

_STORED_CLOSED = 2.0


def router_key(version: str | None) -> str:
    """Return a router's version as the database writes it."""
    return version or NO_ROUTER


def router_of(key: str) -> str | None:
    """Return the router's version that :func:`router_key` wrote; None for no router."""
    return None if key == NO_ROUTER else key


def stored_least(least: float) -> float:
    """Return a least P(as good) as the database and the API write it: JSON has no infinity, so 2 stands for closed."""
    return _STORED_CLOSED if least == CLOSED else least


@dataclass(frozen=True, slots=True)
class KillSwitch(StoredValue):
    """Says whether all traffic goes to the top tier, and why."""

    on: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ActivePolicies(StoredValue):
    """Names the active version of each policy.

    Attributes
    ----------
    active : policy's name -> version
    default : the policy of requests that name none
    config : policy's name -> the version that a configuration last brought; a configuration that still says the same
        does not undo what was edited since
    """

    active: Mapping[str, str] = field(default_factory=dict)
    default: str = "default"
    config: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Canary(StoredValue):
    """The router being rolled out.

    ``stage`` is a :class:`policies.rollout.RolloutStage`, ``share`` the share of sticky keys that it serves.
    """

    version: str
    share: float
    stage: str
    rollout_id: str


@dataclass(frozen=True, slots=True)
class ActiveRouter(StoredValue):
    """Names the serving router.

    Attributes
    ----------
    active : its version; None without a router
    canary : the one being rolled out
    previous : versions that served before, newest first
    config : the version that a configuration last brought, ``none`` for none
    """

    active: str | None = None
    canary: Canary | None = None
    previous: tuple[str, ...] = ()
    config: str = ""


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A tier that must reach more than its policy asks: ``least`` P(as good), :data:`CLOSED` when it is closed."""

    least: float
    reason: str = ""
    since: str = ""

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        least = float(value["least"])
        return cls(CLOSED if least > 1.0 else least, str(value.get("reason", "")), str(value.get("since", "")))

    def as_dict(self) -> dict[str, Any]:
        return {"least": stored_least(self.least), "reason": self.reason, "since": self.since}

    @property
    def is_closed(self) -> bool:
        """Return whether the tier takes nothing but explored requests."""
        return self.least == CLOSED


Quarantines = Mapping[str, Mapping[str, Mapping[int, Quarantine]]]
"""Policy's name -> router's version -> tier -> what it must reach. Estimates of another router mean something else."""

GroupQuarantines = Mapping[str, Mapping[str, Mapping[str, Mapping[int, Quarantine]]]]
"""Policy's name -> router's version -> group (see :func:`group_of`) -> tier -> what it must reach for its requests."""


def group_of(family: str, name: str) -> str:
    """Return the name of a group of requests: ``tenant:acme``, ``domain:math``."""
    return f"{family}:{name}"


def groups_of(tenant: str, domain: str) -> tuple[str, ...]:
    """Return the groups a request belongs to."""
    return (group_of("tenant", tenant), group_of("domain", domain)) if domain else (group_of("tenant", tenant),)


def quarantines_from_dict(value: Mapping[str, Any]) -> dict[str, dict[str, dict[int, Quarantine]]]:
    """Decode the row; tiers are text in JSON."""
    return {
        name: {
            version: {int(tier): Quarantine.from_dict(each) for tier, each in tiers.items()}
            for version, tiers in routers.items()
        }
        for name, routers in value.items()
    }


def quarantines_as_dict(quarantines: Quarantines) -> dict[str, Any]:
    """Return JSON, without what is not quarantined."""
    found: dict[str, Any] = {}
    for name, routers in quarantines.items():
        for version, tiers in routers.items():
            if tiers:
                shown = {str(tier): each.as_dict() for tier, each in tiers.items()}
                found.setdefault(name, {})[version] = shown
    return found


def group_quarantines_from_dict(value: Mapping[str, Any]) -> dict[str, dict[str, dict[str, dict[int, Quarantine]]]]:
    """Decode the row of groups; each policy's part has the form of a whole tightening."""
    return {name: quarantines_from_dict(routers) for name, routers in value.items()}


def group_quarantines_as_dict(groups: GroupQuarantines) -> dict[str, Any]:
    """Return JSON, without what is not quarantined."""
    found = {name: quarantines_as_dict(routers) for name, routers in groups.items()}
    return {name: routers for name, routers in found.items() if routers}


@dataclass(frozen=True, slots=True)
class ControlState:
    """Everything at once. ``versions`` is the version of each row, for those who change what they have read."""

    generation: int = 0
    kill_switch: KillSwitch = KillSwitch()
    policies: ActivePolicies = field(default_factory=ActivePolicies)
    router: ActiveRouter = ActiveRouter()
    quarantines: Quarantines = field(default_factory=dict)
    groups: GroupQuarantines = field(default_factory=dict)
    versions: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def decode(cls, rows: Mapping[str, tuple[Mapping[str, Any], int]]) -> Self:
        """From row's name -> (value, version); rows that are not there yet have their defaults."""

        def value(name: str) -> Mapping[str, Any]:
            return rows[name][0] if name in rows else {}

        return cls(
            rows[GENERATION][1] if GENERATION in rows else 0,
            KillSwitch.from_dict(value(KILL_SWITCH)),
            ActivePolicies.from_dict(value(POLICIES)),
            ActiveRouter.from_dict(value(ROUTER)),
            quarantines_from_dict(value(TIGHTENING)),
            group_quarantines_from_dict(value(GROUPS)),
            {name: version for name, (_, version) in rows.items()},
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "generation": self.generation,
            KILL_SWITCH: self.kill_switch.as_dict(),
            POLICIES: self.policies.as_dict(),
            ROUTER: self.router.as_dict(),
            TIGHTENING: quarantines_as_dict(self.quarantines),
            GROUPS: group_quarantines_as_dict(self.groups),
            "versions": dict(self.versions),
        }

    def quarantine(self, policy: str, router: str | None) -> Mapping[int, Quarantine]:
        """Return the quarantined tiers of a policy under a router; None for no router."""
        return self.quarantines.get(policy, {}).get(router_key(router), {})

    def group_quarantine(self, policy: str, router: str | None) -> Mapping[str, Mapping[int, Quarantine]]:
        """Return the quarantined groups of a policy under a router, each with its tiers."""
        return self.groups.get(policy, {}).get(router_key(router), {})
