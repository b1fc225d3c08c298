"""Makes keys and shows them once, lists, limits, rotates and revokes them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
import orjson
from msgspec import Meta

from gateway.access.authenticator import hash_key, make_key, shown_prefix
from gateway.access.key_limits import NO_LIMITS, KeyLimits
from gateway.access.key_permissions import KeyPermissions, named_permissions
from gateway.admin.common_shapes import Moment
from gateway.admin.listing import Listing
from gateway.admin.operation import AdminRequest, AdminResponse, AdminShape, OperationGroup, operation
from gateway.admin.record_views import Json, KeyView
from gateway.api.declaration import wrong_value
from gateway.control.errors import Conflict
from gateway.errors import NotFound
from gateway.ids import uuid7
from gateway.store.admin_writes import Edit
from gateway.store.records import ApiKey

KeyName = Annotated[str, Meta(min_length=1, max_length=200)]
Limits = Annotated[KeyLimits, Meta(description="What the key may use; null or absent is without limit.")]

Bindings = Annotated[
    KeyPermissions, Meta(description="Policies, tiers and regions the key may use; null or absent is any.")
]

Expiry = Annotated[Moment, Meta(description="From when on it is refused; null or absent is never.")]


class KeyWithSecret(KeyView, kw_only=True):
    """A key and its secret, which is shown nowhere else."""

    key: str


class LimitsBody(AdminShape, frozen=True):
    """The limits of a key."""

    limits: Limits | None = None


class PermissionsBody(AdminShape, frozen=True):
    """The permissions of a key."""

    permissions: Bindings | None = None


class KeyBody(AdminShape, frozen=True):
    """A key to be made."""

    name: Annotated[KeyName, Meta(description="What it is for.")] = "unnamed"
    tenant: Annotated[KeyName, Meta(description="Whose requests it makes.")] = "default"
    scope: Annotated[
        Literal["use", "admin", "admin-read"],
        Meta(description="What it opens: the models, this administration, or what of it only reads."),
    ] = "use"
    limits: Limits | None = None
    permissions: Bindings | None = None
    expires_at: Annotated[Moment, Meta(description="From when on it is refused; null or absent is never.")] | None = (
        None
    )


class KeyOperations(OperationGroup):
    """Serves keys over HTTP. A secret is in the answer to its making and nowhere else."""

    @operation("GET", "/keys", returns=Listing[KeyView])
    async def list_keys(self, request: AdminRequest) -> AdminResponse:
        """List every key, revoked ones included, by its prefix."""
        return AdminResponse(Listing(data=[KeyView.of(each) for each in await self._context.store.list_keys()]))

    @operation("POST", "/keys", returns=KeyWithSecret, status=201)
    async def create_key(self, request: AdminRequest, body: KeyBody) -> AdminResponse:
        """Make a key. This answer is the only place its secret can be seen."""
        secret = make_key()
        key = ApiKey(
            key_id=uuid7(),
            name=body.name,
            key_hash=hash_key(secret),
            prefix=shown_prefix(secret),
            created_at=datetime.now(UTC),
            tenant=body.tenant,
            limits=(body.limits or NO_LIMITS).stored(),
            scope=body.scope,
            permissions=self._named(body.permissions, body.scope),
            expires_at=_future(body.expires_at),
        )
        shown = msgspec.structs.asdict(KeyView.of(key))
        await self._context.writes.insert_key(key, request.audited(f"key {key.key_id}", None, shown))
        self._context.forget_key(key.key_hash)
        return AdminResponse(KeyWithSecret.of(key, key=secret), etag=_tag(key))

    @operation("GET", "/keys/{key_id}", returns=KeyView, errors=(NotFound,))
    async def get_key(self, request: AdminRequest, key_id: str) -> AdminResponse:
        """Show one key."""
        found = await self._context.queries.key(key_id)
        if found is None:
            raise NotFound("key", key_id)
        return AdminResponse(KeyView.of(found), etag=_tag(found))

    @operation("PUT", "/keys/{key_id}/limits", returns=KeyView, errors=(NotFound, Conflict), conditional="may")
    async def limit_key(self, request: AdminRequest, key_id: str, body: LimitsBody) -> AdminResponse:
        """Change what a key may use."""
        values = {"limits": (body.limits or NO_LIMITS).stored()}
        key = await self._change(request, key_id, values, lambda key: {"limits": dict(key.limits)})
        return AdminResponse(KeyView.of(key), etag=_tag(key))

    @operation("PUT", "/keys/{key_id}/permissions", returns=KeyView, errors=(NotFound, Conflict), conditional="may")
    async def bind_key(self, request: AdminRequest, key_id: str, body: PermissionsBody) -> AdminResponse:
        """Change which policies, tiers and regions a key may use."""
        found = await self._context.queries.key(key_id)
        if found is None:
            raise NotFound("key", key_id)
        values = {"permissions": self._named(body.permissions, found.scope)}
        key = await self._change(request, key_id, values, lambda key: {"permissions": dict(key.permissions)})
        return AdminResponse(KeyView.of(key), etag=_tag(key))

    @operation("POST", "/keys/{key_id}/rotate", returns=KeyWithSecret, errors=(NotFound, Conflict), conditional="may")
    async def rotate_key(self, request: AdminRequest, key_id: str) -> AdminResponse:
        """Give a key another secret; the old one ends. Everything else of it stays."""
        secret = make_key()
        values = {"key_hash": hash_key(secret), "prefix": shown_prefix(secret)}
        key = await self._change(request, key_id, values, lambda key: {"prefix": key.prefix})
        return AdminResponse(KeyWithSecret.of(key, key=secret), etag=_tag(key))

    @operation("DELETE", "/keys/{key_id}", returns=KeyView, errors=(NotFound, Conflict), conditional="may")
    async def revoke_key(self, request: AdminRequest, key_id: str) -> AdminResponse:
        """Revoke a key, for good."""
        values = {"revoked_at": datetime.now(UTC)}
        key = await self._change(request, key_id, values, lambda key: {"revoked": key.revoked_at is not None})
        return AdminResponse(KeyView.of(key), etag=_tag(key))

    def _named(self, given: KeyPermissions | None, scope: str) -> Json:
        """Return permissions as they are stored.

        Raises
        ------
        InvalidRequest
        """
        catalog = self._context.catalog
        return named_permissions(given or KeyPermissions(), catalog.ladder, catalog.policies, scope)

    async def _change(
        self, request: AdminRequest, key_id: str, values: Mapping[str, Any], shown: Callable[[ApiKey], Json]
    ) -> ApiKey:
        """Change a key that is active and, where the request says so, as it was read.

        ``shown`` is what of it the audit log holds, before and after.

        Raises
        ------
        NotFound, Conflict
        """
        before: list[ApiKey] = []

        def edit(key: ApiKey) -> Edit:
            if request.if_match is not None and request.if_match != _tag(key):
                raise Conflict(f"Key {key.prefix}…", request.if_match or "none", _tag(key))
            if key.revoked_at is not None:
                raise Conflict(f"Key {key.prefix}…", "an active one", "a revoked one")
            before.append(key)
            return values, request.audited(f"key {key_id}", shown(key), shown(replace(key, **values)))

        changed = await self._context.writes.change_key(key_id, edit)
        if changed is None:
            raise NotFound("key", key_id)
        self._context.forget_key(before[0].key_hash)
        return changed


def _future(moment: datetime | None) -> datetime | None:
    """Return when a new key expires.

    Raises
    ------
    InvalidRequest
        It would be refused from the start.
    """
    if moment is not None and moment <= datetime.now(UTC):
        raise wrong_value("expires_at", "a moment to come", moment.isoformat())
    return moment


def _tag(key: ApiKey) -> str:
    """Return what changes with whatever can be changed about a key, and with nothing else."""
    content = [key.key_hash, dict(key.limits), dict(key.permissions), key.revoked_at]
    return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()[:12]
