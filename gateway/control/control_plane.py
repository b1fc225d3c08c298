"""The control plane of one server: applies what is active in the database, within a second.

A change is heard of through Redis, and looked for in any case. It is prepared beside the running requests (routers are
loaded in a thread) and takes effect between two of them. Without the database the last state stays active; without
Redis changes are found by looking.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from gateway.config.errors import SettingsError
from gateway.config.policy_body import from_body
from gateway.control.change_feed import ChangeFeed
from gateway.control.configuration_import import import_configuration
from gateway.control.control_state import ControlState, router_key, router_of
from gateway.control.control_writer import ControlWriter
from gateway.control.errors import RouterRefused
from gateway.control.leader import Leader
from gateway.control.router_loader import RouterLoader
from gateway.control.router_set import RouterSet, RouterSlot
from gateway.control.shadow_router import ShadowRouter
from gateway.ids import uuid7
from gateway.store.control import ControlStore
from gateway.store.control_records import Alert
from gateway.store.errors import StoreError
from gateway.store.leases import LeaseStore
from gateway.store.store import Store
from policies.ladder import Ladder
from policies.policy import Policy
from policies.rollout import RolloutStage

if TYPE_CHECKING:
    from gateway.config.settings import Settings
    from gateway.models.catalog import Catalog

_log = logging.getLogger("suffice.control")

# A router that could not be loaded is tried again this often.
_RETRY_S = 10.0


class RoutingSwitches(Protocol):
    """The switches of a service that the control plane sets."""

    kill_switch: bool
    quarantine: Mapping[tuple[str, str], Mapping[int, float]]
    group_quarantine: Mapping[tuple[str, str], Mapping[str, Mapping[int, float]]]


class ControlPlane:
    """Keeps one server at the active state.

    Attributes
    ----------
    state : what is active here
    store, writer : to read and to change what is active everywhere
    leader : who does what only one server may; other rooms give it their jobs before :meth:`start`
    routers, shadow : the routers in use
    refused : versions that are to be active and cannot be used here

    Parameters
    ----------
    settings : checked configuration
    store : the open database
    catalog, routers, switches : what changes are brought into
    rng : draws what a router in shadow sees
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        catalog: Catalog,
        routers: RouterSet,
        switches: RoutingSwitches,
        rng: Any,
    ) -> None:
        self._settings = settings
        self._catalog = catalog
        self._switches = switches
        self.routers = routers
        self.state = ControlState()
        self.store = ControlStore(store)
        self.writer = ControlWriter(self.store, self._published)
        self.leader = Leader(LeaseStore(store), ttl_s=settings.control.lease_s)
        self.shadow = ShadowRouter(
            catalog.ladder,
            self.store,
            settings.control.shadow_share,
            rng,
            keeps_estimates=settings.log.prompts != "none",
        )
        self._loader = RouterLoader(
            self.store, routers, len(catalog.ladder), routers.serving.router, (settings.learning.encoder,)
        )
        self._policies: dict[tuple[str, str], Policy] = {(p.name, p.version): p for p in settings.policies.values()}
        self._bus = ChangeFeed(settings.redis.url, self._hear) if settings.redis.url is not None else None
        self._in_force: Mapping[str, Policy] = dict(settings.policies)
        self._wanted = self.state
        self._preparing: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._looked_s = time.monotonic()
        self._retry_s: float | None = None
        self._alerted: set[str] = set()
        self.refused: frozenset[str] = frozenset()
        self.problem = ""
        self.listeners: list[Callable[[ControlState], None]] = []

    async def start(self) -> None:
        """Import the configuration, apply the active state to this server, and keep both together.

        Raises
        ------
        StoreUnavailable and its kinds
        """
        await import_configuration(self.writer, self._settings, self.routers.serving.router)
        await self.refresh()
        self.shadow.start()
        if self._bus is not None:
            self._bus.start()
        self._task = asyncio.create_task(self._watch(), name="suffice-control")
        self.leader.start()

    async def close(self) -> None:
        """Stop looking, and let another lead."""
        await self.leader.close()
        for task in (self._task, self._preparing):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._bus is not None:
            await self._bus.close()
        await self.shadow.close()

    async def refresh(self) -> None:
        """Look now, and bring into force what changed.

        Raises
        ------
        StoreUnavailable and its kinds
        """
        await self._look()
        await self._prepare()

    @property
    def ladder(self) -> Ladder:
        """Return the tiers."""
        return self._catalog.ladder

    @property
    def policies(self) -> Mapping[str, Policy]:
        """Return the policies active here, with what was derived with the serving router."""
        return self._catalog.policies

    def routers_at_hand(self) -> frozenset[str]:
        """Versions that serve, are on their way, or would serve again after a step back."""
        router = self.state.router
        canary = {router.canary.version} if router.canary else set()
        return frozenset({self.routers.version, router_key(router.active), *router.previous[:1]} | canary)

    def status(self) -> dict[str, Any]:
        """For those who look whether this server is well."""
        return {
            "generation": self.state.generation,
            "seconds_since_seen": round(self.seconds_since_seen, 3),
            "is_leader": self.leader.lease is not None,
            "redis": None if self._bus is None else self._bus.is_connected,
            "kill_switch": self._switches.kill_switch,
            "problem": self.problem,
        }

    @property
    def seconds_since_seen(self) -> float:
        """Return the seconds since the database last told this server what is active."""
        return time.monotonic() - self._looked_s

    # ---- inside

    @property
    def _is_due(self) -> bool:
        is_retry = self._retry_s is not None and time.monotonic() >= self._retry_s
        return self._wanted.generation != self.state.generation or is_retry

    async def _look(self) -> None:
        """Read the active state. What moves traffic up takes effect at once, whatever else is being prepared."""
        generation = await self.store.generation()
        self._looked_s = time.monotonic()
        if generation == self._wanted.generation:
            return
        state = ControlState.decode(await self.store.rows())
        if state.generation < self._wanted.generation:
            return  # an answer that was overtaken by a later one
        self._wanted = state
        self._switches.kill_switch = state.kill_switch.on
        self._switches.quarantine = {
            (name, version): {tier: each.least for tier, each in tiers.items()}
            for name, routers in state.quarantines.items()
            for version, tiers in routers.items()
        }
        self._switches.group_quarantine = {
            (name, version): {
                group: {tier: each.least for tier, each in tiers.items()} for group, tiers in groups.items()
            }
            for name, routers in state.groups.items()
            for version, groups in routers.items()
        }

    async def _prepare(self) -> None:
        """Make ready what was last read, and change over to it."""
        async with self._lock:
            while self._is_due:
                await self._apply(self._wanted)

    def _hear(self) -> None:
        self._wake.set()

    async def _published(self, generation: int) -> None:
        """Publish a change made here: it is active here before its maker is answered."""
        if self._bus is not None:
            self._bus.publish(generation)
        try:
            await self.refresh()
        except StoreError:
            self._wake.set()

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._settings.control.poll_s)
            self._wake.clear()
            await self._guarded(self._look)
            if self._is_due and (self._preparing is None or self._preparing.done()):
                # Beside the looking: a router that takes long to load must not hold up a kill switch.
                self._preparing = asyncio.create_task(self._guarded(self._prepare), name="suffice-control-apply")

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
            self._say("")
        except StoreError as problem:
            self._say(f"what is in force cannot be read; the last state stays: {problem}")
        except Exception as problem:
            # Whatever is wrong with a change, the next one must still be found.
            _log.exception("a change could not be brought into force")
            self._say(f"{type(problem).__name__}: {problem}")

    def _say(self, problem: str) -> None:
        """Log when something begins to be wrong and when it ends, not twice a second."""
        if self._retry_s is not None and not problem:
            return
        if problem and not self.problem:
            _log.warning("%s", problem)
        elif self.problem and not problem:
            _log.info("what is in force can be read again")
        self.problem = problem

    async def _apply(self, state: ControlState) -> None:
        """Prepare everything that takes time, then change over in one step."""
        problems: list[tuple[str, str]] = []
        policies = await self._read_policies(state, problems)
        serving = await self._slot(state.router.active, policies, problems)
        canary, version = None, state.router.canary.version if state.router.canary else None
        if version is not None:
            canary = await self._slot(version, policies, problems)
        if serving is None:
            serving = await self._loader.slot(router_of(self.routers.serving.version), policies)
        # From here on nothing waits: requests see either all of the old or all of the new.
        in_shadow = state.router.canary is not None and state.router.canary.stage == RolloutStage.SHADOW.value
        share = state.router.canary.share if state.router.canary and not in_shadow else 0.0
        self._catalog.replace_policies(serving.policies, serving.policies[self._default(state, policies)])
        self.routers.replace(serving, canary if not in_shadow else None, share)
        self.shadow.watch_with(canary, serves=not in_shadow, quarantine=_least(state, version))
        self.state = state
        self._in_force = policies
        self.refused = frozenset(subject for subject, _ in problems)
        self._loader.forget_all_but({serving.version, state.router.active, version, *state.router.previous[:1]})
        self._retry_s = time.monotonic() + _RETRY_S if problems else None
        self.problem = "; ".join(problem for _, problem in problems)
        for listener in self.listeners:
            listener(state)
        for subject, problem in problems:
            await self._alert(subject, problem)
        healed = self._alerted - {subject for subject, _ in problems}
        self._alerted = {subject for subject, _ in problems}
        for subject in healed:
            with contextlib.suppress(StoreError):
                await self.store.resolve_alerts("rollout", subject, datetime.now(UTC))

    def _default(self, state: ControlState, policies: Mapping[str, Policy]) -> str:
        name = state.policies.default
        return name if name in policies else self._settings.policy.name

    async def _read_policies(self, state: ControlState, problems: list[tuple[str, str]]) -> dict[str, Policy]:
        """Return the active versions; one that cannot be read leaves the version before it active."""
        found: dict[str, Policy] = {}
        for name, version in state.policies.active.items():
            policy = self._policies.get((name, version))
            if policy is None:
                try:
                    policy = await self._read_policy(name, version)
                except (SettingsError, LookupError) as error:
                    problems.append((f"{name}@{version}", f"policy {name}@{version} cannot be used: {error}"))
                    policy = self._in_force.get(name)
            if policy is not None:
                found[name] = policy
        default = self._settings.policy
        if state.policies.default not in found:
            found.setdefault(default.name, default)
        used = {(policy.name, policy.version): policy for policy in found.values()}
        self._policies = used | {(p.name, p.version): p for p in self._settings.policies.values()}
        return found

    async def _read_policy(self, name: str, version: str) -> Policy:
        stored = await self.store.store.get_policy_version(name, version)
        if stored is None:
            raise LookupError("there is no such version")
        return from_body(name, stored.body, self._catalog.ladder, version=version)

    async def _slot(
        self, version: str | None, policies: Mapping[str, Policy], problems: list[tuple[str, str]]
    ) -> RouterSlot | None:
        try:
            return await self._loader.slot(version, policies)
        except RouterRefused as error:
            _log.error("%s The router that served before goes on.", error)
            problems.append((str(version), str(error)))
            return None

    async def alert(self, kind: str, severity: str, subject: str, body: Mapping[str, Any], now: datetime) -> bool:
        """Raise an alert. True when it is new: one of the same kind and subject may be open already."""
        return await self.store.raise_alert(
            Alert(alert_id=uuid7(), created_at=now, kind=kind, severity=severity, subject=subject, body=body)
        )

    async def _alert(self, subject: str, problem: str) -> None:
        try:
            await self.alert("rollout", "critical", subject, {"problem": problem}, datetime.now(UTC))
        except StoreError as error:
            _log.warning("the alert about %s was not kept: %s", subject, error)


def _least(state: ControlState, router: str | None) -> dict[str, dict[int, float]]:
    """Return policy's name -> quarantined tier under a router -> the P(as good) it must reach."""
    quarantine = {name: routers.get(router_key(router), {}) for name, routers in state.quarantines.items()}
    return {name: {tier: each.least for tier, each in tiers.items()} for name, tiers in quarantine.items()}
