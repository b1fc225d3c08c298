"""Reads what is active as a retrain begins: serving and canary router, policies, and quarantines."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from classifier.router import ArtifactRouter
from gateway.config.policy_body import from_body
from gateway.control.control_state import ControlState
from gateway.control.rollout_driver import RolloutState
from gateway.control.router_loader import read_router
from gateway.control.router_set import recovering_since
from gateway.learn.errors import RetrainRefused
from gateway.models.loader import load_router
from gateway.store.control import ControlStore
from gateway.store.store import Store
from policies.policy import Policy
from policies.rollout import is_behind

if TYPE_CHECKING:
    from gateway.config.settings import Settings


@dataclass(frozen=True, slots=True)
class RetrainSnapshot:
    """Holds what is active as a run begins.

    Attributes
    ----------
    canary : the canary router, where it is of the serving one's base
    quarantine : policy's name -> quarantined tier under the serving router -> P(as good) it must reach
    quarantined_since : when the oldest such doubt began, or the drift that the serving router recovers from
    behind : the canary router's version, of whatever base, where its rollout is behind
    """

    serving: ArtifactRouter
    canary: ArtifactRouter | None
    quarantine: Mapping[str, Mapping[int, float]]
    quarantined_since: datetime | None
    behind: str | None
    policies: Mapping[str, Policy]
    default: str
    versions: tuple[str, ...]


async def read_snapshot(settings: Settings, store: Store, now: datetime) -> RetrainSnapshot:
    """Read the serving router, its policies, and the router versions whose rows it can be judged on.

    Raises
    ------
    RetrainRefused
        Nothing routes.
    """
    control = ControlStore(store)
    state = ControlState.decode(await control.rows())
    serving = await _serving_router(settings, control, state)
    policies = dict(settings.policies)
    for name, version in state.policies.active.items():
        stored = await store.get_policy_version(name, version)
        if stored is not None:
            policies[name] = from_body(name, stored.body, settings.ladder, version=version)
    default = state.policies.default if state.policies.default in policies else settings.policy.name
    known = await control.list_routers(limit=10_000)
    base = serving.base_version
    versions = {each.version for each in known if each.card.get("base") == base} | {base, serving.version}
    doubts = {name: state.quarantine(name, serving.version) for name in policies}
    quarantine = {name: {tier: each.least for tier, each in tiers.items()} for name, tiers in doubts.items()}
    since = [datetime.fromisoformat(each.since) for tiers in doubts.values() for each in tiers.values()]
    quarantined_since = min(since, default=recovering_since(serving, now))
    canary, behind = await _canary(settings, control, state, base), await _behind(control, state, now)
    return RetrainSnapshot(
        serving, canary, quarantine, quarantined_since, behind, policies, default, tuple(sorted(versions))
    )


async def _canary(settings: Settings, control: ControlStore, state: ControlState, base: str) -> ArtifactRouter | None:
    """Return the canary router, where the log's rows say what it would decide."""
    canary = state.router.canary
    content = await control.router_bytes(canary.version) if canary is not None else None
    if canary is None or content is None:
        return None
    router = await asyncio.to_thread(read_router, canary.version, content, (settings.learning.encoder,))
    return router if isinstance(router, ArtifactRouter) and router.base_version == base else None


async def _behind(control: ControlStore, state: ControlState, now: datetime) -> str | None:
    """Return the canary router's version, where its stage lacks evidence."""
    canary = state.router.canary
    row = await control.get_rollout(canary.rollout_id) if canary is not None else None
    if row is None or not row.state:
        return None
    rollout = RolloutState.from_dict(row.state)
    return row.router_version if is_behind(rollout.plan, rollout.rollout, now.timestamp()) else None


async def _serving_router(settings: Settings, control: ControlStore, state: ControlState) -> ArtifactRouter:
    router: Any = None
    if state.router.active is not None and (content := await control.router_bytes(state.router.active)) is not None:
        router = await asyncio.to_thread(read_router, state.router.active, content, (settings.learning.encoder,))
    elif not state.versions:
        router = await asyncio.to_thread(load_router, settings)
    if not isinstance(router, ArtifactRouter):
        raise RetrainRefused("No router serves that could be improved; fit a first one with `suffice bootstrap`.")
    return router
