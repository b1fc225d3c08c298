"""Changes to the policies: stored, activated, removed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sqlalchemy import select

from gateway.control import control_state as names
from gateway.control.audited_change import Audit, AuditedChange, ChangeMaker
from gateway.control.control_state import ControlState
from gateway.control.errors import Conflict, UnknownVersion
from gateway.store.records import PolicyVersion
from gateway.store.tables import policy_versions


class PolicyWriter:
    """Changes which version of each policy is active, and which policy is the default."""

    def __init__(self, changes: ChangeMaker) -> None:
        self._changes = changes

    async def put(
        self,
        policy: PolicyVersion,
        *,
        by: str,
        activate: bool = True,
        if_active: str | None = None,
        audit: Audit | None = None,
    ) -> None:
        """Keep a version of a policy, which may be there already, and activate it.

        Parameters
        ----------
        if_active : the version that must be active now, empty for none
        """
        async with self._changes.change(by, audit=audit) as change:
            _check_active(change.before, policy.name, if_active)
            await insert_policy(change, policy)
            if activate:
                await _activate(change, policy.name, policy.version)

    async def activate(
        self, name: str, version: str, *, by: str, if_active: str | None = None, audit: Audit | None = None
    ) -> None:
        """Activate a stored version, such as an earlier one.

        Raises
        ------
        UnknownVersion
        """
        async with self._changes.change(by, audit=audit) as change:
            _check_active(change.before, name, if_active)
            stored = policy_versions.c
            if not await change.is_there(select(stored.name).where(stored.name == name, stored.version == version)):
                raise UnknownVersion("policy version", f"{name}@{version}")
            await _activate(change, name, version)

    async def remove(self, name: str, *, by: str, if_active: str | None = None, audit: Audit | None = None) -> None:
        """Serve a policy no more; its versions stay. The default policy cannot be removed.

        Raises
        ------
        UnknownVersion, Conflict
        """
        async with self._changes.change(by, audit=audit) as change:
            policies = change.before.policies
            if name not in policies.active:
                raise UnknownVersion("policy", name)
            _check_active(change.before, name, if_active)
            if name == policies.default:
                raise Conflict(f"The default policy {name!r}", "another default", "this one")
            active = {each: version for each, version in policies.active.items() if each != name}
            await change.put(names.POLICIES, replace(policies, active=active).as_dict())

    async def set_default(self, name: str, *, by: str, audit: Audit | None = None) -> None:
        """Choose the policy of requests that name none.

        Raises
        ------
        UnknownVersion
        """
        async with self._changes.change(by, audit=audit) as change:
            if name not in change.before.policies.active:
                raise UnknownVersion("policy", name)
            await change.put(names.POLICIES, replace(change.before.policies, default=name).as_dict())


async def insert_policy(change: AuditedChange, policy: PolicyVersion) -> None:
    """Store a version within a change; the same version again changes nothing."""
    await change.execute(change.transaction.insert(policy_versions).values(**_fields(policy)).on_conflict_do_nothing())


async def _activate(change: AuditedChange, name: str, version: str) -> None:
    policies = change.before.policies
    active = {**policies.active, name: version}
    await change.put(names.POLICIES, replace(policies, active=active).as_dict())


def _check_active(before: ControlState, name: str, expected: str | None) -> None:
    found = before.policies.active.get(name, "")
    if expected is not None and found != expected:
        raise Conflict(f"Policy {name!r}", expected or "none", found or "none")


def _fields(policy: PolicyVersion) -> dict[str, Any]:
    return {name: getattr(policy, name) for name in policy.__slots__}
