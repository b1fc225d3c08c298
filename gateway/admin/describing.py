"""The description of a server that is not running: of what its settings would serve."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gateway.access.authenticator import Authenticator
from gateway.admin.openapi import document
from gateway.admin.room import AdminRoom
from gateway.api.generation_body import BodyLimits
from gateway.control.control_plane import ControlPlane
from gateway.control.router_set import RouterSet
from gateway.models.catalog import Catalog
from gateway.store.store import Store

if TYPE_CHECKING:
    from gateway.config.settings import Settings


@dataclass(slots=True)
class _Switches:
    kill_switch: bool = False
    quarantine: Mapping[tuple[str, str], Mapping[int, float]] = field(default_factory=dict)
    group_quarantine: Mapping[tuple[str, str], Mapping[str, Mapping[int, float]]] = field(default_factory=dict)


def unopened_room(settings: Settings) -> AdminRoom:
    """The administration with nothing open behind it: its operations can be read, not called."""
    store = Store(settings.database)
    catalog = Catalog(settings.ladder, settings.policy, settings.policies, {})
    routers = RouterSet(None, timeout_s=settings.router.timeout_s)
    plane = ControlPlane(settings, store, catalog, routers, _Switches(), random.Random(0))
    return AdminRoom(settings, store, catalog, plane, Authenticator(settings.auth, settings.server.host, store))


def describe_settings(settings: Settings) -> dict[str, Any]:
    """The OpenAPI document of a server with these settings."""
    numbers = {tier.name: tier.index for tier in settings.ladder}
    limits = BodyLimits(settings.server, numbers | {f"tier-{tier.index}": tier.index for tier in settings.ladder})
    operations = unopened_room(settings).operations if settings.admin.enabled else []
    return document(limits, operations, with_metrics=settings.metrics.enabled)
