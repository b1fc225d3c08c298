"""Changes of policies, of the kill switch, and what a configuration brings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import select

from gateway.control import control_state as names
from gateway.control.audited_change import Audit, AuditedChange
from gateway.control.control_state import ActivePolicies, ControlState, KillSwitch
from gateway.control.errors import Conflict, UnknownVersion
from gateway.control.router_writer import RouterWriter, with_previous
from gateway.store.control_records import RouterVersion
from gateway.store.records import PolicyVersion
from gateway.store.tables import policy_versions


class PolicyWriter(RouterWriter):
    """What is served by which rule."""

    async def set_kill_switch(
        self,
        on: bool,
        reason: str,
        *,
        by: str,
        expected_version: int | None = None,
        audit: Audit | None = None,
    ) -> None:
        """Send all traffic to the top tier, or route again."""
        async with self.change(by, row=names.KILL_SWITCH, expected_version=expected_version, audit=audit) as change:
            await change.put(names.KILL_SWITCH, KillSwitch(on, reason).as_dict())

    async def put_policy(
        self,
        policy: PolicyVersion,
        *,
        by: str,
        activate: bool = True,
        if_active: str | None = None,
        audit: Audit | None = None,
    ) -> None:
        """Keep a version of a policy, which may be there already, and put it in force.

        Parameters
        ----------
        if_active : the version that must be in force now, empty for none
        """
        async with self.change(by, audit=audit) as change:
            _check_active(change.before, policy.name, if_active)
            await self._insert_policy(change, policy)
            if activate:
                await self._activate(change, policy.name, policy.version)

    async def activate_policy(
        self, name: str, version: str, *, by: str, if_active: str | None = None, audit: Audit | None = None
    ) -> None:
        """Put a stored version in force, such as an earlier one.

        Raises
        ------
        UnknownVersion
        """
        async with self.change(by, audit=audit) as change:
            _check_active(change.before, name, if_active)
            stored = policy_versions.c
            if not await change.is_there(select(stored.name).where(stored.name == name, stored.version == version)):
                raise UnknownVersion("policy version", f"{name}@{version}")
            await self._activate(change, name, version)

    async def remove_policy(
        self, name: str, *, by: str, if_active: str | None = None, audit: Audit | None = None
    ) -> None:
        """Serve a policy no more; its versions stay. The default policy cannot be removed.

        Raises
        ------
        UnknownVersion, Conflict
        """
        async with self.change(by, audit=audit) as change:
            policies = change.before.policies
            if name not in policies.active:
                raise UnknownVersion("policy", name)
            _check_active(change.before, name, if_active)
            if name == policies.default:
                raise Conflict(f"The default policy {name!r}", "another default", "this one")
            active = {each: version for each, version in policies.active.items() if each != name}
            await change.put(names.POLICIES, replace(policies, active=active).as_dict())

    async def set_default_policy(self, name: str, *, by: str, audit: Audit | None = None) -> None:
        """Choose the policy of requests that name none.

        Raises
        ------
        UnknownVersion
        """
        async with self.change(by, audit=audit) as change:
            if name not in change.before.policies.active:
                raise UnknownVersion("policy", name)
            await change.put(names.POLICIES, replace(change.before.policies, default=name).as_dict())

    async def apply_configuration(
        self, policies: Mapping[str, tuple[PolicyVersion, str]], router: tuple[str, RouterVersion | None, bytes]
    ) -> None:
        """Bring what the configuration says into force, unless it said so before and was overruled since.

        Parameters
        ----------
        policies : name -> (version, mark of what the configuration wrote)
        router : (version or ``none``, its entry, its bytes; no entry for a router that is not stored)
        """
        async with self.change("config") as change:
            before = change.before.policies
            found = await self._without_dropped(change, policies)
            for name, (policy, mark) in policies.items():
                await self._insert_policy(change, policy)
                if before.config.get(name) != mark or name not in found:
                    found[name] = policy.version
            marks = {name: mark for name, (_, mark) in policies.items()}
            await change.put(names.POLICIES, ActivePolicies(found, before.default, marks).as_dict())
            await self._bring_router(change, *router)

    async def _without_dropped(self, change: AuditedChange, policies: Mapping[str, Any]) -> dict[str, str]:
        """The active policies, less those that only the configuration knew and does not name any more."""
        before = change.before.policies
        found = dict(before.active)
        for name in set(before.config) - set(policies) - {before.default}:
            stored = policy_versions.c
            wanted = select(stored.name).where(
                stored.name == name, stored.version == found.get(name, ""), stored.author == "config"
            )
            if await change.is_there(wanted):
                del found[name]
        return found

    async def _bring_router(
        self, change: AuditedChange, version: str, entry: RouterVersion | None, artifact: bytes
    ) -> None:
        """Keep the configured router, and let it serve if the configuration named another one before."""
        before = change.before.router
        if entry is not None:
            await self.insert_router(change, entry, artifact)
        if before.config == version:
            return
        if before.active is not None:
            await self.set_status(change, before.active, "retired")
        await self.set_status(change, version, "serving")
        active = None if version == "none" else version
        previous = with_previous(before.previous, before.active, active) if before.config else ()
        await change.put(names.ROUTER, replace(before, active=active, config=version, previous=previous).as_dict())

    async def _insert_policy(self, change: AuditedChange, policy: PolicyVersion) -> None:
        await change.execute(
            change.transaction.insert(policy_versions).values(**_fields(policy)).on_conflict_do_nothing()
        )

    async def _activate(self, change: AuditedChange, name: str, version: str) -> None:
        policies = change.before.policies
        active = {**policies.active, name: version}
        await change.put(names.POLICIES, replace(policies, active=active).as_dict())


def _check_active(before: ControlState, name: str, expected: str | None) -> None:
    found = before.policies.active.get(name, "")
    if expected is not None and found != expected:
        raise Conflict(f"Policy {name!r}", expected or "none", found or "none")


def _fields(policy: PolicyVersion) -> dict[str, Any]:
    return {name: getattr(policy, name) for name in policy.__slots__}
