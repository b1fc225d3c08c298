"""The administration as a whole: its pages, their paths, and what they stand on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.access.authenticator import Authenticator
from gateway.admin.access import AdminGate
from gateway.admin.endpoint import AdminEndpoint, Limits
from gateway.admin.keys import KeyPages
from gateway.admin.operation import Operation, Pages
from gateway.admin.policies import PolicyPages
from gateway.admin.reports import ReportPages
from gateway.admin.requests import RequestPages
from gateway.admin.retraining import RetrainPages
from gateway.admin.rooms import Monitor, Rooms
from gateway.admin.routers import RouterPages
from gateway.admin.steering import SteeringPages
from gateway.admin.trying import TrialPages
from gateway.admin.usage import UsagePages
from gateway.control.control_plane import ControlPlane
from gateway.models.catalog import Catalog
from gateway.store.admin_queries import AdminQueries
from gateway.store.admin_writes import AdminWrites
from gateway.store.store import Store

if TYPE_CHECKING:
    from gateway.config.settings import Settings

PREFIX = "/admin/v1"
_PAGES: tuple[type[Pages], ...] = (
    SteeringPages,
    PolicyPages,
    RouterPages,
    RetrainPages,
    RequestPages,
    UsagePages,
    TrialPages,
    ReportPages,
    KeyPages,
)


class AdminRoom:
    """All operations, and the routes that lead to them.

    Attributes
    ----------
    operations : in the order in which they are described
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        catalog: Catalog,
        plane: ControlPlane,
        authenticator: Authenticator,
        monitor: Monitor | None = None,
    ) -> None:
        queries, writes = AdminQueries(store), AdminWrites(store)
        rooms = Rooms(settings, store, queries, writes, catalog, plane, authenticator.forget, monitor)
        self.operations: list[Operation] = [each for pages in _PAGES for each in pages(rooms).operations()]
        self._gate = AdminGate(authenticator, queries)
        self._log = writes
        self._limits = Limits(settings.admin.max_body_bytes, settings.server.slow_client_timeout_s)

    def routes(self) -> list[Route]:
        """One route a path; a word goes before a name that could be that word."""
        by_path: dict[str, dict[str, AdminEndpoint]] = {}
        for operation in self.operations:
            endpoint = AdminEndpoint(operation, self._gate, self._log, self._limits)
            by_path.setdefault(operation.path, {})[operation.method] = endpoint
        paths = sorted(by_path, key=lambda path: [part.startswith("{") for part in path.split("/")])
        return [Route(PREFIX + path, _by_method(by_path[path]), methods=list(by_path[path])) for path in paths]


def _by_method(endpoints: Mapping[str, AdminEndpoint]) -> Callable[[Request], object]:
    async def answer(request: Request) -> Response:
        return await endpoints["GET" if request.method == "HEAD" else request.method](request)

    return answer
