"""Stored things as the administration shows them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any

from gateway.store.control_records import Alert, RolloutRow, RouterVersion
from gateway.store.records import ApiKey, RequestRecord
from policies.pricing import from_nano_usd


def usd(amount: Decimal | None) -> str | None:
    """Dollars as text, which keeps them exact."""
    return None if amount is None else format(amount, "f")


def usd_of_nano(amount: int | None) -> str | None:
    return None if amount is None else format(from_nano_usd(int(amount)), "f")


def moment(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat()


def plain(row: Mapping[str, Any], *hidden: str) -> dict[str, Any]:
    """A row of a table with its amounts in dollars and its times as text."""
    shown: dict[str, Any] = {}
    for name, value in row.items():
        if name in hidden:
            continue
        if name.endswith("_nano_usd"):
            shown[name.removesuffix("_nano_usd") + "_usd"] = usd_of_nano(value)
        else:
            shown[name] = moment(value) if isinstance(value, datetime) else value
    return shown


def key_view(key: ApiKey) -> dict[str, Any]:
    """A key without anything that could open a door."""
    return {
        "id": key.key_id,
        "object": "suffice.key",
        "name": key.name,
        "prefix": key.prefix,
        "tenant": key.tenant,
        "scope": key.scope,
        "limits": dict(key.limits),
        "created_at": moment(key.created_at),
        "last_used_at": moment(key.last_used_at),
        "revoked_at": moment(key.revoked_at),
    }


def router_view(router: RouterVersion) -> dict[str, Any]:
    return {
        "version": router.version,
        "object": "suffice.router",
        "created_at": moment(router.created_at),
        "status": router.status,
        "origin": router.origin,
        "parent": router.parent,
        "note": router.note,
        "card": dict(router.card),
    }


def rollout_view(rollout: RolloutRow) -> dict[str, Any]:
    return {
        "id": rollout.rollout_id,
        "object": "suffice.rollout",
        "router_version": rollout.router_version,
        "baseline_version": rollout.baseline_version,
        "status": rollout.status,
        "stage": rollout.stage,
        "share": rollout.share,
        "reason": rollout.reason,
        "started_at": moment(rollout.started_at),
        "updated_at": moment(rollout.updated_at),
        "ended_at": moment(rollout.ended_at),
        "history": list(rollout.history),
    }


def alert_view(alert: Alert) -> dict[str, Any]:
    return {
        "id": alert.alert_id,
        "object": "suffice.alert",
        "created_at": moment(alert.created_at),
        "kind": alert.kind,
        "severity": alert.severity,
        "subject": alert.subject,
        "body": dict(alert.body),
        "resolved_at": moment(alert.resolved_at),
    }


def request_line(record: RequestRecord) -> dict[str, Any]:
    """A row of the log in brief, as listings show it."""
    return {
        "id": record.request_id,
        "object": "suffice.request",
        "created_at": moment(record.created_at),
        "endpoint": record.endpoint,
        "tenant": record.tenant,
        "key_id": record.key_id,
        "session_id": record.session_id,
        "model_requested": record.model_requested,
        "model_served": record.model_served,
        "policy": record.policy_name,
        "policy_version": record.policy_version,
        "router_version": record.router_version,
        "decided_tier": record.decided_tier,
        "final_tier": record.final_tier,
        "reason": record.reason,
        "explored": record.explored,
        "confidence": record.confidence,
        "novelty": record.novelty,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "cost_usd": usd(record.cost_usd),
        "total_s": record.total_s,
        "status": record.status_code,
        "error": record.error_code,
        "finish_reason": record.finish_reason.value,
    }
