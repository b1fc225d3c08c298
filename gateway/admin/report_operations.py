"""Reports what was checked, certified, evaluated, alerted and done."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from msgspec import Meta, Struct

from gateway.admin.common_shapes import ByPolicy, ByRouter, Moment, Name, OfTenant, TierNumber
from gateway.admin.context import MonitorReports
from gateway.admin.listing import Page, PageCursor, PageLimit, page_bounds, page_response
from gateway.admin.operation import AdminRequest, AdminResponse, AdminShape, OperationGroup, operation
from gateway.admin.record_views import AlertView, Json, Timestamp, Usd, row_view, shown, usd_of_nano
from gateway.control.errors import Conflict
from gateway.errors import NotFound, NotHere
from gateway.store.admin_writes import Edit
from gateway.store.control_records import Alert


class CheckFilter(AdminShape, frozen=True):
    """Which checks."""

    request_id: Annotated[Name, Meta(description="Of this request.")] | None = None
    status: Annotated[Name, Meta(description="`queued`, `running`, `done`, `failed` or `expired`.")] | None = None
    direction: (
        Annotated[
            Literal["up", "down"],
            Meta(description="`up`: a cheap answer against the top tier; `down`: the reverse."),
        ]
        | None
    ) = None
    tier: Annotated[TierNumber, Meta(description="Answers of this tier.")] | None = None
    tenant: OfTenant | None = None
    domain: Annotated[Name, Meta(description="About this.")] | None = None
    policy_name: ByPolicy | None = None
    router_version: ByRouter | None = None
    verdict: Annotated[int, Meta(ge=0, le=1, description="1: good enough; 0: not.")] | None = None


class CheckQuery(CheckFilter, frozen=True):
    """Which checks, page by page."""

    limit: PageLimit = 50
    cursor: PageCursor | None = None


class WindowQuery(AdminShape, frozen=True):
    """Of which time."""

    since: Annotated[Moment, Meta(description="Of requests accepted at or after this moment.")] | None = None
    until: Annotated[Moment, Meta(description="Of requests accepted before this moment.")] | None = None


class EvaluationQuery(AdminShape, frozen=True):
    """Which evaluations."""

    kind: Annotated[Name, Meta(description="`offpolicy`, `whatif`, `floor` or `bench`.")] | None = None
    subject: Annotated[Name, Meta(description="What was judged.")] | None = None
    limit: PageLimit = 50
    cursor: PageCursor | None = None


class AlertQuery(AdminShape, frozen=True):
    """Which alerts."""

    open: Annotated[bool, Meta(description="Only those nobody has resolved.")] = False
    kind: Annotated[Name, Meta(description="`floor`, `drift`, `tenant`, `budget`, `rollout` or `worker`.")] | None = (
        None
    )
    limit: PageLimit = 50
    cursor: PageCursor | None = None


class AuditQuery(AdminShape, frozen=True):
    """Which entries of the audit log."""

    action: Annotated[Name, Meta(description="The operation's name.")] | None = None
    key_id: Annotated[Name, Meta(description="By the holder of this key.")] | None = None
    limit: PageLimit = 50
    cursor: PageCursor | None = None


class CheckView(Struct):
    """A check of an answer."""

    verification_id: str
    status: str


class VerificationCosts(Struct, kw_only=True):
    """The cost of checking, against that of serving; `checks` counts them by status."""

    object: Literal["suffice.verification_report"] = "suffice.verification_report"
    since: Timestamp | None
    until: Timestamp | None
    serving_cost_usd: Usd
    verification_cost_usd: Usd
    share: float | None
    max_share: float
    checks: Json


class EvaluationView(Struct):
    """An estimate of what a router or a policy would have earned."""

    evaluation_id: str
    kind: str
    subject: str
    body: Json


class AuditEntryView(Struct):
    """An administrative change, made or refused."""

    audit_id: str
    created_at: Timestamp
    action: str
    subject: str
    status: int


class ReportOperations(OperationGroup):
    """Serves checks, certificates, evaluations, alerts and the audit log over HTTP."""

    @operation("GET", "/verifications", returns=Page[CheckView])
    async def list_verifications(self, request: AdminRequest, query: CheckQuery) -> AdminResponse:
        """List checked answers and those that wait to be, newest first."""
        equal = {name: getattr(query, name) for name in CheckFilter.__struct_fields__}
        rows = await self._context.queries.verifications(equal, **page_bounds(query))
        return page_response([row_view(row) for row in rows], query, "verification_id")

    @operation("GET", "/reports/floor", returns=Json)
    async def report_floor(self, request: AdminRequest) -> AdminResponse:
        """Say whether each policy's floor is held, with the certificate's numbers."""
        return AdminResponse(await self._monitor().floor_report())

    @operation("GET", "/reports/drift", returns=Json)
    async def report_drift(self, request: AdminRequest) -> AdminResponse:
        """Say whether the rate of needed upgrades has risen, for policies, domains and tenants."""
        return AdminResponse(await self._monitor().drift_report())

    @operation("GET", "/reports/verification", returns=VerificationCosts)
    async def report_verification(self, request: AdminRequest, query: WindowQuery) -> AdminResponse:
        """Show what checking costs, against what serving costs and what it may cost."""
        window, queries = (query.since, query.until), self._context.queries
        served, checked = await queries.serving_cost(*window), await queries.verification_cost(*window)
        report = VerificationCosts(
            since=shown(query.since),
            until=shown(query.until),
            serving_cost_usd=usd_of_nano(served),
            verification_cost_usd=usd_of_nano(checked),
            share=checked / served if served else None,
            max_share=self._context.settings.verification.max_cost_share,
            checks=dict(await queries.checks_by_status(*window)),
        )
        return AdminResponse(report)

    @operation("GET", "/evaluations", returns=Page[EvaluationView])
    async def list_evaluations(self, request: AdminRequest, query: EvaluationQuery) -> AdminResponse:
        """List estimates of what routers and policies would have earned, newest first."""
        equal = {"kind": query.kind, "subject": query.subject}
        rows = await self._context.queries.evaluations(equal, **page_bounds(query))
        return page_response([row_view(row) for row in rows], query, "evaluation_id")

    @operation("GET", "/evaluations/{evaluation_id}", returns=EvaluationView, errors=(NotFound,))
    async def get_evaluation(self, request: AdminRequest, evaluation_id: str) -> AdminResponse:
        """Show one evaluation."""
        found = await self._context.queries.evaluation(evaluation_id)
        if found is None:
            raise NotFound("evaluation", evaluation_id)
        return AdminResponse(row_view(found))

    @operation("GET", "/alerts", returns=Page[AlertView])
    async def list_alerts(self, request: AdminRequest, query: AlertQuery) -> AdminResponse:
        """List what a person should look at, newest first."""
        found = await self._context.queries.alerts(only_open=query.open, kind=query.kind, **page_bounds(query))
        return page_response([AlertView.of(each) for each in found], query)

    @operation("POST", "/alerts/{alert_id}/resolve", returns=AlertView, errors=(NotFound, Conflict))
    async def resolve_alert(self, request: AdminRequest, alert_id: str) -> AdminResponse:
        """Say that an alert was looked at. It is raised anew when its cause comes back."""
        now = datetime.now(UTC)

        def edit(alert: Alert) -> Edit:
            if alert.resolved_at is not None:
                raise Conflict(f"Alert {alert_id}", "an open one", "a resolved one")
            entry = request.audited(f"alert {alert_id}", {"resolved": False}, {"resolved": True})
            return {"resolved_at": now}, entry

        found = await self._context.writes.change_alert(alert_id, edit)
        if found is None:
            raise NotFound("alert", alert_id)
        return AdminResponse(AlertView.of(found))

    @operation("GET", "/audit", returns=Page[AuditEntryView])
    async def list_audit(self, request: AdminRequest, query: AuditQuery) -> AdminResponse:
        """List every administrative change, every one that was refused and every reading of texts, newest first."""
        equal = {"action": query.action, "key_id": query.key_id}
        rows = await self._context.queries.audit(equal, **page_bounds(query))
        return page_response([row_view(row) for row in rows], query, "audit_id")

    def _monitor(self) -> MonitorReports:
        if self._context.monitor is None:
            raise NotHere("This server runs without the monitor.")
        return self._context.monitor
