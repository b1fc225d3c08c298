"""Imports the configured policies and router into the database at each start.

An administrator's edit stays active over restarts until the configuration's own text of that
policy (or its router) changes; then the configuration wins again, and the edit remains a stored version.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from classifier.types import Router
from gateway.config.policy_body import edited_mark, to_body
from gateway.control.control_state import NO_ROUTER, router_key
from gateway.control.control_writer import ControlWriter
from gateway.control.router_set import describe
from gateway.store.control_records import RouterVersion
from gateway.store.records import PolicyVersion
from policies.policy import Policy

if TYPE_CHECKING:
    from gateway.config.settings import Settings


async def import_configuration(writer: ControlWriter, settings: Settings, router: Router | None) -> None:
    """Store the configured policies and router, and activate what changed since the last import.

    Raises
    ------
    StoreUnavailable and its kinds
    """
    now = datetime.now(UTC)
    entry, content = _router_entry(settings.router.artifact, router, now)
    version = router_key(None if router is None else router.version)
    await writer.apply_configuration(_policies(settings.policies, now), (version, entry, content))


def _policies(policies: Mapping[str, Policy], now: datetime) -> dict[str, tuple[PolicyVersion, str]]:
    return {
        name: (
            PolicyVersion(name=name, version=each.version, created_at=now, body=to_body(each), author="config"),
            edited_mark(each),
        )
        for name, each in policies.items()
    }


def _router_entry(artifact: str, router: Router | None, now: datetime) -> tuple[RouterVersion | None, bytes]:
    """Return the configured router for the store; one that was handed over in memory has no file, and is not kept."""
    if router is None or getattr(router, "artifact", None) is None or artifact == NO_ROUTER:
        return None, b""
    from classifier.router import BUILTIN

    path = BUILTIN if artifact == "builtin" else Path(artifact)
    origin = "builtin" if artifact == "builtin" else "config"
    entry = RouterVersion(version=router.version, created_at=now, card=describe(router), origin=origin)
    return entry, path.read_bytes()
