"""Reads for the administration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Select, func, select
from sqlalchemy.sql.schema import Table

from gateway.store.control_records import Alert
from gateway.store.records import ApiKey, PolicyVersion, RequestRecord
from gateway.store.rollups import Span, UsageSums
from gateway.store.rows import clean_text, decode_key, decode_policy_version, decode_record
from gateway.store.store import Store, select_records
from gateway.store.tables import (
    admin_audit,
    alerts,
    api_keys,
    evaluations,
    feedback,
    gold_labels,
    policy_versions,
    requests,
    retrain_runs,
    verifications,
)

Row = Mapping[str, Any]

# What a group is called -> the dimension of the sums.
_DIMENSION = {"key": "key_id", "tier": "final_tier", "policy": "policy_name", "model": "model_served"}
_ROUTED = ("num_choices", "prompt_tokens", "completion_tokens", "cached_tokens")
_USAGE = (
    *("num_requests", "num_failed", "cost_nano_usd", "measured_cost_nano_usd", "compute_s"),
    *_ROUTED,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFilter:
    """Selects rows of the log; None means any."""

    tenant: str | None = None
    key_id: str | None = None
    policy: str | None = None
    tier: int | None = None
    reason: str | None = None
    status: int | None = None
    session_id: str | None = None
    router_version: str | None = None
    since: datetime | None = None
    until: datetime | None = None

    def conditions(self) -> list[ColumnElement[bool]]:
        """As SQL."""
        column = requests.c
        equal = (
            (column.tenant, self.tenant),
            (column.key_id, self.key_id),
            (column.policy_name, self.policy),
            (column.final_tier, self.tier),
            (column.reason, self.reason),
            (column.status_code, self.status),
            (column.session_id, self.session_id),
            (column.router_version, self.router_version),
        )
        found: list[ColumnElement[bool]] = [
            each == (clean_text(value) if isinstance(value, str) else value)
            for each, value in equal
            if value is not None
        ]
        if self.since is not None:
            found.append(column.created_at >= self.since)
        if self.until is not None:
            found.append(column.created_at < self.until)
        return found

    def dimensions(self) -> tuple[dict[str, tuple[Any, ...]], list[ColumnElement[bool]]]:
        """As values of the dimensions that sums are kept by, and as SQL where a filter is none of these."""
        equal = {
            "tenant": self.tenant,
            "key_id": self.key_id,
            "policy_name": self.policy,
            "final_tier": self.tier,
            "router_version": self.router_version,
        }
        where = {
            name: (clean_text(value) if isinstance(value, str) else value,)
            for name, value in equal.items()
            if value is not None
        }
        others = RequestFilter(reason=self.reason, status=self.status, session_id=self.session_id)
        return where, others.conditions()


class AdminQueries:
    """Reads over the tables. Ids are uuidv7, so "older than this id" is a page's cursor everywhere."""

    def __init__(self, store: Store) -> None:
        self._store = store

    # ---- the log

    async def requests(self, which: RequestFilter, *, limit: int, before_id: str | None) -> list[RequestRecord]:
        """Newest first."""
        statement = select_records().where(*which.conditions())
        if before_id is not None:
            statement = statement.where(requests.c.request_id < before_id)
        statement = statement.order_by(requests.c.request_id.desc()).limit(limit)
        return [decode_record(row) for row in await self._rows(statement)]

    async def verdicts(self, request_ids: Sequence[str]) -> list[Row]:
        """Finished checks of cheap answers against the top tier, for these requests."""
        column = verifications.c
        statement = select(column.request_id, column.p_good, column.inclusion_probability).where(
            column.request_id.in_(request_ids),
            column.direction == "up",
            column.status == "done",
            column.p_good.is_not(None),
        )
        return await self._rows(statement)

    async def of_request(self, request_id: str) -> tuple[list[Row], list[Row], list[Row]]:
        """(checks, feedback, gold labels) of one request, oldest first."""
        found = []
        for table in (verifications, feedback, gold_labels):
            statement = select(table).where(table.c.request_id == request_id).order_by(table.c.created_at)
            found.append(await self._rows(statement))
        return found[0], found[1], found[2]

    async def check_states(self, request_ids: Sequence[str]) -> dict[str, str]:
        """Return what the check of each request said: ``good``, ``not_good``, or the status of one without a verdict.

        Of several checks the one that went up counts: it is about the answer that the caller got.
        """
        column = verifications.c
        statement = select(column.request_id, column.status, column.verdict).where(column.request_id.in_(request_ids))
        rows = await self._rows(statement.order_by(column.direction)) if request_ids else []
        words = {0: "not_good", 1: "good", None: None}
        return {row["request_id"]: words[row["verdict"]] or row["status"] for row in rows}

    async def usage(self, which: RequestFilter, group_by: Sequence[str]) -> list[Row]:
        """Sums per group; ``group_by`` of ``day``, ``tenant``, ``key``, ``tier``, ``policy``, ``model``."""
        names = [_DIMENSION.get(each, each) for each in group_by]
        dimensions = names if "final_tier" in names else [*names, "final_tier"]
        where, conditions = which.dimensions()
        span = Span(which.since, which.until)
        found = await UsageSums(self._store).read(span, dimensions, _USAGE, where, conditions)
        groups: dict[tuple[Any, ...], dict[str, Any]] = {}
        if not group_by:
            groups[()] = _no_use()
        for key, sums in found.items():
            mine = key[: len(group_by)]
            row = groups.setdefault(mine, dict(zip(group_by, mine, strict=True)) | _no_use())
            for name in _USAGE:
                row[name] += sums[name]
            # What the top tier would be paid for: answered requests that a tier answered, with their tokens.
            if key[dimensions.index("final_tier")] is not None:
                for name in _ROUTED:
                    row[f"routed_{name.removeprefix('num_')}"] += sums[name]
        return [groups[key] for key in sorted(groups, key=lambda key: [(each is None, each) for each in key])]

    async def verification_cost(self, since: datetime | None, until: datetime | None) -> int:
        """Nano-dollars spent on checks of requests of this time."""
        spent = func.coalesce(func.sum(verifications.c.cost_nano_usd), 0).label("cost")
        return int((await self._rows(_within(select(spent), verifications, since, until)))[0]["cost"])

    async def serving_cost(self, since: datetime | None, until: datetime | None) -> int:
        """Nano-dollars spent on requests of this time: by device seconds where measured, else by the price table."""
        found = await UsageSums(self._store).read(Span(since, until), (), ("serving_cost_nano_usd",))
        return int(found[()]["serving_cost_nano_usd"]) if found else 0

    async def checks_by_status(self, since: datetime | None, until: datetime | None) -> dict[str, int]:
        """Count how many checks of requests of this time wait, run, are done or came to nothing."""
        counted = select(verifications.c.status, func.count().label("num")).group_by(verifications.c.status)
        rows = await self._rows(_within(counted, verifications, since, until))
        return {str(row["status"]): int(row["num"]) for row in rows}

    # ---- plain listings

    async def verifications(self, equal: Row, *, limit: int, before_id: str | None) -> list[Row]:
        return await self._listing(verifications, verifications.c.verification_id, equal, limit, before_id)

    async def evaluations(self, equal: Row, *, limit: int, before_id: str | None) -> list[Row]:
        return await self._listing(evaluations, evaluations.c.evaluation_id, equal, limit, before_id)

    async def evaluation(self, evaluation_id: str) -> Row | None:
        return await self._one(select(evaluations).where(evaluations.c.evaluation_id == evaluation_id))

    async def retrain_runs(self, equal: Row, *, limit: int, before_id: str | None) -> list[Row]:
        return await self._listing(retrain_runs, retrain_runs.c.run_id, equal, limit, before_id)

    async def retrain_run(self, run_id: str) -> Row | None:
        return await self._one(select(retrain_runs).where(retrain_runs.c.run_id == run_id))

    async def audit(self, equal: Row, *, limit: int, before_id: str | None) -> list[Row]:
        return await self._listing(admin_audit, admin_audit.c.audit_id, equal, limit, before_id)

    # ---- alerts

    async def alerts(self, *, only_open: bool, kind: str | None, limit: int, before_id: str | None) -> list[Alert]:
        """Newest first."""
        statement = select(alerts).order_by(alerts.c.alert_id.desc()).limit(limit)
        if only_open:
            statement = statement.where(alerts.c.resolved_at.is_(None))
        if kind is not None:
            statement = statement.where(alerts.c.kind == kind)
        if before_id is not None:
            statement = statement.where(alerts.c.alert_id < before_id)
        return [Alert(**row) for row in await self._rows(statement)]

    # ---- policies

    async def policy_versions(self, name: str) -> list[PolicyVersion]:
        """Newest first."""
        wanted = select(policy_versions).where(policy_versions.c.name == name)
        rows = await self._rows(wanted.order_by(policy_versions.c.created_at.desc(), policy_versions.c.version))
        return [decode_policy_version(row) for row in rows]

    async def policy_names(self) -> list[str]:
        """Every policy there ever was."""
        statement = select(policy_versions.c.name).distinct().order_by(policy_versions.c.name)
        return [row["name"] for row in await self._rows(statement)]

    # ---- keys

    async def key(self, key_id: str) -> ApiKey | None:
        row = await self._one(select(api_keys).where(api_keys.c.key_id == key_id))
        return decode_key(row) if row is not None else None

    async def had_admin_key(self) -> bool:
        """Whether there ever was a key for administration: a revoked one counts, or its end would open the doors."""
        wanted = select(api_keys.c.key_id).where(api_keys.c.scope == "admin").limit(1)
        return bool(await self._rows(wanted))

    # ---- inside

    async def _listing(self, table: Table, column: Any, equal: Row, limit: int, before_id: str | None) -> list[Row]:
        statement = select(table).order_by(column.desc()).limit(limit)
        for name, value in equal.items():
            if value is not None:
                statement = statement.where(table.c[name] == (clean_text(value) if isinstance(value, str) else value))
        if before_id is not None:
            statement = statement.where(column < before_id)
        return await self._rows(statement)

    async def _one(self, statement: Select[Any]) -> Row | None:
        rows = await self._rows(statement)
        return rows[0] if rows else None

    async def _rows(self, statement: Any) -> list[Row]:
        async with self._store.transaction() as connection:
            return [dict(row) for row in (await connection.execute(statement)).mappings()]


def _no_use() -> dict[str, Any]:
    return dict.fromkeys(_USAGE, 0) | {f"routed_{name.removeprefix('num_')}": 0 for name in _ROUTED}


def _within(statement: Select[Any], table: Table, since: datetime | None, until: datetime | None) -> Select[Any]:
    """Only what is of this time; None is without end."""
    if since is not None:
        statement = statement.where(table.c.created_at >= since)
    return statement if until is None else statement.where(table.c.created_at < until)
