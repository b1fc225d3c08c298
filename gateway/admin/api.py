"""Makes the routes of ``/admin/v1`` from the declared operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.access.authenticator import Authenticator
from gateway.admin.admin_authenticator import AdminAuthenticator
from gateway.admin.context import AdminContext, MonitorReports
from gateway.admin.control_operations import ControlOperations
from gateway.admin.endpoint import AdminEndpoint
from gateway.admin.erasure_operations import ErasureOperations
from gateway.admin.key_operations import KeyOperations
from gateway.admin.operation import Operation, OperationGroup
from gateway.admin.policy_operations import PolicyOperations
from gateway.admin.report_operations import ReportOperations
from gateway.admin.request_operations import RequestOperations
from gateway.admin.retrain_operations import RetrainOperations
from gateway.admin.router_operations import RouterOperations
from gateway.admin.trial_operations import TrialOperations
from gateway.admin.usage_operations import UsageOperations
from gateway.config.sections import AdminConfig
from gateway.control.control_plane import ControlPlane
from gateway.models.catalog import Catalog
from gateway.store.admin_queries import AdminQueries
from gateway.store.admin_writes import AdminWrites
from gateway.store.store import Store

if TYPE_CHECKING:
    from gateway.config.settings import Settings

PREFIX = "/admin/v1"
GROUPS: tuple[type[OperationGroup], ...] = (
    ControlOperations,
    PolicyOperations,
    RouterOperations,
    RetrainOperations,
    RequestOperations,
    UsageOperations,
    TrialOperations,
    ReportOperations,
    KeyOperations,
    ErasureOperations,
)


def admin_operations(config: AdminConfig, groups: tuple[type[OperationGroup], ...] = GROUPS) -> list[Operation]:
    """Return all operations in the order in which they are described.

    Raises
    ------
    ValueError
        Two have the same name, or the same method and path.
    """
    found = [each for group in groups for each in group.operations(config)]
    counts = Counter(key for each in found for key in (each.name, f"{each.method} {each.path}"))
    if twice := [key for key, count in counts.items() if count > 1]:
        raise ValueError(f"Declared twice: {', '.join(twice)}.")
    return found


def admin_routes(
    settings: Settings,
    store: Store,
    catalog: Catalog,
    plane: ControlPlane,
    authenticator: Authenticator,
    monitor: MonitorReports | None,
) -> Iterator[Route]:
    """Yield one route a path; a word goes before a name that could be that word."""
    queries, writes = AdminQueries(store), AdminWrites(store)
    context = AdminContext(settings, store, queries, writes, catalog, plane, authenticator.forget, monitor)
    administrators, timeout_s = AdminAuthenticator(authenticator, queries), settings.server.slow_client_timeout_s
    by_path: dict[str, dict[str, AdminEndpoint]] = {}
    for group in GROUPS:
        handlers = group(context)
        for operation in group.operations(settings.admin):
            handler = getattr(handlers, operation.name)
            endpoint = AdminEndpoint(operation, handler, administrators, writes, settings.admin, timeout_s)
            by_path.setdefault(operation.path, {})[operation.method] = endpoint
    for path in sorted(by_path, key=lambda path: [part.startswith("{") for part in path.split("/")]):
        yield Route(PREFIX + path, _by_method(by_path[path]), methods=list(by_path[path]))


def _by_method(endpoints: Mapping[str, AdminEndpoint]) -> Callable[[Request], object]:
    async def answer(request: Request) -> Response:
        return await endpoints["GET" if request.method == "HEAD" else request.method](request)

    return answer
