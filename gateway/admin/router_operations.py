"""Lists routers with their cards, takes uploads, rolls routers out and back."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from classifier.types import Router
from gateway.admin.common_shapes import ReasonBody
from gateway.admin.listing import Listing
from gateway.admin.operation import AdminRequest, AdminResponse, AdminShape, OperationGroup, operation
from gateway.admin.record_views import Json, RolloutView, RouterView
from gateway.control.control_state import ROUTER, ControlState
from gateway.control.errors import Conflict, RouterRefused, UnknownVersion
from gateway.control.router_set import describe
from gateway.errors import BodyTooLarge, NotFound
from gateway.store.control_records import RouterVersion


class ServingView(Struct, kw_only=True):
    """The serving router, the canary, and those that served before, newest first."""

    active: str | None
    canary: Json | None
    previous: list[str]


class RouterListing(Listing[RouterView], kw_only=True):
    """Every router, and which one serves."""

    serving: Json


class UploadQuery(AdminShape, frozen=True):
    """The words that an artifact is kept with."""

    note: Annotated[str, Meta(max_length=500, description="What it is.")] = ""


class RouterOperations(OperationGroup):
    """Serves routers over HTTP."""

    @operation("GET", "/routers", returns=RouterListing)
    async def list_routers(self, request: AdminRequest) -> AdminResponse:
        """List every router there was, newest first, and which one serves."""
        state = await self._context.state()
        data = [RouterView.of(each) for each in await self._context.plane.store.list_routers(500)]
        return AdminResponse(RouterListing(data=data, serving=state.router.as_dict()), etag=_tag(state))

    @operation("POST", "/routers", returns=RouterView, status=201, errors=(RouterRefused, BodyTooLarge))
    async def upload_router(self, request: AdminRequest, query: UploadQuery, body: bytes) -> AdminResponse:
        """Keep a router's artifact as a candidate. It is read as arrays and JSON, never as objects."""
        router = await asyncio.to_thread(open_artifact, body, (self._context.settings.learning.encoder,))
        ladder = self._context.catalog.ladder
        if router.num_tiers != len(ladder):
            raise RouterRefused(router.version, f"it estimates {router.num_tiers} tiers, the ladder has {len(ladder)}.")
        entry = RouterVersion(
            version=router.version, created_at=datetime.now(UTC), card=describe(router), note=query.note
        )
        audit = request.auditing(f"router {router.version}", lambda _: None, {"num_bytes": len(body)})
        await self._context.plane.writer.routers.add(entry, body, by=request.by, audit=audit)
        return AdminResponse(RouterView.of(await self._router(router.version)))

    @operation("GET", "/routers/{version}", returns=RouterView, errors=(NotFound,))
    async def get_router(self, request: AdminRequest, version: str) -> AdminResponse:
        """Show a router's card and where it stands."""
        return AdminResponse(RouterView.of(await self._router(version)))

    @operation("POST", "/routers/{version}/promote", returns=ServingView, errors=(UnknownVersion,), conditional="may")
    async def promote_router(self, request: AdminRequest, version: str, body: ReasonBody) -> AdminResponse:
        """Let a router serve everything at once, without a rollout."""
        await self._context.plane.writer.routers.promote(
            version, audit=request.auditing(f"router {version}", _serving, {"active": version}), **_basis(request, body)
        )
        return await self._now()

    @operation(
        "POST",
        "/routers/{version}/shadow",
        returns=RolloutView,
        status=202,
        errors=(UnknownVersion, Conflict),
        conditional="may",
    )
    async def shadow_router(self, request: AdminRequest, version: str, body: ReasonBody) -> AdminResponse:
        """Begin a router's rollout: in shadow first, then by shares of sticky keys."""
        rollout_id = await self._context.plane.writer.routers.start_rollout(
            version, audit=request.auditing(f"router {version}", _serving, {"shadow": version}), **_basis(request, body)
        )
        rollout = await self._context.plane.store.get_rollout(rollout_id)
        assert rollout is not None, "just begun"
        return AdminResponse(RolloutView.of(rollout))

    @operation("POST", "/routers/rollback", returns=ServingView, errors=(Conflict,), conditional="may")
    async def roll_back_router(self, request: AdminRequest, body: ReasonBody) -> AdminResponse:
        """End the rollout under way; without one, serve by the router before this one."""
        audit = request.auditing("router", _serving, None)
        await self._context.plane.writer.routers.roll_back(audit=audit, **_basis(request, body))
        return await self._now()

    @operation("GET", "/rollouts", returns=Listing[RolloutView])
    async def list_rollouts(self, request: AdminRequest) -> AdminResponse:
        """List rollouts, newest first, with what happened in each."""
        found = await self._context.plane.store.list_rollouts()
        return AdminResponse(Listing(data=[RolloutView.of(each) for each in found]))

    @operation("GET", "/rollouts/{rollout_id}", returns=RolloutView, errors=(NotFound,))
    async def get_rollout(self, request: AdminRequest, rollout_id: str) -> AdminResponse:
        """Show one rollout."""
        found = await self._context.plane.store.get_rollout(rollout_id)
        if found is None:
            raise NotFound("rollout", rollout_id)
        return AdminResponse(RolloutView.of(found))

    async def _router(self, version: str) -> RouterVersion:
        found = await self._context.plane.store.get_router(version)
        if found is None:
            raise NotFound("router", version)
        return found

    async def _now(self) -> AdminResponse:
        state = await self._context.state()
        return AdminResponse(state.router.as_dict(), etag=_tag(state))


def open_artifact(content: bytes, encoders: Collection[str]) -> Router:
    """Load an uploaded artifact, which may name no other models to be loaded than ``encoders``.

    Raises
    ------
    RouterRefused
        It is no router, is damaged, would unpack to far more than a router is, or names another model.
    """
    from classifier.errors import ClassifierError
    from classifier.router import ArtifactRouter

    with tempfile.TemporaryDirectory(prefix="suffice-upload-") as folder:
        path = Path(folder) / "router.npz"
        path.write_bytes(content)
        try:
            return ArtifactRouter.load(path, encoders=encoders)
        except ClassifierError as error:
            raise RouterRefused("upload", str(error).replace(str(path), "the artifact")) from error


def row_version(tag: str | None) -> int | None:
    """Return the version of a control row that an entity tag names; one that is no number matches nothing."""
    if tag is None:
        return None
    return int(tag) if tag.isascii() and tag.isdecimal() and len(tag) < 18 else -1


def _basis(request: AdminRequest, body: ReasonBody) -> dict[str, Any]:
    """Return who changes the routers, why, and what the change rests on."""
    return {"by": request.by, "reason": body.reason, "expected_version": row_version(request.if_match)}


def _serving(state: ControlState) -> Json:
    return state.router.as_dict()


def _tag(state: ControlState) -> str:
    return str(state.versions.get(ROUTER, 0))
