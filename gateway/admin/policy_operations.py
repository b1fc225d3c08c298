"""Reads, tries, saves, compares, brings back and removes policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from gateway.admin.common_shapes import ReasonBody
from gateway.admin.listing import Listing
from gateway.admin.operation import AdminRequest, AdminResponse, AdminShape, OperationGroup, operation
from gateway.admin.policy_document import (
    MAX_NAME,
    PolicyBody,
    changes,
    checked_name,
    checked_policy,
    quarantine_view,
)
from gateway.admin.record_views import Json, PolicyVersionView
from gateway.config.errors import SettingsError
from gateway.config.policy_body import from_body, to_body
from gateway.control.control_state import ControlState
from gateway.control.errors import Conflict
from gateway.errors import InvalidRequest, NotFound
from gateway.store.records import PolicyVersion

VersionName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]


class PolicyView(Struct, kw_only=True):
    """A policy; without an active version, its newest one."""

    object: Literal["suffice.policy"] = "suffice.policy"
    name: str
    version: str | None
    is_active: bool
    is_default: bool
    body: Json


class RemovedPolicy(Struct):
    """A policy that no request can name any more."""

    name: str
    is_active: bool


class PolicyProblem(Struct):
    """A field of a policy and what is wrong with it."""

    param: str
    message: str


class PolicyCheck(Struct, kw_only=True):
    """The result of a check of a policy; one that could be saved has a `body` too, as it would be kept."""

    valid: bool
    version: str | None
    problems: list[PolicyProblem]


class ReleasedPolicy(Struct):
    """A policy and the quarantines that ended."""

    name: str
    released: Json


class PolicyChanges(Struct, kw_only=True):
    """Two versions and their differences, field by field; what one of them lacks is null there."""

    name: str
    from_: str = msgspec.field(name="from")
    to: str
    changes: list[Json]


class NoteQuery(AdminShape, frozen=True):
    """The words that a version is saved with."""

    note: Annotated[str, Meta(max_length=500, description="Why, for the version's entry.")] = ""


class VersionBody(AdminShape, frozen=True):
    """A stored version."""

    version: Annotated[VersionName, Meta(description="A stored version of this policy.")]


class DiffQuery(AdminShape, frozen=True):
    """Two versions to compare."""

    from_: Annotated[VersionName, Meta(description="A stored version of this policy.")] = msgspec.field(name="from")
    to: Annotated[VersionName, Meta(description="By default the active version.")] | None = None


class PolicyOperations(OperationGroup):
    """Serves policies over HTTP. The entity tag of a policy is its active version, which is a hash of its content."""

    @operation("GET", "/policies", returns=Listing[PolicyView])
    async def list_policies(self, request: AdminRequest) -> AdminResponse:
        """List every policy, active or not."""
        state = await self._context.state()
        names = {*await self._context.queries.policy_names(), *state.policies.active}
        return AdminResponse(Listing(data=[await self._view(state, name) for name in sorted(names)]))

    @operation("GET", "/policies/{name}", returns=PolicyView, errors=(NotFound,))
    async def get_policy(self, request: AdminRequest, name: str) -> AdminResponse:
        """Show a policy's active version, and what was derived for it."""
        state = await self._context.state()
        shown = msgspec.structs.asdict(await self._view(state, name))
        effective = self._context.catalog.policies.get(name)
        if effective is not None:
            shown["effective"] = to_body(effective)
        shown["tightened"] = quarantine_view(state, name)
        return AdminResponse(shown, etag=state.policies.active.get(name))

    @operation("PUT", "/policies/{name}", returns=PolicyView, conditional="must")
    async def put_policy(self, request: AdminRequest, name: str, query: NoteQuery, body: PolicyBody) -> AdminResponse:
        """Save a policy as a new version and make it the active one."""
        expected = request.if_match or ""
        policy = checked_policy(name, body, self._context.catalog.ladder)
        # The change is made only while this version is active, and versions do not change.
        before = await self._context.store.get_policy_version(name, expected) if expected else None
        version = PolicyVersion(
            name=name,
            version=policy.version,
            created_at=datetime.now(UTC),
            body=to_body(policy),
            author=request.by,
            note=query.note,
        )
        former = None if before is None else before.body
        audit = request.auditing(f"policy {name}@{policy.version}", lambda _: former, version.body)
        await self._context.plane.writer.policies.put(version, by=request.by, if_active=expected, audit=audit)
        return await self._now(name)

    @operation("DELETE", "/policies/{name}", returns=RemovedPolicy, errors=(NotFound,), conditional="must")
    async def remove_policy(self, request: AdminRequest, name: str) -> AdminResponse:
        """Take a policy out of service; its versions stay. Not the default one."""
        state = await self._context.state()
        if name == state.policies.default:
            raise InvalidRequest(
                f"{name!r} is the policy of requests that name none; choose another first.", param="name"
            )
        audit = request.auditing(f"policy {name}", _active_version(name), {"version": None})
        await self._context.plane.writer.policies.remove(name, by=request.by, if_active=request.if_match, audit=audit)
        return AdminResponse(RemovedPolicy(name, is_active=False))

    @operation("POST", "/policies/{name}/validate", returns=PolicyCheck)
    async def validate_policy(self, request: AdminRequest, name: str, body: PolicyBody) -> AdminResponse:
        """Say whether a policy could be saved; saves nothing."""
        try:
            policy = from_body(checked_name(name), body, self._context.catalog.ladder)
        except SettingsError as error:
            problems = [PolicyProblem(each.path, each.message) for each in error.problems]
            return AdminResponse(PolicyCheck(valid=False, version=None, problems=problems))
        found = PolicyCheck(valid=True, version=policy.version, problems=[])
        return AdminResponse(msgspec.structs.asdict(found) | {"body": to_body(policy)})

    @operation("POST", "/policies/{name}/activate", returns=PolicyView, errors=(NotFound,), conditional="may")
    async def activate_policy(self, request: AdminRequest, name: str, body: VersionBody) -> AdminResponse:
        """Make a stored version the active one."""
        return await self._activate(request, name, body.version)

    @operation("POST", "/policies/{name}/rollback", returns=PolicyView, errors=(NotFound, Conflict), conditional="may")
    async def roll_back_policy(self, request: AdminRequest, name: str) -> AdminResponse:
        """Activate the version before the active one."""
        state = await self._context.state()
        versions = [each.version for each in await self._versions(name)]
        active = state.policies.active.get(name)
        earlier = versions[versions.index(active) + 1 :] if active in versions else versions
        if not earlier:
            raise Conflict(f"Policy {name!r}", "a version before the one in force", active)
        return await self._activate(request, name, earlier[0])

    @operation("POST", "/policies/{name}/default", returns=PolicyView, errors=(NotFound,))
    async def set_default_policy(self, request: AdminRequest, name: str) -> AdminResponse:
        """Make this the policy of requests that name none."""
        audit = request.auditing(f"policy {name}", lambda state: {"default": state.policies.default}, {"default": name})
        await self._context.plane.writer.policies.set_default(name, by=request.by, audit=audit)
        return await self._now(name)

    @operation("POST", "/policies/{name}/release", returns=ReleasedPolicy, errors=(NotFound,))
    async def release_policy(self, request: AdminRequest, name: str, body: ReasonBody) -> AdminResponse:
        """End the quarantines that the monitor set."""
        if name not in (await self._context.state()).policies.active:
            raise NotFound("policy", name)
        released: Json = {}

        def before(state: ControlState) -> Json:
            released.update(quarantine_view(state, name))
            return {"tightened": released}

        audit = request.auditing(f"policy {name}", before, {"tightened": {}, "reason": body.reason})
        await self._context.plane.writer.quarantines.release_policy(name, by=request.by, audit=audit)
        return AdminResponse(ReleasedPolicy(name, released))

    @operation("GET", "/policies/{name}/versions", returns=Listing[PolicyVersionView], errors=(NotFound,))
    async def list_policy_versions(self, request: AdminRequest, name: str) -> AdminResponse:
        """List every version of a policy, newest first."""
        return AdminResponse(Listing(data=[PolicyVersionView.of(each) for each in await self._versions(name)]))

    @operation("GET", "/policies/{name}/diff", returns=PolicyChanges, errors=(NotFound,))
    async def diff_policy(self, request: AdminRequest, name: str, query: DiffQuery) -> AdminResponse:
        """Show what differs between two versions."""
        state = await self._context.state()
        first, last = query.from_, query.to or state.policies.active.get(name, "")
        before, after = await self._stored(name, first), await self._stored(name, last)
        found = {"name": name, "from": first, "to": last, "changes": changes(before.body, after.body)}
        return AdminResponse(found)

    async def _activate(self, request: AdminRequest, name: str, version: str) -> AdminResponse:
        stored = await self._stored(name, version)
        # A version of another time may name tiers that are gone.
        checked_policy(name, stored.body, self._context.catalog.ladder)
        audit = request.auditing(f"policy {name}@{version}", _active_version(name), {"version": version})
        await self._context.plane.writer.policies.activate(
            name, version, by=request.by, if_active=request.if_match, audit=audit
        )
        return await self._now(name)

    async def _versions(self, name: str) -> Sequence[PolicyVersion]:
        found = await self._context.queries.policy_versions(name)
        if not found:
            raise NotFound("policy", name)
        return found

    async def _stored(self, name: str, version: str) -> PolicyVersion:
        stored = await self._context.store.get_policy_version(name, version)
        if stored is None:
            raise NotFound("policy version", f"{name}@{version}")
        return stored

    async def _now(self, name: str) -> AdminResponse:
        state = await self._context.state()
        return AdminResponse(await self._view(state, name), etag=state.policies.active.get(name))

    async def _view(self, state: ControlState, name: str) -> PolicyView:
        active = state.policies.active.get(name)
        shown = (await self._versions(name))[0] if active is None else await self._stored(name, active)
        return PolicyView(
            name=name,
            version=active,
            is_active=active is not None,
            is_default=name == state.policies.default,
            body=dict(shown.body),
        )


def _active_version(name: str) -> Callable[[ControlState], Mapping[str, Any]]:
    return lambda state: {"version": state.policies.active.get(name)}
