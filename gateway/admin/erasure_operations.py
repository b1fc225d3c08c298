"""Erases what the log holds of a tenant, a key, a conversation or a request."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from gateway.admin.common_shapes import Name
from gateway.admin.operation import AdminRequest, AdminResponse, AdminShape, OperationGroup, operation
from gateway.errors import InvalidRequest
from gateway.store.erasure import Eraser, ErasureTarget


class ErasureBody(AdminShape, frozen=True):
    """Whose rows: one of the fields; ``tenant`` may narrow ``session_id``."""

    tenant: Annotated[Name, Meta(description="Everything of this tenant.")] | None = None
    key_id: Annotated[Name, Meta(description="Everything made with this key.")] | None = None
    session_id: Annotated[Name, Meta(description="This conversation.")] | None = None
    request_id: Annotated[Name, Meta(description="This request, by its bare id.")] | None = None


class ErasureView(Struct):
    """What was deleted, by table; ``is_scrubbed`` says whether the database's files hold it no more (SQLite)."""

    deleted: dict[str, int]
    is_scrubbed: bool


class ErasureOperations(OperationGroup):
    """Serves erasure over HTTP."""

    @operation("POST", "/erasures", returns=ErasureView)
    async def erase(self, request: AdminRequest, body: ErasureBody) -> AdminResponse:
        """Erase what every table holds of a tenant, a key, a conversation or a request. May be repeated."""
        target = ErasureTarget(
            tenant=body.tenant, key_id=body.key_id, session_id=body.session_id, request_id=body.request_id
        )
        if not target.is_sound:
            raise InvalidRequest(
                "Name one of 'tenant', 'key_id', 'session_id' (with or without 'tenant') and 'request_id'.",
                param="tenant",
            )
        store = self._context.store
        request.trail.subject = target.subject(store)
        deleted = await Eraser(store).erase(target)
        request.trail.after = {"deleted": deleted}
        return AdminResponse(ErasureView(deleted=deleted, is_scrubbed=await store.scrub()))
