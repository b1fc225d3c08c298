"""What was used and what it cost, beside what the top tier would have cost for the same tokens."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from gateway.admin import schemas
from gateway.admin.operation import Asked, Field, Operation, Reply
from gateway.admin.requests import FILTERS, filter_of
from gateway.admin.rooms import Rooms
from gateway.admin.views import usd
from gateway.api.fields import lets_through
from gateway.errors import InvalidRequest
from policies.pricing import from_nano_usd
from policies.types import Tier

_GROUPS = ("day", "tenant", "key", "tier", "policy", "model")
_SUMS = schemas.shape(
    num_requests=schemas.COUNT, cost_usd=schemas.USD, all_top_tier_usd=schemas.USD, saved_usd=schemas.USD
)


@lets_through({"type": "string", "pattern": rf"^({'|'.join(_GROUPS)})(,({'|'.join(_GROUPS)}))*$"})
def _groups(value: Any, param: str) -> tuple[str, ...]:
    found = tuple(value.split(",")) if isinstance(value, str) else ()
    if not found or len(set(found)) != len(found) or not set(found) <= set(_GROUPS):
        raise InvalidRequest(f"'{param}' takes some of {', '.join(_GROUPS)}, parted by commas.", param=param)
    return found


class UsagePages:
    """Sums of the log over HTTP."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms

    def operations(self) -> list[Operation]:
        return [
            Operation(
                method="GET",
                path="/usage",
                name="get_usage",
                summary="Requests, tokens and cost, and what sending everything to the top tier would have cost.",
                handler=self.usage,
                returns=schemas.shape(data=schemas.array(_SUMS), total=_SUMS),
                query={
                    "group_by": Field(_groups, "Any of `" + "`, `".join(_GROUPS) + "`, parted by commas.", ("day",)),
                    **{name: each for name, each in FILTERS.items() if name not in ("reason", "status", "session_id")},
                },
            )
        ]

    async def usage(self, asked: Asked) -> Reply:
        asked = _with_all_filters(asked)
        which, group_by = filter_of(asked), asked.query["group_by"]
        rows = await self._rooms.queries.usage(which, group_by)
        total = await self._rooms.queries.usage(which, ())
        checks_nano_usd = await self._rooms.queries.verification_cost(which.since, which.until)
        top = self._rooms.catalog.ladder[-1]
        return Reply(
            {
                "object": "suffice.usage",
                "group_by": list(group_by),
                "data": [{name: row[name] for name in group_by} | _sums(row, top) for row in rows],
                "total": _sums(total[0], top) | {"verification_cost_usd": usd(from_nano_usd(checks_nano_usd))},
            }
        )


def _sums(row: Mapping[str, Any], top: Tier) -> dict[str, Any]:
    """Savings count what a tier answered; requests without one (embeddings, failures) cost the same either way."""
    cost_usd = from_nano_usd(int(row["cost_nano_usd"]))
    all_top_usd = (
        top.price_per_request_usd * int(row["routed_choices"])
        + top.price_per_input_token_usd * int(row["routed_prompt_tokens"])
        + top.price_per_output_token_usd * int(row["routed_completion_tokens"])
    )
    saved_usd = all_top_usd - cost_usd
    return {
        "num_requests": int(row["num_requests"]),
        "num_failed": int(row["num_failed"]),
        "prompt_tokens": int(row["prompt_tokens"]),
        "completion_tokens": int(row["completion_tokens"]),
        "compute_s": float(row["compute_s"]),
        "cost_usd": usd(cost_usd),
        "measured_cost_usd": usd(from_nano_usd(int(row["measured_cost_nano_usd"]))),
        "all_top_tier_usd": usd(all_top_usd),
        "saved_usd": usd(saved_usd),
        "saved_share": float(saved_usd / all_top_usd) if all_top_usd > Decimal(0) else 0.0,
    }


def _with_all_filters(asked: Asked) -> Asked:
    return Asked(by=asked.by, query=dict.fromkeys(FILTERS) | dict(asked.query))
