"""One operation over HTTP: who asks, is it sound, do it, write down that it was done, answer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.access.authenticator import Caller
from gateway.admin.access import AdminGate
from gateway.admin.operation import Asked, Bytes, Operation, Reply, Trail
from gateway.control.audited_change import Audit
from gateway.control.control_state import ControlState
from gateway.control.errors import Conflict
from gateway.edge.body import parse_object, read_body
from gateway.edge.error_table import row_of
from gateway.edge.head import read_head
from gateway.edge.watchdog import Watchdog
from gateway.endpoints.pages import error_response
from gateway.errors import PreconditionFailed, PreconditionRequired
from gateway.ids import uuid7
from gateway.store.control_records import AuditEntry

_log = logging.getLogger("suffice.admin")

_MAX_DEPTH = 32
_MAX_TAG_CHARS = 256


class AuditLog(Protocol):
    """The part of the store that is needed here."""

    async def audit(self, entry: AuditEntry) -> None: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may be; ``max_body_bytes`` of JSON, and how long the next piece of a body may take."""

    max_body_bytes: int
    timeout_s: float


class AdminEndpoint:
    """An :class:`Operation` as a Starlette page."""

    def __init__(self, operation: Operation, gate: AdminGate, log: AuditLog, limits: Limits) -> None:
        self.operation = operation
        self._gate = gate
        self._log = log
        self._limits = limits

    async def __call__(self, request: Request) -> Response:
        request_id = uuid7()
        caller: Caller | None = None
        operation = self.operation
        trail = Trail(operation.name, request.url.path, operation.status, remote=_remote(request))
        try:
            head = read_head(request.scope["headers"])
            caller = await self._gate.check(head)
            trail.key_id = caller.key_id
            asked = await self._read(request, head.content_length, caller, trail)
            reply = await self._do(asked)
        except Exception as error:
            if caller is not None and self.operation.is_write:
                await self._note_failure(trail, error)
            if row_of(error).log_level >= logging.ERROR:
                _log.error("%s failed (%s)", self.operation.name, request_id, exc_info=error)
            return error_response(error, request_id)
        if self.operation.is_write:
            _log.info("%s %s by %s", self.operation.name, trail.subject, asked.by)
        return _response(reply, request_id)

    async def _read(self, request: Request, content_length: int | None, caller: Caller, trail: Trail) -> Asked:
        operation = self.operation
        asked_body: dict[str, Any] = {}
        raw = b""
        if operation.body is not None:
            is_json = not isinstance(operation.body, Bytes)
            max_bytes = self._limits.max_body_bytes if is_json else operation.body.max_bytes  # type: ignore[union-attr]
            timeout_s = self._limits.timeout_s
            watchdog = Watchdog(request.receive, timeout_s=timeout_s, stall_timeout_s=timeout_s)
            try:
                raw = await read_body(request.receive, content_length, max_bytes, watchdog)
            finally:
                watchdog.close()
            if is_json:
                # A body in which everything is optional may be left out.
                given = parse_object(raw or b"{}", _MAX_DEPTH)
                asked_body, raw = dict(operation.read_body(given)), b""
        return Asked(
            by=caller.key_id or "anonymous",
            path=request.path_params,
            query=operation.read_query(request.query_params.multi_items()),
            body=asked_body,
            raw=raw,
            if_match=self._tag(request),
            trail=trail,
            is_gone=request.is_disconnected,
        )

    def _tag(self, request: Request) -> str | None:
        """What a conditional change rests on.

        Raises
        ------
        PreconditionRequired
        """
        if self.operation.conditional == "no":
            return None
        if request.headers.get("if-none-match", "").strip() == "*":
            return ""
        written = request.headers.get("if-match", "").strip()
        if not written and self.operation.conditional == "must":
            raise PreconditionRequired(
                "Say which version the change rests on: If-Match with the ETag you read, or If-None-Match: * to create."
            )
        tag = written.removeprefix("W/").strip('"')[:_MAX_TAG_CHARS]
        return tag or None

    async def _do(self, asked: Asked) -> Reply:
        try:
            reply = await self.operation.handler(asked)
        except Conflict as conflict:
            if asked.if_match is not None:
                raise PreconditionFailed(str(conflict)) from conflict
            raise
        if self.operation.is_write and not asked.trail.is_written:
            await self._log.audit(entry(asked.trail, reply.status))
        return reply

    async def _note_failure(self, trail: Trail, error: Exception) -> None:
        """A change that was tried is written down too; a database that cannot take it has failed the change already."""
        trail.before = trail.after = None
        try:
            await self._log.audit(entry(trail, row_of(error).status))
        except Exception as problem:
            _log.warning("%s: the audit log does not take it: %s", trail.action, problem)


def entry(trail: Trail, status: int) -> AuditEntry:
    """A trail as a row of the audit log."""
    return AuditEntry(
        audit_id=uuid7(),
        created_at=datetime.now(UTC),
        action=trail.action,
        subject=trail.subject,
        key_id=trail.key_id,
        before=trail.before,
        after=trail.after,
        status=status,
        remote=trail.remote,
    )


def audited(asked: Asked, subject: str, before: Any = None, after: Any = None) -> AuditEntry:
    """The audit entry that a change carries in its own transaction."""
    trail = asked.trail
    trail.subject, trail.before, trail.after = subject, before, after
    trail.is_written = True
    return entry(trail, trail.status)


def auditing(asked: Asked, subject: str, before: Callable[[ControlState], Any], after: Any) -> Audit:
    """The audit entry of a change of what is in force, to be made from the state that the change finds."""
    asked.trail.subject = subject
    return lambda state: audited(asked, subject, before(state), after)


def _response(reply: Reply, request_id: str) -> Response:
    headers = {"x-suffice-request-id": request_id, "cache-control": "no-store"}
    if reply.etag is not None:
        headers["etag"] = f'"{reply.etag}"'
    content = b"" if reply.status == 204 else orjson.dumps(reply.value, option=orjson.OPT_NON_STR_KEYS)
    return Response(content, reply.status, headers, None if reply.status == 204 else "application/json")


def _remote(request: Request) -> str:
    return request.client.host if request.client is not None else ""
