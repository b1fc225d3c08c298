"""``POST /what-if``: the trial of a policy over HTTP, in a process of its own and within its time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

from gateway.admin import schemas
from gateway.admin.endpoint import audited
from gateway.admin.operation import Asked, Field, Operation, Reply
from gateway.admin.policy_forms import checked_policy
from gateway.admin.policy_schema import policy_schema
from gateway.admin.requests import FILTERS
from gateway.admin.rooms import Rooms
from gateway.admin.trial import Trial, try_apart
from gateway.api import fields
from gateway.api.fields import lets_through
from gateway.errors import ClientGone, NotFound
from gateway.ids import uuid7
from gateway.models.loader import complete_policies
from gateway.store.admin_queries import RequestFilter
from policies.policy import Policy

T = TypeVar("T")

# How often it is looked whether the caller still waits.
_LOOK_S = 0.2
_FILTERS = ("tenant", "key_id", "since", "until")


@lets_through(policy_schema())
def _body(value: Any, param: str) -> Mapping[str, Any]:
    return fields.mapping(value, param)


class TrialPages:
    """What-ifs over HTTP."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        # A second trial waits for its turn: the processor belongs to live requests first.
        self._one_at_a_time = asyncio.Lock()

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
        which = RequestFilter(policy=asked.body["decided_by"], **{name: asked.body[name] for name in _FILTERS})
        timeout_s = self._rooms.settings.admin.what_if_timeout_s
        trial = Trial(policy, self._rooms.catalog.ladder, which, asked.body["last"], timeout_s)
        found = await while_awaited(self._try(trial), asked.is_gone)
        evaluation_id = uuid7()
        report = {
            "object": "suffice.what_if",
            "evaluation_id": evaluation_id,
            "policy": {"name": policy.name, "version": policy.version},
            "router_version": self._rooms.plane.routers.version,
            "seconds": round(time.monotonic() - started_s, 3),
        } | found
        subject = f"{policy.name}@{policy.version}"
        entry = audited(asked, f"what-if {subject}", None, {"evaluation_id": evaluation_id})
        await self._rooms.writes.insert_evaluation(evaluation_id, datetime.now(UTC), "whatif", subject, report, entry)
        return Reply(report)

    async def _try(self, trial: Trial) -> dict[str, Any]:
        async with self._one_at_a_time:
            return await try_apart(trial, self._rooms.settings.database)

    def _policy(self, body: Mapping[str, Any]) -> Policy:
        """The policy to try, completed as it would be if it served."""
        catalog, name = self._rooms.catalog, body["name"]
        if body["policy"] is None:
            if name not in catalog.policies:
                raise NotFound("policy", name)
            return catalog.policies[name]
        policy = checked_policy(name, body["policy"], catalog.ladder, where="policy.")
        return complete_policies({name: policy}, self._rooms.plane.routers.serving.router)[name]


async def while_awaited(work: Coroutine[Any, Any, T], is_gone: Callable[[], Awaitable[bool]]) -> T:
    """The result of some work, as long as its caller waits for it; cancelled when the caller leaves.

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
