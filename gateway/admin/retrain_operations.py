"""Asks for retrainings and follows them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from gateway.admin.common_shapes import ReasonBody
from gateway.admin.listing import Page, PageCursor, PageLimit, page_bounds, page_response
from gateway.admin.operation import AdminRequest, AdminResponse, AdminShape, OperationGroup, operation
from gateway.admin.record_views import row_view
from gateway.errors import NotFound


class RetrainRunView(Struct):
    """A retraining: its stage, its progress, what became of it."""

    run_id: str
    status: str
    trigger: str
    progress: float


class RunQuery(AdminShape, frozen=True):
    """Which retrainings."""

    status: Annotated[str, Meta(max_length=32, description="Only those of this status.")] | None = None
    limit: PageLimit = 50
    cursor: PageCursor | None = None


class RetrainOperations(OperationGroup):
    """Serves retrainings over HTTP; they run on the leader, in an isolated process."""

    @operation("POST", "/router/retrain", returns=RetrainRunView, status=202)
    async def retrain_router(self, request: AdminRequest, body: ReasonBody) -> AdminResponse:
        """Ask for a new router from the log. A run that is asked for or under way already is told of."""
        run_id = await self._context.plane.writer.request_retrain(
            "admin",
            body.reason,
            audit=lambda run_id: request.audited(f"retrain {run_id}", None, {"reason": body.reason}),
        )
        return await self._run(run_id)

    @operation("GET", "/retrain-runs", returns=Page[RetrainRunView])
    async def list_retrain_runs(self, request: AdminRequest, query: RunQuery) -> AdminResponse:
        """List retrainings, newest first."""
        rows = await self._context.queries.retrain_runs({"status": query.status}, **page_bounds(query))
        return page_response([row_view(row) for row in rows], query, "run_id")

    @operation("GET", "/retrain-runs/{run_id}", returns=RetrainRunView, errors=(NotFound,))
    async def get_retrain_run(self, request: AdminRequest, run_id: str) -> AdminResponse:
        """Show one retraining: its stage, its progress, what became of it."""
        return await self._run(run_id)

    async def _run(self, run_id: str) -> AdminResponse:
        found = await self._context.queries.retrain_run(run_id)
        if found is None:
            raise NotFound("retraining", run_id)
        return AdminResponse(row_view(found))
