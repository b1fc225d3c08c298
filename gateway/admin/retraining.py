"""Retraining over HTTP: asked for, and followed."""

from __future__ import annotations

from gateway.admin import schemas
from gateway.admin.endpoint import audited
from gateway.admin.operation import Asked, Field, Operation, Reply
from gateway.admin.paging import PAGING, page_reply
from gateway.admin.rooms import Rooms
from gateway.admin.views import plain
from gateway.api import fields
from gateway.errors import NotFound
from gateway.store.control_records import AuditEntry

_RUN = schemas.shape(run_id=schemas.TEXT, status=schemas.TEXT, trigger=schemas.TEXT, progress=schemas.NUMBER)
_REASON = Field(fields.string(500), "Why, for the history.", "")


class RetrainPages:
    """Retrainings over HTTP; they run on the leader, in a process of their own."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms

    def operations(self) -> list[Operation]:
        return [
            Operation(
                method="POST",
                path="/router/retrain",
                name="retrain_router",
                summary="Ask for a new router from the log. A run that is asked for or under way already is told of.",
                handler=self.retrain,
                returns=schemas.shape(run_id=schemas.TEXT, status=schemas.TEXT),
                status=202,
                body={"reason": _REASON},
            ),
            Operation(
                method="GET",
                path="/retrain-runs",
                name="list_retrain_runs",
                summary="Retrainings, newest first.",
                handler=self.runs,
                returns=schemas.page(_RUN),
                query={"status": Field(fields.string(32), "Only those of this status."), **PAGING},
            ),
            Operation(
                method="GET",
                path="/retrain-runs/{run_id}",
                name="get_retrain_run",
                summary="One retraining: its stage, its progress, what became of it.",
                handler=self.run,
                returns=_RUN,
                errors=(NotFound,),
            ),
        ]

    async def retrain(self, asked: Asked) -> Reply:
        reason = asked.body["reason"]

        def audit(run_id: str) -> AuditEntry:
            return audited(asked, f"retrain {run_id}", None, {"reason": reason})

        run_id = await self._rooms.plane.writer.request_retrain("admin", reason, audit=audit)
        run = await self._rooms.queries.retrain_run(run_id)
        assert run is not None, "just written"
        return Reply(plain(run), status=202)

    async def runs(self, asked: Asked) -> Reply:
        query = asked.query
        rows = await self._rooms.queries.retrain_runs(
            {"status": query["status"]}, limit=query["limit"] + 1, before_id=query["cursor"]
        )
        return page_reply([plain(row) for row in rows], asked, "run_id")

    async def run(self, asked: Asked) -> Reply:
        found = await self._rooms.queries.retrain_run(asked.path["run_id"])
        if found is None:
            raise NotFound("retraining", asked.path["run_id"])
        return Reply(plain(found))
