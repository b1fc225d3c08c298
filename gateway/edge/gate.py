"""Opens every request: head, origin, key, admission, body, in this order, for all endpoints alike.

What can be refused is refused before what costs more: a wrong key before the body is read, a full queue before it too.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.access.admission import Admission
from gateway.access.authenticator import Authenticator, Caller
from gateway.access.rate_limiter import RateLimiter
from gateway.config.sections import ServerConfig
from gateway.edge.body import read_body
from gateway.edge.head import Head, read_head
from gateway.edge.watchdog import DisconnectSignal, Receive, Watchdog

Authenticate = Callable[[Head], Awaitable[Caller]]


@dataclass(slots=True, eq=False)
class OpenedRequest:
    """A request whose caller is known and whose body is here; empty where none is read.

    ``accepted_s`` (``time.perf_counter``) is as if the body had come with its head: the time that a client takes to
    send is not the gateway's.
    """

    head: Head
    caller: Caller
    body: bytes
    accepted_s: float


async def open_request(
    headers: list[tuple[bytes, bytes]],
    receive: Receive,
    authenticate: Authenticate,
    *,
    max_body_bytes: int | None,
    watchdog: Watchdog,
    admission: Admission | None = None,
) -> OpenedRequest:
    """Read and check all that comes before an endpoint's own work.

    Parameters
    ----------
    headers : of the ASGI scope, names in lower case
    authenticate : finds the caller behind a head
    max_body_bytes : None reads no body
    watchdog : of this request
    admission : asked whether the request would be turned away, where it will take a place

    Raises
    ------
    InvalidRequest, OriginRefused, Unauthenticated, WrongScope, QueueFull, Draining
    BodyTooLarge, BodyTooSlow, ClientGone
    """
    begun_s = time.perf_counter()
    head = read_head(headers)
    caller = await authenticate(head)
    if admission is not None:
        admission.check()
    if max_body_bytes is None:
        return OpenedRequest(head, caller, b"", begun_s)
    asked_s = time.perf_counter()
    body = await read_body(receive, head.content_length, max_body_bytes, watchdog)
    return OpenedRequest(head, caller, body, begun_s + (time.perf_counter() - asked_s))


class RequestGate:
    """Stands before the endpoints of applications.

    Attributes
    ----------
    limits : the server's
    authenticator, admission, rate_limiter : shared by all endpoints
    """

    def __init__(
        self, limits: ServerConfig, authenticator: Authenticator, admission: Admission, rate_limiter: RateLimiter
    ) -> None:
        self.limits = limits
        self.authenticator = authenticator
        self.admission = admission
        self.rate_limiter = rate_limiter

    async def open(
        self, scope: Mapping[str, Any], receive: Receive, watchdog: Watchdog, *, takes_place: bool = True
    ) -> OpenedRequest:
        """Open a request with a body; one that will take a place is refused early where there will be none."""
        return await open_request(
            scope["headers"],
            receive,
            self.authenticate,
            max_body_bytes=self.limits.max_body_bytes,
            watchdog=watchdog,
            admission=self.admission if takes_place else None,
        )

    async def identify(self, scope: Mapping[str, Any]) -> Caller:
        """Return the caller of a request that has no body."""
        return await self.authenticate(read_head(scope["headers"]))

    async def authenticate(self, head: Head) -> Caller:
        """Return the caller behind a head; keeps web pages off an open server."""
        authenticator = self.authenticator
        if head.origin is not None:
            authenticator.check_origin(head.origin)
        return await authenticator.check(head.authorization)

    def watchdog(self, scope: Mapping[str, Any], receive: Receive) -> Watchdog:
        """Make the watchdog of a request, to be closed with it."""
        limits = self.limits
        return Watchdog(
            receive,
            timeout_s=limits.request_timeout_s,
            stall_timeout_s=limits.slow_client_timeout_s,
            disconnect=DisconnectSignal.of(scope),
        )
