"""Retention is enforced by itself where settings say so, and deletes nothing of a log where none does."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import func, insert, select

from gateway.config.sections import LogConfig
from gateway.control.retention_keeper import RetentionKeeper
from gateway.ids import uuid7
from gateway.store.control_records import Alert, Lease, RouterVersion
from gateway.store.store import Store
from gateway.store.tables import (
    admin_audit,
    alerts,
    control,
    evaluations,
    request_texts,
    requests,
    retrain_runs,
    rollouts,
    router_versions,
    sessions,
    shadow_decisions,
)
from tests.gateway.records import make_record

NOW = datetime(2026, 6, 1, tzinfo=UTC)
OLD, YOUNG = NOW - timedelta(days=40), NOW - timedelta(days=3)
LEASE = Lease(name="leader", holder="test", token=1, expires_at=NOW)


async def fill(store: Store, at: datetime) -> None:
    """One row in every table that ages, of this time."""
    record = make_record(created_at=at, session_id=uuid7(), final_tier=1, prompt_text="p", answer_text="a")
    await store.record(record)
    run = {"trigger": "", "status": "done", "stage": "", "progress": 1.0, "holder": ""}
    rollout = {"router_version": "", "baseline_version": "", "status": "", "stage": "", "share": 0.0, "state": {}}
    decision = {"policy_name": "", "tier": 1, "shadow_tier": 1, "sufficiency": [], "novelty": 0.0}
    alert = Alert(alert_id=uuid7(), created_at=at, kind="", severity="", subject="", body={}, resolved_at=at)
    is_open = Alert(alert_id=uuid7(), created_at=at, kind="", severity="", subject="", body={})
    audit = {"action": "", "subject": "", "status": 200, "remote": ""}
    values: list[tuple[Any, dict[str, Any]]] = [
        (shadow_decisions, {"request_id": record.request_id, "router_version": "", "created_at": at, **decision}),
        (evaluations, {"evaluation_id": uuid7(), "created_at": at, "kind": "", "subject": "", "body": {}}),
        (alerts, asdict(alert)),
        (alerts, asdict(is_open)),
        (retrain_runs, {"run_id": uuid7(), "created_at": at, "finished_at": at, **run}),
        (retrain_runs, {"run_id": uuid7(), "created_at": at, **run}),
        (
            rollouts,
            {"rollout_id": uuid7(), "started_at": at, "updated_at": at, "ended_at": at, "reason": "", "history": []}
            | rollout,
        ),
        (admin_audit, {"audit_id": uuid7(), "created_at": at, **audit}),
    ]
    async with store.transaction() as connection:
        for table, row in values:
            await connection.execute(insert(table), row)


async def add_routers(store: Store) -> None:
    """Old ones, of which some are still needed."""
    async with store.transaction() as connection:
        for name, status in (
            *(("serving", "serving"), ("before", "retired"), ("canary", "canary")),
            *(("spent", "retired"), ("refused", "rejected"), ("candidate", "candidate")),
        ):
            row = asdict(RouterVersion(version=name, created_at=OLD, status=status)) | {"artifact": b"npz"}
            await connection.execute(insert(router_versions), row)
        value = {"active": "serving", "previous": ["before"], "canary": {"version": "canary"}}
        await connection.execute(
            insert(control).values(name="router", value=value, version=1, updated_at=OLD, updated_by="")
        )


async def count(store: Store) -> dict[str, int]:
    tables = (
        *(requests, request_texts, sessions, shadow_decisions, evaluations, alerts, retrain_runs, rollouts),
        *(admin_audit, router_versions),
    )
    async with store.transaction() as connection:
        return {
            table.name: (await connection.execute(select(func.count()).select_from(table))).scalar_one()
            for table in tables
        }


HISTORY = ("evaluations", "alerts", "retrain_runs", "rollouts", "admin_audit")


@pytest.mark.parametrize(
    ("settings", "gone"),
    [
        ({}, {}),
        ({"texts_days": 30}, {"request_texts": 1}),
        ({"rows_days": 30}, {"requests": 1, "request_texts": 1}),
        ({"sessions_days": 30}, {"sessions": 1}),
        ({"history_days": 30}, dict.fromkeys(HISTORY, 1) | {"router_versions": 3}),
        ({"texts_days": 1, "rows_days": 90}, {"request_texts": 2}),
    ],
)
async def test_what_is_due_is_deleted_and_nothing_else(
    store: Store, settings: dict[str, float], gone: dict[str, int]
) -> None:
    """What is open, or in use, stays however old; shadow decisions go with the monitor's window in any case."""
    await fill(store, OLD)
    await fill(store, YOUNG)
    await add_routers(store)
    before = await count(store)
    keeper = RetentionKeeper(store, LogConfig(**settings), window_days=28, clock=lambda: NOW)
    for _ in range(2):
        await keeper.prune(LEASE)
    after = await count(store)
    expected = {"shadow_decisions": 1} | gone
    assert {name: before[name] - after[name] for name in before if before[name] != after[name]} == expected
    async with store.transaction() as connection:
        left = set((await connection.execute(select(router_versions.c.version))).scalars())
    assert left >= {"serving", "before", "canary"}


async def test_many_rows_go_in_small_transactions_beside_traffic(store: Store) -> None:
    """A commit of a request finds room between them, and is not itself deleted."""
    for _ in range(30):
        await store.record(make_record(created_at=OLD))
    keeper = RetentionKeeper(store, LogConfig(rows_days=30), window_days=28, clock=lambda: NOW)
    sizes: list[int] = []
    change = keeper._pruner._change

    async def noted(statement: Any) -> int:
        num = await change(statement)
        sizes.append(num)
        await store.record(make_record(created_at=YOUNG))
        return num

    keeper._pruner._change = noted  # type: ignore[method-assign]
    await keeper.prune(LEASE)
    assert sum(sizes) == 30
    assert (await count(store))["requests"] == len(sizes)
