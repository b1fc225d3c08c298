"""Answers one operation over HTTP: open the request, check it, do it, write down that it was done."""

from __future__ import annotations

import logging
from typing import Any, Protocol

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.access.authenticator import Caller
from gateway.admin.admin_authenticator import AdminAuthenticator
from gateway.admin.audit_trail import AuditTrail
from gateway.admin.nul_check import refuse_nul
from gateway.admin.operation import AdminRequest, AdminResponse, Handler, Operation
from gateway.config.sections import AdminConfig
from gateway.control.errors import Conflict
from gateway.edge.error_table import row_of
from gateway.edge.gate import Authenticate, Head, open_request
from gateway.edge.json_body import parse_object
from gateway.edge.watchdog import Watchdog
from gateway.endpoints.pages import error_response
from gateway.errors import PreconditionFailed, PreconditionRequired
from gateway.ids import uuid7
from gateway.store.control_records import AuditEntry

_log = logging.getLogger("suffice.admin")

# A router may be uploaded over a slow line: a body has the time of so many silences.
_STALLS_PER_UPLOAD = 20
_MAX_DEPTH = 32
# As JSON may hold it; a longer escape that ends so is looked at in vain.
_WRITTEN_NUL = b"\\u0000"
_MAX_TAG_CHARS = 256


class AuditLog(Protocol):
    """Stands for the part of the store that is needed here."""

    async def audit(self, entry: AuditEntry) -> None: ...


class AdminEndpoint:
    """Answers an :class:`Operation` as a Starlette page.

    Parameters
    ----------
    handler : does it
    authenticator : knows administrators
    log : keeps what was changed, and by whom
    config : limits of bodies
    timeout_s : longest wait for the next piece of a body
    """

    def __init__(
        self,
        operation: Operation,
        handler: Handler,
        authenticator: AdminAuthenticator,
        log: AuditLog,
        config: AdminConfig,
        timeout_s: float,
    ) -> None:
        self._operation = operation
        self._handler = handler
        self._authenticator = authenticator
        self._log = log
        json_bytes = config.max_body_bytes
        limits = {"none": None, "bytes": config.max_artifact_bytes, "free": json_bytes, "members": json_bytes}
        self._max_body_bytes = limits[operation.body_kind]
        self._timeout_s = timeout_s

    async def __call__(self, request: Request) -> Response:
        request_id, operation = uuid7(), self._operation
        remote = request.client.host if request.client is not None else ""
        trail = AuditTrail(operation.name, request.url.path, operation.status, remote)
        caller: Caller | None = None

        async def authenticate(head: Head) -> Caller:
            nonlocal caller
            caller = await self._authenticator.check(head, writes=operation.is_write)
            trail.key_id = caller.key_id
            return caller

        try:
            content = await self._open(request, authenticate)
            response = await self._do(request, content, trail)
        except Exception as error:
            # Only a known caller's attempts are written down: others could fill the log.
            if caller is not None and operation.is_write:
                await self._note_failure(trail, error)
            if row_of(error).log_level >= logging.ERROR:
                _log.error("%s failed (%s)", operation.name, request_id, exc_info=error)
            return error_response(error, request_id)
        if operation.is_write:
            _log.info("%s %s by %s", operation.name, trail.subject, _name(trail))
        headers = {"x-suffice-request-id": request_id, "cache-control": "no-store"}
        if response.etag is not None:
            headers["etag"] = f'"{response.etag}"'
        answer = orjson.dumps(response.value, default=msgspec.structs.asdict, option=orjson.OPT_NON_STR_KEYS)
        return Response(answer, operation.status, headers, "application/json")

    async def _open(self, request: Request, authenticate: Authenticate) -> bytes:
        """Return the body of a request whose caller is an administrator."""
        receive, max_bytes = request.receive, self._max_body_bytes
        longest_s = _STALLS_PER_UPLOAD * self._timeout_s
        watchdog = Watchdog(receive, timeout_s=longest_s, stall_timeout_s=self._timeout_s)
        try:
            opened = await open_request(
                request.scope, receive, authenticate, max_body_bytes=max_bytes, watchdog=watchdog
            )
        finally:
            watchdog.close()
        return opened.body

    async def _do(self, request: Request, content: bytes, trail: AuditTrail) -> AdminResponse:
        operation = self._operation
        arguments: dict[str, Any] = dict(request.path_params)
        refuse_nul(arguments, "")
        if operation.body_kind == "bytes":
            arguments["body"] = content
        elif operation.body is not None:
            # A body in which everything is optional may be left out.
            given = parse_object(content or b"{}", _MAX_DEPTH)
            if _WRITTEN_NUL in content:
                refuse_nul(given, "")
            arguments["body"] = operation.read_body(given)
        asked_for = request.query_params.multi_items()
        refuse_nul(dict(asked_for), "")
        query = operation.read_query(asked_for)
        if query is not None:
            arguments["query"] = query
        asked = AdminRequest(_name(trail), self._tag(request), trail, request.is_disconnected)
        try:
            response = await self._handler(asked, **arguments)
        except Conflict as conflict:
            if asked.if_match is not None:
                raise PreconditionFailed(str(conflict)) from conflict
            raise
        if trail.shows_texts or (operation.is_write and not trail.is_written):
            # Before the answer: what cannot be written down is not shown.
            await self._log.audit(trail.entry(operation.status))
        return response

    def _tag(self, request: Request) -> str | None:
        """Return what a conditional change rests on.

        Raises
        ------
        PreconditionRequired
        """
        if self._operation.conditional == "no":
            return None
        if request.headers.get("if-none-match", "").strip() == "*":
            return ""
        written = request.headers.get("if-match", "").strip()
        if not written and self._operation.conditional == "must":
            raise PreconditionRequired(
                "Say which version the change rests on: If-Match with the ETag you read, or If-None-Match: * to create."
            )
        tag = written.removeprefix("W/").strip('"')[:_MAX_TAG_CHARS]
        return tag or None

    async def _note_failure(self, trail: AuditTrail, error: Exception) -> None:
        """Write down a change that was tried; a database that cannot take it has failed the change already."""
        trail.before = trail.after = None
        try:
            await self._log.audit(trail.entry(row_of(error).status))
        except Exception as problem:
            _log.warning("%s: the audit log does not take it: %s", trail.action, problem)


def _name(trail: AuditTrail) -> str:
    return trail.key_id or "anonymous"
