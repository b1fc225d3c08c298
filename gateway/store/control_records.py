"""The nouns of the control tables. Pure data; ids and clocks are the caller's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterVersion:
    """A router's entry without its bytes.

    Parameters
    ----------
    version : hash of its content
    card : what it was made of and measured to be
    parent : version it was made from, or empty
    origin : ``builtin``, ``config``, ``bootstrap``, ``retrain`` or ``upload``
    status : ``candidate``, ``shadow``, ``canary``, ``serving``, ``retired``, ``rejected`` or ``rolled_back``
    """

    version: str
    created_at: datetime
    card: Mapping[str, Any] = field(default_factory=dict)
    parent: str = ""
    origin: str = "upload"
    status: str = "candidate"
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """One router's way to traffic; ``state`` holds plan, machine and cursor, ``history`` what happened when."""

    rollout_id: str
    router_version: str
    baseline_version: str
    status: str
    stage: str
    share: float
    state: Mapping[str, Any]
    started_at: datetime
    updated_at: datetime
    ended_at: datetime | None = None
    reason: str = ""
    history: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowDecision:
    """Holds what the shadow router would have done with a request."""

    request_id: str
    router_version: str
    created_at: datetime
    policy_name: str
    tier: int
    shadow_tier: int
    sufficiency: tuple[tuple[int, float, float], ...]
    novelty: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Something a person should look at; open until ``resolved_at`` is set."""

    alert_id: str
    created_at: datetime
    kind: str
    severity: str
    subject: str
    body: Mapping[str, Any]
    resolved_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Lets one server do what only one may; ``token`` is larger than that of any holder before."""

    name: str
    holder: str
    token: int
    expires_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One administrative act, written in the transaction of the change itself."""

    audit_id: str
    created_at: datetime
    action: str
    subject: str
    key_id: str | None = None
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None
    status: int = 200
    remote: str = ""
