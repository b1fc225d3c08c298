"""Shows what is active: tiers, thresholds, the whole control state; and turns the switch that sends everything up."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct

from gateway.admin.listing import Listing
from gateway.admin.operation import AdminRequest, AdminResponse, AdminShape, OperationGroup, operation
from gateway.admin.record_views import Json, RecordView, Usd
from gateway.admin.router_operations import row_version
from gateway.control import control_state as names
from gateway.control.control_state import stored_least
from policies.types import Tier


class LoadView(RecordView):
    """The load of a tier now."""

    running: int
    waiting: int
    kv_free_fraction: float | None
    predicted_wait_s: float | None


class TierView(RecordView, kw_only=True):
    """A tier of the ladder."""

    sources: ClassVar = {"tier": "index"}

    object: Literal["suffice.tier"] = "suffice.tier"
    tier: int
    name: str
    model: str
    price_per_request_usd: Usd
    price_per_input_token_usd: Usd
    price_per_cached_token_usd: Usd | None
    price_per_output_token_usd: Usd
    price_per_compute_hour_usd: Usd | None
    context_length: int | None
    capabilities: list[str]
    load: LoadView


class TierThreshold(Struct, kw_only=True):
    """The least P(as good) of one tier under one policy; a closed tier is quarantined whatever it is estimated at."""

    tier: int
    threshold: float
    tightened_to: float | None
    in_force: float
    is_closed: bool
    is_allowed: bool


class PolicyThresholds(RecordView, kw_only=True):
    """The thresholds of one policy."""

    policy: str
    version: str
    mode: str
    quality_floor: float
    max_novelty: float | None
    quality_value_usd: Usd | None
    tiers: list[TierThreshold]


class ControlView(Struct, kw_only=True):
    """The active state everywhere, and how far this server has followed it."""

    object: Literal["suffice.control"] = "suffice.control"
    state: Json
    server: Json
    config_hash: str


class KillSwitchView(Struct):
    """The switch that sends all traffic to the top tier."""

    on: bool
    reason: str


class KillSwitchBody(AdminShape, frozen=True):
    """Where all traffic goes."""

    on: Annotated[bool, Meta(description="Whether all traffic goes up.")]
    reason: Annotated[str, Meta(max_length=500, description="Why.")] = ""


class ControlOperations(OperationGroup):
    """Serves the active state over HTTP."""

    @operation("GET", "/tiers", returns=Listing[TierView])
    async def list_tiers(self, request: AdminRequest) -> AdminResponse:
        """List the tiers: models, prices, contexts, and what each is doing now."""
        return AdminResponse(Listing(data=[self._tier(tier) for tier in self._context.catalog.ladder]))

    @operation("GET", "/thresholds", returns=Listing[PolicyThresholds])
    async def list_thresholds(self, request: AdminRequest) -> AdminResponse:
        """List the least P(as good) of every tier under every policy: stated, derived, quarantined."""
        state, catalog = await self._context.state(), self._context.catalog
        data = []
        for name, policy in catalog.policies.items():
            quarantine = state.quarantine(name, state.router.active)
            tiers = []
            for tier in catalog.ladder[:-1]:
                least = policy.threshold(tier.index)
                quarantined = quarantine.get(tier.index)
                tightened_to = None if quarantined is None else stored_least(quarantined.least)
                tiers.append(
                    TierThreshold(
                        tier=tier.index,
                        threshold=least,
                        tightened_to=tightened_to,
                        in_force=max(least, tightened_to or 0.0),
                        is_closed=quarantined is not None and quarantined.is_closed,
                        is_allowed=policy.permits(tier),
                    )
                )
            data.append(PolicyThresholds.of(policy, policy=name, mode=policy.mode.value, tiers=tiers))
        return AdminResponse(Listing(data=data))

    @operation("GET", "/control", returns=ControlView)
    async def get_control(self, request: AdminRequest) -> AdminResponse:
        """Show the whole active state, and how far this server has followed it."""
        state, context = await self._context.state(), self._context
        view = ControlView(
            state=state.as_dict(), server=context.plane.status(), config_hash=context.settings.config_hash
        )
        return AdminResponse(view, etag=str(state.generation))

    @operation("GET", "/kill-switch", returns=KillSwitchView)
    async def get_kill_switch(self, request: AdminRequest) -> AdminResponse:
        """Say whether all traffic goes to the top tier."""
        state = await self._context.state()
        return AdminResponse(state.kill_switch.as_dict(), etag=str(state.versions.get(names.KILL_SWITCH, 0)))

    @operation("PUT", "/kill-switch", returns=KillSwitchView, conditional="may")
    async def set_kill_switch(self, request: AdminRequest, body: KillSwitchBody) -> AdminResponse:
        """Send all traffic to the top tier, on every server within a second; or route again."""
        after = {"on": body.on, "reason": body.reason}
        audit = request.auditing("kill switch", lambda state: state.kill_switch.as_dict(), after)
        await self._context.plane.writer.set_kill_switch(
            body.on, body.reason, by=request.by, expected_version=row_version(request.if_match), audit=audit
        )
        return await self.get_kill_switch(request)

    def _tier(self, tier: Tier) -> TierView:
        backend = self._context.catalog.backend(tier)
        return TierView.of(
            tier,
            context_length=tier.context_length or backend.context_length,
            capabilities=sorted(backend.capabilities),
            load=LoadView.of(backend.load()),
        )
