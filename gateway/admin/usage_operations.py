"""Sums up what was used and what it cost, beside what the top tier would have cost for the same tokens."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Struct

from gateway.admin.common_shapes import ByPolicy, ByRouter, ByTier, OfTenant, Since, Until, WithKey, filter_of
from gateway.admin.operation import AdminRequest, AdminResponse, AdminShape, OperationGroup, operation
from gateway.admin.record_views import Usd, usd, usd_of_nano
from gateway.api.declaration import JsonScalar, Words
from gateway.errors import InvalidRequest
from policies.pricing import from_nano_usd, price_usd
from policies.types import Tier

_GROUPS = ("day", "tenant", "key", "tier", "policy", "model")


def _wrong_groups(value: Any, param: str) -> InvalidRequest:
    return InvalidRequest(f"'{param}' takes some of {', '.join(_GROUPS)}, parted by commas.", param=param)


class UsageGroups(str, JsonScalar):
    """Names what sums are grouped by."""

    words = Words(error=_wrong_groups)
    json_schema: ClassVar = {"type": "string", "pattern": rf"^({'|'.join(_GROUPS)})(,({'|'.join(_GROUPS)}))*$"}

    @classmethod
    def from_json(cls, value: Any) -> UsageGroups:
        found = value.split(",") if isinstance(value, str) else []
        if not found or len(set(found)) != len(found) or not set(found) <= set(_GROUPS):
            raise ValueError
        return cls(value)


class UsageQuery(AdminShape, frozen=True):
    """Which rows of the log, and how they are grouped."""

    group_by: (
        Annotated[UsageGroups, Meta(description="Any of `" + "`, `".join(_GROUPS) + "`, parted by commas.")] | None
    ) = None
    tenant: OfTenant | None = None
    key_id: WithKey | None = None
    policy: ByPolicy | None = None
    tier: ByTier | None = None
    router_version: ByRouter | None = None
    since: Since | None = None
    until: Until | None = None


class UsageSums(Struct):
    """Sums over requests; a group's row also names the group."""

    num_requests: int
    num_failed: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    compute_s: float
    cost_usd: Usd
    measured_cost_usd: Usd
    all_top_tier_usd: Usd
    saved_usd: Usd
    saved_share: float


class UsageReport(Struct):
    """Sums by group, and over all."""

    data: list[UsageSums]
    total: UsageSums


class UsageOperations(OperationGroup):
    """Serves sums of the log over HTTP."""

    @operation("GET", "/usage", returns=UsageReport)
    async def get_usage(self, request: AdminRequest, query: UsageQuery) -> AdminResponse:
        """Sum up requests, tokens and cost, and what sending everything to the top tier would have cost."""
        which, group_by = filter_of(query), (query.group_by or "day").split(",")
        queries = self._context.queries
        rows, total = await queries.usage(which, group_by), await queries.usage(which, ())
        checks_nano_usd = await queries.verification_cost(which.since, which.until)
        top = self._context.catalog.ladder[-1]
        return AdminResponse(
            {
                "object": "suffice.usage",
                "group_by": group_by,
                "data": [{name: row[name] for name in group_by} | _sums(row, top) for row in rows],
                "total": _sums(total[0], top) | {"verification_cost_usd": usd_of_nano(checks_nano_usd)},
            }
        )


def _sums(row: Mapping[str, Any], top: Tier) -> dict[str, Any]:
    """Return a row's sums.

    Savings count what a tier answered; requests without one (embeddings, failures) cost the same either way.
    """
    cost_usd = from_nano_usd(int(row["cost_nano_usd"]))
    tokens = [int(row[f"routed_{each}_tokens"]) for each in ("prompt", "completion", "cached")]
    all_top_usd = price_usd(top, *tokens) + top.price_per_request_usd * (int(row["routed_choices"]) - 1)
    saved_usd = all_top_usd - cost_usd
    sums = UsageSums(
        num_requests=int(row["num_requests"]),
        num_failed=int(row["num_failed"]),
        prompt_tokens=int(row["prompt_tokens"]),
        completion_tokens=int(row["completion_tokens"]),
        cached_tokens=int(row["cached_tokens"]),
        compute_s=float(row["compute_s"]),
        cost_usd=usd(cost_usd),
        measured_cost_usd=usd_of_nano(row["measured_cost_nano_usd"]),
        all_top_tier_usd=usd(all_top_usd),
        saved_usd=usd(saved_usd),
        saved_share=float(saved_usd / all_top_usd) if all_top_usd > Decimal(0) else 0.0,
    )
    return msgspec.structs.asdict(sums)
