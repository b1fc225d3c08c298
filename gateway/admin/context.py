"""Gathers the parts of the running server that the administration works on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from gateway.control.control_plane import ControlPlane
from gateway.control.control_state import ControlState
from gateway.models.catalog import Catalog
from gateway.store.admin_queries import AdminQueries
from gateway.store.admin_writes import AdminWrites
from gateway.store.store import Store

if TYPE_CHECKING:
    from gateway.config.settings import Settings


class MonitorReports(Protocol):
    """Reports on floor and drift."""

    async def floor_report(self) -> Mapping[str, Any]: ...

    async def drift_report(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class AdminContext:
    """Holds parts of the server. ``forget_key`` drops what is remembered of a key that was made or changed here."""

    settings: Settings
    store: Store
    queries: AdminQueries
    writes: AdminWrites
    catalog: Catalog
    plane: ControlPlane
    forget_key: Callable[[str], None]
    monitor: MonitorReports | None = None

    async def state(self) -> ControlState:
        """Return the active state, read now: this server's own knowledge may be half a second old."""
        return ControlState.decode(await self.plane.store.rows())
