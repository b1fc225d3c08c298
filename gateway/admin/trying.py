"""``POST /what-if``: the trial of a policy over HTTP, away from the event loop and within its time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from gateway import fields
from gateway.admin import schemas
from gateway.admin.endpoint import audited
from gateway.admin.operation import Asked, Field, Operation, Reply
from gateway.admin.policy_forms import checked_policy
from gateway.admin.policy_schema import policy_schema
from gateway.admin.requests import FILTERS
from gateway.admin.rooms import Rooms
from gateway.admin.what_if import WhatIf
from gateway.errors import NotFound
from gateway.fields import lets_through
from gateway.ids import uuid7
from gateway.loading import complete_policies
from gateway.store.admin_queries import RequestFilter
from policies.policy import Policy

# Rows are decoded on the event loop: so few at a time that nobody waits for it.
_PAGE = 100
_FILTERS = ("tenant", "key_id", "since", "until")


@lets_through(policy_schema())
def _body(value: Any, param: str) -> Mapping[str, Any]:
    return fields.mapping(value, param)


class TrialPages:
    """What-ifs over HTTP."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms

    def operations(self) -> list[Operation]:
        admin = self._rooms.settings.admin
        return [
            Operation(
                method="POST",
                path="/what-if",
                name="try_policy",
                summary="Try a policy on the newest requests of the log, without saving or serving it.",
                handler=self.try_policy,
                returns=schemas.shape(
                    num_rows=schemas.COUNT,
                    complete=schemas.FLAG,
                    tiers=schemas.array(schemas.ANY_OBJECT),
                    moved=schemas.ANY_OBJECT,
                    quality=schemas.ANY_OBJECT,
                ),
                body={
                    "policy": Field(_body, "The policy's body; without one the version in force is tried."),
                    "name": Field(fields.string(64, min_chars=1), "The policy it would be saved as.", "default"),
                    "last": Field(fields.integer(1, admin.what_if_max_rows), "How many requests.", 1000),
                    "decided_by": FILTERS["policy"],
                    **{name: FILTERS[name] for name in _FILTERS},
                },
                errors=(NotFound,),
            )
        ]

    async def try_policy(self, asked: Asked) -> Reply:
        started_s = time.monotonic()
        policy = self._policy(asked.body)
        trial = WhatIf(policy, self._rooms.catalog, started_s + self._rooms.settings.admin.what_if_timeout_s)
        is_complete = await self._run(trial, asked.body)
        found = await asyncio.to_thread(trial.report)
        evaluation_id = uuid7()
        report = {
            "object": "suffice.what_if",
            "evaluation_id": evaluation_id,
            "policy": {"name": policy.name, "version": policy.version},
            "router_version": self._rooms.plane.routers.version,
            "complete": is_complete,
            "seconds": round(time.monotonic() - started_s, 3),
        } | found
        subject = f"{policy.name}@{policy.version}"
        entry = audited(asked, f"what-if {subject}", None, {"evaluation_id": evaluation_id})
        await self._rooms.writes.insert_evaluation(evaluation_id, datetime.now(UTC), "whatif", subject, report, entry)
        return Reply(report)

    def _policy(self, body: Mapping[str, Any]) -> Policy:
        """The policy to try, completed as it would be if it served."""
        catalog, name = self._rooms.catalog, body["name"]
        if body["policy"] is None:
            if name not in catalog.policies:
                raise NotFound("policy", name)
            return catalog.policies[name]
        policy = checked_policy(name, body["policy"], catalog.ladder, where="policy.")
        return complete_policies({name: policy}, self._rooms.plane.routers.serving.router)[name]

    async def _run(self, trial: WhatIf, body: Mapping[str, Any]) -> bool:
        which = RequestFilter(policy=body["decided_by"], **{name: body[name] for name in _FILTERS})
        left, before_id = body["last"], None
        while left > 0:
            if trial.is_over():
                return False
            records = await self._rooms.queries.requests(which, limit=min(_PAGE, left), before_id=before_id)
            if not records:
                return True
            rows = await self._rooms.queries.verdicts([record.request_id for record in records])
            verdicts = {row["request_id"]: (row["p_good"], row["inclusion_probability"]) for row in rows}
            if not await asyncio.to_thread(trial.add, records, verdicts):
                return False
            left -= len(records)
            before_id = records[-1].request_id
        return True
