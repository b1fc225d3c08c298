"""Routers from the database, made ready before they are used."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from pathlib import Path

from classifier.types import Router
from gateway.control.control_state import NO_ROUTER, router_key
from gateway.control.errors import RouterRefused
from gateway.control.router_set import RouterSet, RouterSlot
from gateway.models.loader import complete_policies
from gateway.models.predictor import Predictor
from gateway.store.control import ControlStore
from policies.errors import PolicyError
from policies.policy import Policy


class RouterLoader:
    """Gives routers by version, each loaded once.

    Parameters
    ----------
    store : where artifacts lie
    routers : makes the predictors
    num_tiers : that a router must estimate
    known : the router that came with the configuration, which need not be in the store
    encoders : the models that a router may have loaded, those of ``known`` apart
    """

    def __init__(
        self,
        store: ControlStore,
        routers: RouterSet,
        num_tiers: int,
        known: Router | None,
        encoders: Collection[str] = (),
    ) -> None:
        self._encoders = frozenset((*encoders, *_named_encoders(known)))
        self._store = store
        self._routers = routers
        self._num_tiers = num_tiers
        self._ready: dict[str, Predictor] = {NO_ROUTER: routers.make_predictor(None)}
        if known is not None:
            self._ready[known.version] = routers.serving.predictor

    async def slot(self, version: str | None, policies: Mapping[str, Policy]) -> RouterSlot:
        """Return the router of a version with the policies it completes; None for no router.

        Raises
        ------
        RouterRefused
            It is not there, is damaged, is not what its version says, or does not fit the ladder.
        StoreUnavailable and its kinds
        """
        name = router_key(version)
        predictor = self._ready.get(name)
        if predictor is None:
            predictor = self._ready[name] = await self._load(name)
        try:
            return RouterSlot(predictor, complete_policies(policies, predictor.router))
        except PolicyError as error:
            raise RouterRefused(name, str(error)) from error

    def forget_all_but(self, versions: Collection[str | None]) -> None:
        """Free the memory of routers that nothing names any more."""
        kept = {*versions, NO_ROUTER}
        self._ready = {name: each for name, each in self._ready.items() if name in kept}

    async def _load(self, version: str) -> Predictor:
        content = await self._store.router_bytes(version)
        if content is None:
            raise RouterRefused(version, "it is not in the database.")
        router = await asyncio.to_thread(read_router, version, content, self._encoders)
        if router.num_tiers != self._num_tiers:
            raise RouterRefused(version, f"it estimates {router.num_tiers} tiers, the ladder has {self._num_tiers}.")
        predictor = self._routers.make_predictor(router)
        await predictor.warm_up()
        return predictor


def _named_encoders(router: Router | None) -> tuple[str, ...]:
    """Return the model that a router of the configuration's has loaded, if any."""
    artifact = getattr(router, "artifact", None)
    return () if artifact is None else (str(artifact.metadata["embedding"]["model"]),)


def read_router(version: str, content: bytes, encoders: Collection[str] = ()) -> Router:
    """Bring an artifact's bytes to life; they are read as plain arrays and JSON, never as objects.

    ``encoders`` are the models that it may have loaded.

    Raises
    ------
    RouterRefused
        They are no router, not the one of this version, or name another model to be loaded.
    """
    from classifier.artifact import RouterArtifact
    from classifier.errors import ClassifierError
    from classifier.router import ArtifactRouter

    try:
        artifact = RouterArtifact.from_bytes(content, Path("its artifact"))
        router = ArtifactRouter(artifact, path="its artifact", encoders=encoders)
    except ClassifierError as error:
        raise RouterRefused(version, str(error)) from error
    if router.version != version:
        raise RouterRefused(version, f"its content is that of {router.version}.")
    return router
