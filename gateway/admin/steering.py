"""What is in force: tiers, thresholds, the whole of the control state, and the switch that sends everything up."""

from __future__ import annotations

from typing import Any

from gateway.admin import schemas
from gateway.admin.endpoint import auditing
from gateway.admin.operation import Asked, Field, Operation, Reply
from gateway.admin.rooms import Rooms
from gateway.admin.routers import row_version
from gateway.admin.views import usd
from gateway.api import fields
from gateway.control import control_state as names
from gateway.control.control_state import stored_least
from policies.types import Tier

_TIER = schemas.shape(tier=schemas.COUNT, name=schemas.TEXT, model=schemas.TEXT, price_per_request_usd=schemas.USD)
_SWITCH = schemas.shape(on=schemas.FLAG, reason=schemas.TEXT)


class SteeringPages:
    """The state in force over HTTP."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms

    def operations(self) -> list[Operation]:
        return [
            Operation(
                method="GET",
                path="/tiers",
                name="list_tiers",
                summary="The ladder: models, prices, contexts, and what each tier is doing now.",
                handler=self.tiers,
                returns=schemas.listing(_TIER),
            ),
            Operation(
                method="GET",
                path="/thresholds",
                name="list_thresholds",
                summary="The least P(as good) of every tier under every policy: stated, derived, tightened.",
                handler=self.thresholds,
                returns=schemas.listing(schemas.shape(policy=schemas.TEXT, tiers=schemas.array(schemas.ANY_OBJECT))),
            ),
            Operation(
                method="GET",
                path="/control",
                name="get_control",
                summary="All that is in force, and how far this server has followed it.",
                handler=self.control,
                returns=schemas.shape(state=schemas.ANY_OBJECT, server=schemas.ANY_OBJECT),
            ),
            Operation(
                method="GET",
                path="/kill-switch",
                name="get_kill_switch",
                summary="Whether all traffic goes to the top tier.",
                handler=self.kill_switch,
                returns=_SWITCH,
            ),
            Operation(
                method="PUT",
                path="/kill-switch",
                name="set_kill_switch",
                summary="Send all traffic to the top tier, on every server within a second; or route again.",
                handler=self.set_kill_switch,
                returns=_SWITCH,
                body={
                    "on": Field(fields.boolean, "Whether all traffic goes up.", required=True),
                    "reason": Field(fields.string(500), "Why.", ""),
                },
                conditional="may",
            ),
        ]

    async def tiers(self, asked: Asked) -> Reply:
        data = [self._tier(tier) for tier in self._rooms.catalog.ladder]
        return Reply({"object": "list", "data": data})

    async def thresholds(self, asked: Asked) -> Reply:
        state, catalog = await self._rooms.state(), self._rooms.catalog
        data = []
        for name, policy in catalog.policies.items():
            quarantine = state.quarantine(name, state.router.active)
            tiers = []
            for tier in catalog.ladder[:-1]:
                least = policy.threshold(tier.index)
                held = quarantine.get(tier.index)
                asked_more = None if held is None else stored_least(held.least)
                tiers.append(
                    {
                        "tier": tier.index,
                        "threshold": least,
                        "tightened_to": asked_more,
                        "in_force": max(least, asked_more or 0.0),
                        "is_closed": held is not None and held.is_closed,
                        "is_allowed": policy.permits(tier),
                    }
                )
            data.append(
                {
                    "policy": name,
                    "version": policy.version,
                    "mode": policy.mode.value,
                    "quality_floor": policy.quality_floor,
                    "max_novelty": policy.max_novelty,
                    "quality_value_usd": usd(policy.quality_value_usd),
                    "tiers": tiers,
                }
            )
        return Reply({"object": "list", "data": data})

    async def control(self, asked: Asked) -> Reply:
        state = await self._rooms.state()
        return Reply(
            {
                "object": "suffice.control",
                "state": state.as_dict(),
                "server": self._rooms.plane.status(),
                "config_hash": self._rooms.settings.config_hash,
            },
            etag=str(state.generation),
        )

    async def kill_switch(self, asked: Asked) -> Reply:
        state = await self._rooms.state()
        return Reply(state.kill_switch.as_dict(), etag=str(state.versions.get(names.KILL_SWITCH, 0)))

    async def set_kill_switch(self, asked: Asked) -> Reply:
        on, reason = asked.body["on"], asked.body["reason"]
        after = {"on": on, "reason": reason}
        audit = auditing(asked, "kill switch", lambda state: state.kill_switch.as_dict(), after)
        await self._rooms.plane.writer.set_kill_switch(
            on, reason, by=asked.by, expected_version=row_version(asked.if_match), audit=audit
        )
        return await self.kill_switch(asked)

    def _tier(self, tier: Tier) -> dict[str, Any]:
        backend = self._rooms.catalog.backend(tier)
        load = backend.load()
        return {
            "object": "suffice.tier",
            "tier": tier.index,
            "name": tier.name,
            "model": tier.model,
            "price_per_request_usd": usd(tier.price_per_request_usd),
            "price_per_input_token_usd": usd(tier.price_per_input_token_usd),
            "price_per_output_token_usd": usd(tier.price_per_output_token_usd),
            "price_per_compute_hour_usd": usd(tier.price_per_compute_hour_usd),
            "context_length": tier.context_length or backend.context_length,
            "capabilities": sorted(backend.capabilities),
            "load": {
                "running": load.running,
                "waiting": load.waiting,
                "kv_free_fraction": load.kv_free_fraction,
                "predicted_wait_s": load.predicted_wait_s,
            },
        }
