"""Policies: read, tried, saved as versions, compared, brought back, taken out of service."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from gateway.admin import schemas
from gateway.admin.endpoint import auditing
from gateway.admin.operation import Asked, Field, Free, Operation, Reply
from gateway.admin.policy_forms import MAX_NAME, changes, checked_name, checked_policy, quarantine_view, version_view
from gateway.admin.policy_schema import policy_schema
from gateway.admin.rooms import Rooms
from gateway.api import fields
from gateway.config.errors import SettingsError
from gateway.config.policy_body import from_body, to_body
from gateway.control.control_state import ControlState
from gateway.control.errors import Conflict
from gateway.errors import InvalidRequest, NotFound
from gateway.store.records import PolicyVersion
from policies.policy import Policy

_VERSION = schemas.shape(
    name=schemas.TEXT, version=schemas.TEXT, created_at=schemas.MOMENT, author=schemas.TEXT, body=schemas.ANY_OBJECT
)
_POLICY = schemas.shape(
    name=schemas.TEXT,
    version=schemas.optional(schemas.TEXT),
    is_active=schemas.FLAG,
    is_default=schemas.FLAG,
    body=schemas.ANY_OBJECT,
)
_NOTE = Field(fields.string(500), "Why, for the version's entry.", "")
_WHICH = Field(fields.string(MAX_NAME, min_chars=1), "A stored version of this policy.", required=True)


class PolicyPages:
    """Policies over HTTP. The entity tag of a policy is its version in force, which is a hash of its content."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms

    def operations(self) -> list[Operation]:
        body = Free(policy_schema())
        named = (NotFound,)
        return [
            Operation(
                method="GET",
                path="/policies",
                name="list_policies",
                summary="Every policy, in force or not.",
                handler=self.list,
                returns=schemas.listing(_POLICY),
            ),
            Operation(
                method="GET",
                path="/policies/{name}",
                name="get_policy",
                summary="A policy as it is in force, and what was derived for it.",
                handler=self.get,
                returns=_POLICY,
                errors=named,
            ),
            Operation(
                method="PUT",
                path="/policies/{name}",
                name="put_policy",
                summary="Save a policy as a new version and put it in force.",
                handler=self.put,
                returns=_POLICY,
                body=body,
                query={"note": _NOTE},
                conditional="must",
            ),
            Operation(
                method="DELETE",
                path="/policies/{name}",
                name="remove_policy",
                summary="Take a policy out of service; its versions stay. Not the default one.",
                handler=self.remove,
                returns=schemas.shape(name=schemas.TEXT, is_active=schemas.FLAG),
                conditional="must",
                errors=named,
            ),
            Operation(
                method="POST",
                path="/policies/{name}/validate",
                name="validate_policy",
                summary="Say whether a policy could be saved; saves nothing.",
                handler=self.validate,
                returns=schemas.shape(
                    valid=schemas.FLAG, version=schemas.optional(schemas.TEXT), problems=schemas.array({})
                ),
                body=body,
            ),
            Operation(
                method="POST",
                path="/policies/{name}/activate",
                name="activate_policy",
                summary="Put a stored version in force.",
                handler=self.activate,
                returns=_POLICY,
                body={"version": _WHICH},
                conditional="may",
                errors=named,
            ),
            Operation(
                method="POST",
                path="/policies/{name}/rollback",
                name="roll_back_policy",
                summary="Put the version before the one in force back.",
                handler=self.roll_back,
                returns=_POLICY,
                conditional="may",
                errors=(*named, Conflict),
            ),
            Operation(
                method="POST",
                path="/policies/{name}/default",
                name="set_default_policy",
                summary="Make this the policy of requests that name none.",
                handler=self.set_default,
                returns=_POLICY,
                errors=named,
            ),
            Operation(
                method="POST",
                path="/policies/{name}/release",
                name="release_policy",
                summary="Take back what the monitor tightened.",
                handler=self.release,
                returns=schemas.shape(name=schemas.TEXT, released=schemas.ANY_OBJECT),
                body={"reason": Field(fields.string(500), "Why.", "")},
                errors=named,
            ),
            Operation(
                method="GET",
                path="/policies/{name}/versions",
                name="list_policy_versions",
                summary="Every version of a policy, newest first.",
                handler=self.versions,
                returns=schemas.listing(_VERSION),
                errors=named,
            ),
            Operation(
                method="GET",
                path="/policies/{name}/diff",
                name="diff_policy",
                summary="What differs between two versions.",
                handler=self.diff,
                returns=schemas.shape(name=schemas.TEXT, changes=schemas.array(schemas.ANY_OBJECT)),
                query={
                    "from": _WHICH,
                    "to": Field(fields.string(MAX_NAME, min_chars=1), "By default the version in force."),
                },
                errors=named,
            ),
        ]

    async def list(self, asked: Asked) -> Reply:
        state = await self._rooms.state()
        names = {*await self._rooms.queries.policy_names(), *state.policies.active}
        return Reply({"object": "list", "data": [await self._view(state, name) for name in sorted(names)]})

    async def get(self, asked: Asked) -> Reply:
        state, name = await self._rooms.state(), asked.path["name"]
        shown = await self._view(state, name)
        effective = self._rooms.catalog.policies.get(name)
        if effective is not None:
            shown["effective"] = to_body(effective)
        shown["tightened"] = quarantine_view(state, name)
        return Reply(shown, etag=state.policies.active.get(name))

    async def put(self, asked: Asked) -> Reply:
        name, expected = asked.path["name"], asked.if_match or ""
        policy = self._read(name, asked.body)
        # The change is made only while this version is in force, and versions do not change.
        before = await self._rooms.store.get_policy_version(name, expected) if expected else None
        version = PolicyVersion(
            name=name,
            version=policy.version,
            created_at=datetime.now(UTC),
            body=to_body(policy),
            author=asked.by,
            note=asked.query["note"],
        )
        body = None if before is None else before.body
        audit = auditing(asked, f"policy {name}@{policy.version}", lambda _: body, version.body)
        await self._rooms.plane.writer.policies.put(version, by=asked.by, if_active=expected, audit=audit)
        return await self._now(name)

    async def remove(self, asked: Asked) -> Reply:
        name, state = asked.path["name"], await self._rooms.state()
        if name == state.policies.default:
            raise InvalidRequest(
                f"{name!r} is the policy of requests that name none; choose another first.", param="name"
            )
        audit = auditing(asked, f"policy {name}", _version_of(name), {"version": None})
        await self._rooms.plane.writer.policies.remove(name, by=asked.by, if_active=asked.if_match, audit=audit)
        return Reply({"name": name, "is_active": False})

    async def validate(self, asked: Asked) -> Reply:
        try:
            policy = from_body(checked_name(asked.path["name"]), asked.body, self._rooms.catalog.ladder)
        except SettingsError as error:
            problems = [{"param": each.path, "message": each.message} for each in error.problems]
            return Reply({"valid": False, "version": None, "problems": problems})
        return Reply({"valid": True, "version": policy.version, "problems": [], "body": to_body(policy)})

    async def activate(self, asked: Asked) -> Reply:
        return await self._put_back(asked, await self._rooms.state(), asked.body["version"])

    async def roll_back(self, asked: Asked) -> Reply:
        name, state = asked.path["name"], await self._rooms.state()
        versions = [each.version for each in await self._versions(name)]
        active = state.policies.active.get(name)
        earlier = versions[versions.index(active) + 1 :] if active in versions else versions
        if not earlier:
            raise Conflict(f"Policy {name!r}", "a version before the one in force", active)
        return await self._put_back(asked, state, earlier[0])

    async def set_default(self, asked: Asked) -> Reply:
        name = asked.path["name"]
        audit = auditing(asked, f"policy {name}", lambda state: {"default": state.policies.default}, {"default": name})
        await self._rooms.plane.writer.policies.set_default(name, by=asked.by, audit=audit)
        return await self._now(name)

    async def release(self, asked: Asked) -> Reply:
        name, state = asked.path["name"], await self._rooms.state()
        if name not in state.policies.active:
            raise NotFound("policy", name)
        released: dict[str, Any] = {}

        def before(state: ControlState) -> dict[str, Any]:
            released.update(quarantine_view(state, name))
            return {"tightened": released}

        audit = auditing(asked, f"policy {name}", before, {"tightened": {}, "reason": asked.body["reason"]})
        await self._rooms.plane.writer.quarantines.release_policy(name, by=asked.by, audit=audit)
        return Reply({"name": name, "released": released})

    async def versions(self, asked: Asked) -> Reply:
        return Reply(
            {"object": "list", "data": [version_view(each) for each in await self._versions(asked.path["name"])]}
        )

    async def diff(self, asked: Asked) -> Reply:
        name, state = asked.path["name"], await self._rooms.state()
        first = asked.query["from"]
        last = asked.query["to"] or state.policies.active.get(name, "")
        before, after = await self._stored(name, first), await self._stored(name, last)
        return Reply({"name": name, "from": first, "to": last, "changes": changes(before.body, after.body)})

    # ---- inside

    def _read(self, name: str, body: Mapping[str, Any]) -> Policy:
        return checked_policy(name, body, self._rooms.catalog.ladder)

    async def _put_back(self, asked: Asked, state: ControlState, version: str) -> Reply:
        name = asked.path["name"]
        stored = await self._stored(name, version)
        # A version of another time may name tiers that are gone.
        self._read(name, stored.body)
        audit = auditing(asked, f"policy {name}@{version}", _version_of(name), {"version": version})
        await self._rooms.plane.writer.policies.activate(
            name, version, by=asked.by, if_active=asked.if_match, audit=audit
        )
        return await self._now(name)

    async def _versions(self, name: str) -> Sequence[PolicyVersion]:
        found = await self._rooms.queries.policy_versions(name)
        if not found:
            raise NotFound("policy", name)
        return found

    async def _stored(self, name: str, version: str) -> PolicyVersion:
        stored = await self._rooms.store.get_policy_version(name, version)
        if stored is None:
            raise NotFound("policy version", f"{name}@{version}")
        return stored

    async def _now(self, name: str) -> Reply:
        state = await self._rooms.state()
        return Reply(await self._view(state, name), etag=state.policies.active.get(name))

    async def _view(self, state: ControlState, name: str) -> dict[str, Any]:
        active = state.policies.active.get(name)
        newest = (await self._versions(name))[0] if active is None else await self._stored(name, active)
        return {
            "object": "suffice.policy",
            "name": name,
            "version": active,
            "is_active": active is not None,
            "is_default": name == state.policies.default,
            "body": newest.body,
        }


def _version_of(name: str) -> Callable[[ControlState], dict[str, str | None]]:
    return lambda state: {"version": state.policies.active.get(name)}
