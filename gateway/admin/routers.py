"""Routers: listed with their cards, uploaded, brought to traffic, taken back."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from classifier.types import Router
from gateway.admin import schemas
from gateway.admin.endpoint import auditing
from gateway.admin.operation import Asked, Bytes, Field, Operation, Reply
from gateway.admin.rooms import Rooms
from gateway.admin.views import rollout_view, router_view
from gateway.api import fields
from gateway.control.control_state import ROUTER, ControlState
from gateway.control.errors import Conflict, RouterRefused, UnknownVersion
from gateway.control.router_set import describe
from gateway.errors import BodyTooLarge, NotFound
from gateway.store.control_records import RouterVersion

_ROUTER = schemas.shape(version=schemas.TEXT, status=schemas.TEXT, origin=schemas.TEXT, card=schemas.ANY_OBJECT)
_SERVING = schemas.shape(
    active=schemas.optional(schemas.TEXT), canary=schemas.optional(schemas.ANY_OBJECT), previous=schemas.array({})
)
_ROLLOUT = schemas.shape(id=schemas.TEXT, router_version=schemas.TEXT, status=schemas.TEXT, stage=schemas.TEXT)
_REASON = Field(fields.string(500), "Why, for the history.", "")


class RouterPages:
    """Routers over HTTP."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms

    def operations(self) -> list[Operation]:
        return [
            Operation(
                method="GET",
                path="/routers",
                name="list_routers",
                summary="Every router there was, newest first, and which one serves.",
                handler=self.list,
                returns=schemas.listing(_ROUTER),
            ),
            Operation(
                method="POST",
                path="/routers",
                name="upload_router",
                summary="Keep a router's artifact as a candidate. It is read as arrays and JSON, never as objects.",
                handler=self.upload,
                returns=_ROUTER,
                status=201,
                body=Bytes(self._rooms.settings.admin.max_artifact_bytes),
                query={"note": Field(fields.string(500), "What it is.", "")},
                errors=(RouterRefused, BodyTooLarge),
            ),
            Operation(
                method="GET",
                path="/routers/{version}",
                name="get_router",
                summary="A router's card and where it stands.",
                handler=self.get,
                returns=_ROUTER,
                errors=(NotFound,),
            ),
            Operation(
                method="POST",
                path="/routers/{version}/promote",
                name="promote_router",
                summary="Let a router serve everything at once, without a rollout.",
                handler=self.promote,
                returns=_SERVING,
                body={"reason": _REASON},
                conditional="may",
                errors=(UnknownVersion,),
            ),
            Operation(
                method="POST",
                path="/routers/{version}/shadow",
                name="shadow_router",
                summary="Begin a router's rollout: in shadow first, then by shares of sticky keys.",
                handler=self.shadow,
                returns=_ROLLOUT,
                status=202,
                body={"reason": _REASON},
                conditional="may",
                errors=(UnknownVersion, Conflict),
            ),
            Operation(
                method="POST",
                path="/routers/rollback",
                name="roll_back_router",
                summary="End the rollout under way; without one, serve by the router before this one.",
                handler=self.roll_back,
                returns=_SERVING,
                body={"reason": _REASON},
                conditional="may",
                errors=(Conflict,),
            ),
            Operation(
                method="GET",
                path="/rollouts",
                name="list_rollouts",
                summary="Rollouts, newest first, with what happened in each.",
                handler=self.rollouts,
                returns=schemas.listing(_ROLLOUT),
            ),
            Operation(
                method="GET",
                path="/rollouts/{rollout_id}",
                name="get_rollout",
                summary="One rollout.",
                handler=self.rollout,
                returns=_ROLLOUT,
                errors=(NotFound,),
            ),
        ]

    async def list(self, asked: Asked) -> Reply:
        state = await self._rooms.state()
        data = [router_view(each) for each in await self._rooms.plane.store.list_routers(500)]
        return Reply({"object": "list", "data": data, "serving": state.router.as_dict()}, etag=_tag(state.versions))

    async def get(self, asked: Asked) -> Reply:
        return Reply(router_view(await self._router(asked.path["version"])))

    async def upload(self, asked: Asked) -> Reply:
        router = await asyncio.to_thread(open_artifact, asked.raw)
        ladder = self._rooms.catalog.ladder
        if router.num_tiers != len(ladder):
            raise RouterRefused(router.version, f"it estimates {router.num_tiers} tiers, the ladder has {len(ladder)}.")
        entry = RouterVersion(
            version=router.version, created_at=datetime.now(UTC), card=describe(router), note=asked.query["note"]
        )
        audit = auditing(asked, f"router {router.version}", lambda _: None, {"num_bytes": len(asked.raw)})
        await self._rooms.plane.writer.routers.add(entry, asked.raw, by=asked.by, audit=audit)
        return Reply(router_view(await self._router(router.version)), status=201)

    async def promote(self, asked: Asked) -> Reply:
        version = asked.path["version"]
        audit = auditing(asked, f"router {version}", _serving, {"active": version})
        await self._rooms.plane.writer.routers.promote(
            version,
            by=asked.by,
            reason=asked.body["reason"],
            expected_version=row_version(asked.if_match),
            audit=audit,
        )
        return await self._now()

    async def shadow(self, asked: Asked) -> Reply:
        version = asked.path["version"]
        audit = auditing(asked, f"router {version}", _serving, {"shadow": version})
        rollout_id = await self._rooms.plane.writer.routers.start_rollout(
            version,
            by=asked.by,
            reason=asked.body["reason"],
            expected_version=row_version(asked.if_match),
            audit=audit,
        )
        rollout = await self._rooms.plane.store.get_rollout(rollout_id)
        assert rollout is not None, "just begun"
        return Reply(rollout_view(rollout), status=202)

    async def roll_back(self, asked: Asked) -> Reply:
        audit = auditing(asked, "router", _serving, None)
        await self._rooms.plane.writer.routers.roll_back(
            by=asked.by, reason=asked.body["reason"], expected_version=row_version(asked.if_match), audit=audit
        )
        return await self._now()

    async def rollouts(self, asked: Asked) -> Reply:
        return Reply(
            {"object": "list", "data": [rollout_view(e) for e in await self._rooms.plane.store.list_rollouts()]}
        )

    async def rollout(self, asked: Asked) -> Reply:
        found = await self._rooms.plane.store.get_rollout(asked.path["rollout_id"])
        if found is None:
            raise NotFound("rollout", asked.path["rollout_id"])
        return Reply(rollout_view(found))

    # ---- inside

    async def _router(self, version: str) -> RouterVersion:
        found = await self._rooms.plane.store.get_router(version)
        if found is None:
            raise NotFound("router", version)
        return found

    async def _now(self) -> Reply:
        state = await self._rooms.state()
        return Reply(state.router.as_dict(), etag=_tag(state.versions))


def open_artifact(content: bytes) -> Router:
    """An uploaded artifact brought to life.

    Raises
    ------
    RouterRefused
        It is no router, is damaged, or would unpack to far more than a router is.
    """
    from classifier.errors import ClassifierError
    from classifier.router import ArtifactRouter

    with tempfile.TemporaryDirectory(prefix="suffice-upload-") as folder:
        path = Path(folder) / "router.npz"
        path.write_bytes(content)
        try:
            return ArtifactRouter.load(path)
        except ClassifierError as error:
            raise RouterRefused("upload", str(error).replace(str(path), "the artifact")) from error


def _serving(state: ControlState) -> dict[str, object]:
    return state.router.as_dict()


def row_version(tag: str | None) -> int | None:
    """The version of a control row that an entity tag names; one that is no number matches nothing."""
    if tag is None:
        return None
    return int(tag) if tag.isascii() and tag.isdecimal() and len(tag) < 18 else -1


def _tag(versions: Mapping[str, int]) -> str:
    return str(versions.get(ROUTER, 0))
