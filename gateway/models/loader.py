"""Turns settings into what serves: backends, router, the policies the router completes. Model libraries load here."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from backends.protocol import Backend
from classifier.types import Router
from policies.derived_numbers import apply_derived
from policies.ladder import Ladder
from policies.policy import Policy

if TYPE_CHECKING:
    from gateway.config.settings import Settings

_log = logging.getLogger("suffice.loading")

Progress = Callable[[str, str], None]
"""Told (served model's name, ``loading`` or ``ready``)."""


def make_backends(settings: Settings) -> dict[str, Backend]:
    """The served models by name, not started."""
    from backends.registry import build_backends

    return dict(build_backends(settings.models, devices=settings.devices, api_keys=settings.api_keys))


async def start_backends(backends: Mapping[str, Backend], progress: Progress) -> None:
    """Start all, one after another: loading is bound by memory and disk, and a drafter must be there before its target.

    Raises
    ------
    BackendError
        One cannot be started; those already started are closed.
    """
    started: list[Backend] = []
    try:
        for name, backend in backends.items():
            progress(name, "loading")
            started.append(backend)
            await backend.start()
            progress(name, "ready")
    except BaseException:
        await close_backends(started)
        raise


async def close_backends(backends: list[Backend]) -> None:
    """Close all; one that fails to does not keep the others open."""
    for result in await asyncio.gather(*(each.close() for each in backends), return_exceptions=True):
        if isinstance(result, Exception):
            _log.error("a model did not close: %s", result, exc_info=result)


def load_router(settings: Settings) -> Router | None:
    """The router the settings name.

    Raises
    ------
    ArtifactError, EmbeddingError
        It cannot be used, or estimates another number of tiers than the ladder has.
    """
    artifact = settings.router.artifact
    if artifact == "none":
        return None
    from classifier.errors import ArtifactUnsupported
    from classifier.router import BUILTIN, ArtifactRouter

    path = BUILTIN if artifact == "builtin" else artifact
    router = ArtifactRouter.load(path)
    if router.num_tiers != len(settings.ladder):
        raise ArtifactUnsupported(path, f"estimates {router.num_tiers} tiers; the ladder has {len(settings.ladder)}.")
    return router


def fit_ladder(ladder: Ladder, backends: Mapping[str, Backend]) -> Ladder:
    """The tiers with the contexts of the models that were really loaded."""
    fitted = []
    for tier in ladder:
        lengths = [
            length for length in (tier.context_length, backends[tier.model].context_length) if length is not None
        ]
        fitted.append(dataclasses.replace(tier, context_length=min(lengths, default=None)))
    return tuple(fitted)


def complete_policies(policies: Mapping[str, Policy], router: Router | None) -> dict[str, Policy]:
    """Fill what the policies leave open with what was derived together with the router.

    The log names policy and router version, and both together say what was active.
    """
    derived: Mapping[str, Any] = getattr(router, "decision", {})
    if not derived:
        return dict(policies)
    return {name: apply_derived(policy, derived) for name, policy in policies.items()}
