"""Tries a policy over HTTP: ``POST /what-if``, in an isolated process and within its time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct

from gateway.admin.common_shapes import ByPolicy, OfTenant, Since, Until, WithKey
from gateway.admin.context import AdminContext
from gateway.admin.operation import AdminRequest, AdminResponse, AdminShape, Operation, OperationGroup, operation
from gateway.admin.policy_document import MAX_NAME, PolicyBody, checked_policy
from gateway.admin.record_views import Json
from gateway.admin.trial_process import Trial, run_trial
from gateway.api.declaration import limited
from gateway.config.sections import AdminConfig
from gateway.errors import ClientGone, NotFound
from gateway.ids import uuid7
from gateway.models.loader import complete_policies
from gateway.store.admin_queries import RequestFilter
from policies.policy import Policy

T = TypeVar("T")

# How often it is looked whether the caller still waits.
_LOOK_S = 0.2


class TrialBody(AdminShape, frozen=True, kw_only=True):
    """A policy, and the newest rows of the log that it is tried on."""

    policy: (
        Annotated[PolicyBody, Meta(description="The policy's body; without one the active version is tried.")] | None
    ) = None
    name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME, description="The policy it would be saved as.")] = (
        "default"
    )
    last: Annotated[int, Meta(ge=1, description="How many requests.")] = 1000
    decided_by: ByPolicy | None = None
    tenant: OfTenant | None = None
    key_id: WithKey | None = None
    since: Since | None = None
    until: Until | None = None


class TrialReport(Struct):
    """Where requests would have gone, what they would have cost, how good they would have been."""

    num_rows: int
    complete: bool
    tiers: list[Json]
    moved: Json
    quality: Json


class TrialOperations(OperationGroup):
    """Serves trials of policies over HTTP."""

    def __init__(self, context: AdminContext) -> None:
        super().__init__(context)
        # A second trial waits for its turn: the processor belongs to live requests first.
        self._one_at_a_time = asyncio.Lock()

    @classmethod
    def operations(cls, config: AdminConfig) -> list[Operation]:
        """Return the operations; how many requests may be asked for is a setting."""
        last = Annotated[int, Meta(ge=1, le=config.what_if_max_rows, description="How many requests.")]
        return [replace(each, body=limited(TrialBody, last=last)) for each in super().operations(config)]

    @operation("POST", "/what-if", returns=TrialReport, errors=(NotFound,))
    async def try_policy(self, request: AdminRequest, body: TrialBody) -> AdminResponse:
        """Try a policy on the newest requests of the log, without saving or serving it."""
        started_s = time.monotonic()
        policy, context = self._policy(body), self._context
        which = RequestFilter(
            policy=body.decided_by, tenant=body.tenant, key_id=body.key_id, since=body.since, until=body.until
        )
        timeout_s = context.settings.admin.what_if_timeout_s
        trial = Trial(policy, context.catalog.ladder, which, body.last, timeout_s)
        found = await while_awaited(self._run(trial), request.is_gone)
        evaluation_id = uuid7()
        report = {
            "object": "suffice.what_if",
            "evaluation_id": evaluation_id,
            "policy": {"name": policy.name, "version": policy.version},
            "router_version": context.plane.routers.version,
            "seconds": round(time.monotonic() - started_s, 3),
        } | found
        subject = f"{policy.name}@{policy.version}"
        entry = request.audited(f"what-if {subject}", None, {"evaluation_id": evaluation_id})
        await context.writes.insert_evaluation(evaluation_id, datetime.now(UTC), "whatif", subject, report, entry)
        return AdminResponse(report)

    async def _run(self, trial: Trial) -> dict[str, Any]:
        async with self._one_at_a_time:
            return await run_trial(trial, self._context.settings.database)

    def _policy(self, body: TrialBody) -> Policy:
        """Return the policy to try, completed as it would be if it served."""
        catalog, name = self._context.catalog, body.name
        if body.policy is None:
            if name not in catalog.policies:
                raise NotFound("policy", name)
            return catalog.policies[name]
        policy = checked_policy(name, body.policy, catalog.ladder, where="policy.")
        return complete_policies({name: policy}, self._context.plane.routers.serving.router)[name]


async def while_awaited(work: Coroutine[Any, Any, T], is_gone: Callable[[], Awaitable[bool]]) -> T:
    """Return the result of some work, as long as its caller waits for it; cancelled when the caller leaves.

    Raises
    ------
    ClientGone
    """
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=_LOOK_S))[0]:
            if await is_gone():
                raise ClientGone("The client left before its trial was at an end.")
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
