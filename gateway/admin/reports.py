"""What was checked, certified, evaluated, alerted and done: the reading side of the loop."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from gateway.admin import schemas
from gateway.admin.endpoint import audited
from gateway.admin.operation import Asked, Field, Fields, Operation, Reply
from gateway.admin.paging import PAGING, page_reply
from gateway.admin.rooms import Monitor, Rooms
from gateway.admin.views import alert_view, moment, plain, usd_of_nano
from gateway.api import fields
from gateway.control.errors import Conflict
from gateway.errors import NotFound, NotHere
from gateway.store.admin_writes import Edit
from gateway.store.control_records import Alert

_NAME = fields.string(256, min_chars=1)
_CHECKS: Fields = {
    "request_id": Field(_NAME, "Of this request."),
    "status": Field(_NAME, "`queued`, `running`, `done`, `failed` or `expired`."),
    "direction": Field(fields.one_of("up", "down"), "`up`: a cheap answer against the top tier; `down`: the reverse."),
    "tier": Field(fields.integer(1, 1000), "Answers of this tier."),
    "tenant": Field(_NAME, "Of this tenant."),
    "domain": Field(_NAME, "About this."),
    "policy_name": Field(_NAME, "Decided by this policy."),
    "router_version": Field(_NAME, "Estimated by this router."),
    "verdict": Field(fields.integer(0, 1), "1: good enough; 0: not."),
    **PAGING,
}
_ALERT = schemas.shape(id=schemas.TEXT, kind=schemas.TEXT, severity=schemas.TEXT, subject=schemas.TEXT)
_EVALUATION = schemas.shape(
    evaluation_id=schemas.TEXT, kind=schemas.TEXT, subject=schemas.TEXT, body=schemas.ANY_OBJECT
)
_AUDIT = schemas.shape(
    audit_id=schemas.TEXT, created_at=schemas.MOMENT, action=schemas.TEXT, subject=schemas.TEXT, status=schemas.COUNT
)


class ReportPages:
    """Checks, certificates, evaluations, alerts and the audit log over HTTP."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms

    def operations(self) -> list[Operation]:
        return [
            Operation(
                method="GET",
                path="/verifications",
                name="list_verifications",
                summary="Checked answers and those that wait to be, newest first.",
                handler=self.verifications,
                returns=schemas.page(schemas.shape(verification_id=schemas.TEXT, status=schemas.TEXT)),
                query=_CHECKS,
            ),
            Operation(
                method="GET",
                path="/reports/floor",
                name="report_floor",
                summary="Whether each policy's floor is held, with the certificate's numbers.",
                handler=self.floor,
                returns=schemas.ANY_OBJECT,
            ),
            Operation(
                method="GET",
                path="/reports/drift",
                name="report_drift",
                summary="Whether the rate of needed upgrades has risen, for policies, domains and tenants.",
                handler=self.drift,
                returns=schemas.ANY_OBJECT,
            ),
            Operation(
                method="GET",
                path="/reports/verification",
                name="report_verification",
                summary="What checking costs, against what serving costs and what it may cost.",
                handler=self.verification,
                returns=schemas.shape(
                    serving_cost_usd=schemas.USD,
                    verification_cost_usd=schemas.USD,
                    share=schemas.optional(schemas.NUMBER),
                    max_share=schemas.NUMBER,
                    checks=schemas.ANY_OBJECT,
                ),
                query={
                    "since": Field(fields.moment, "Of requests accepted at or after this moment."),
                    "until": Field(fields.moment, "Of requests accepted before this moment."),
                },
            ),
            Operation(
                method="GET",
                path="/evaluations",
                name="list_evaluations",
                summary="Estimates of what routers and policies would have earned, newest first.",
                handler=self.evaluations,
                returns=schemas.page(_EVALUATION),
                query={
                    "kind": Field(_NAME, "`offpolicy`, `whatif`, `floor` or `bench`."),
                    "subject": Field(_NAME, "What was judged."),
                    **PAGING,
                },
            ),
            Operation(
                method="GET",
                path="/evaluations/{evaluation_id}",
                name="get_evaluation",
                summary="One evaluation.",
                handler=self.evaluation,
                returns=_EVALUATION,
                errors=(NotFound,),
            ),
            Operation(
                method="GET",
                path="/alerts",
                name="list_alerts",
                summary="What a person should look at, newest first.",
                handler=self.alerts,
                returns=schemas.page(_ALERT),
                query={
                    "open": Field(fields.boolean, "Only those nobody has resolved.", False),
                    "kind": Field(_NAME, "`floor`, `drift`, `tenant`, `budget`, `rollout` or `worker`."),
                    **PAGING,
                },
            ),
            Operation(
                method="POST",
                path="/alerts/{alert_id}/resolve",
                name="resolve_alert",
                summary="Say that an alert was looked at. It is raised anew when its cause comes back.",
                handler=self.resolve,
                returns=_ALERT,
                errors=(NotFound, Conflict),
            ),
            Operation(
                method="GET",
                path="/audit",
                name="list_audit",
                summary="Every administrative change, and every one that was refused, newest first.",
                handler=self.audit,
                returns=schemas.page(_AUDIT),
                query={
                    "action": Field(_NAME, "The operation's name."),
                    "key_id": Field(_NAME, "By the holder of this key."),
                    **PAGING,
                },
            ),
        ]

    async def verifications(self, asked: Asked) -> Reply:
        equal = {name: asked.query[name] for name in _CHECKS if name not in PAGING}
        rows = await self._rooms.queries.verifications(equal, **_page(asked))
        return page_reply([plain(row) for row in rows], asked, "verification_id")

    async def floor(self, asked: Asked) -> Reply:
        return Reply(await self._monitor().floor_report())

    async def drift(self, asked: Asked) -> Reply:
        return Reply(await self._monitor().drift_report())

    async def verification(self, asked: Asked) -> Reply:
        window = asked.query["since"], asked.query["until"]
        queries = self._rooms.queries
        served, checked = await queries.serving_cost(*window), await queries.verification_cost(*window)
        config = self._rooms.settings.verification
        return Reply(
            {
                "object": "suffice.verification_report",
                "since": moment(window[0]),
                "until": moment(window[1]),
                "serving_cost_usd": usd_of_nano(served),
                "verification_cost_usd": usd_of_nano(checked),
                "share": checked / served if served else None,
                "max_share": config.max_cost_share,
                "checks": await queries.checks_by_status(*window),
            }
        )

    async def evaluations(self, asked: Asked) -> Reply:
        equal = {"kind": asked.query["kind"], "subject": asked.query["subject"]}
        rows = await self._rooms.queries.evaluations(equal, **_page(asked))
        return page_reply([plain(row) for row in rows], asked, "evaluation_id")

    async def evaluation(self, asked: Asked) -> Reply:
        found = await self._rooms.queries.evaluation(asked.path["evaluation_id"])
        if found is None:
            raise NotFound("evaluation", asked.path["evaluation_id"])
        return Reply(plain(found))

    async def alerts(self, asked: Asked) -> Reply:
        found = await self._rooms.queries.alerts(
            only_open=asked.query["open"], kind=asked.query["kind"], **_page(asked)
        )
        return page_reply([alert_view(each) for each in found], asked)

    async def resolve(self, asked: Asked) -> Reply:
        alert_id, now = asked.path["alert_id"], datetime.now(UTC)

        def edit(alert: Alert) -> Edit:
            if alert.resolved_at is not None:
                raise Conflict(f"Alert {alert_id}", "an open one", "a resolved one")
            return {"resolved_at": now}, audited(asked, f"alert {alert_id}", {"resolved": False}, {"resolved": True})

        found = await self._rooms.writes.change_alert(alert_id, edit)
        if found is None:
            raise NotFound("alert", alert_id)
        return Reply(alert_view(found))

    async def audit(self, asked: Asked) -> Reply:
        equal = {"action": asked.query["action"], "key_id": asked.query["key_id"]}
        rows = await self._rooms.queries.audit(equal, **_page(asked))
        return page_reply([plain(row) for row in rows], asked, "audit_id")

    def _monitor(self) -> Monitor:
        if self._rooms.monitor is None:
            raise NotHere("This server runs without the monitor.")
        return self._rooms.monitor


def _page(asked: Asked) -> Mapping[str, Any]:
    return {"limit": asked.query["limit"] + 1, "before_id": asked.query["cursor"]}
