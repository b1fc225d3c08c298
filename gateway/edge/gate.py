"""Opens every request: head, origin, key, admission, body, in this order, for all endpoints alike.

What can be refused is refused before what costs more: a wrong key before the body is read, a full queue before it too.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.access.admission import Admission
from gateway.access.authenticator import ADMIN, ADMIN_READ, USE, Authenticator, Caller
from gateway.access.local_request import Connection
from gateway.access.rate_limiter import RateLimiter
from gateway.api.conversation import SESSION_HEADERS
from gateway.config.sections import ServerConfig
from gateway.edge.body_budget import BodyBudget
from gateway.edge.error_table import is_callers_fault
from gateway.edge.watchdog import DisconnectSignal, Receive, Watchdog
from gateway.errors import BodyTooLarge, ClientGone, InvalidRequest, RateLimited, WrongScope, shorten
from gateway.observe.refusal_log import RefusalLog
from gateway.store.errors import StoreError

# What a refused upload may still send before its connection is closed: closing at once would reset the connection
# before most clients read the answer.
_LINGER_S = 1.0
_LINGER_BYTES = 64 * 1024 * 1024


async def read_body(receive: Receive, content_length: int | None, max_bytes: int, watchdog: Watchdog) -> bytes:
    """Return the whole body.

    Raises
    ------
    BodyTooLarge
        Before anything is read where the length is announced, else as soon as ``max_bytes`` is passed.
    BodyTooSlow
        No further piece came in time, or not the whole.
    BodiesFull
        Before it is read, or as soon as it is clear.
    ClientGone
        The connection closed first.
    """
    if content_length is not None and content_length > max_bytes:
        raise BodyTooLarge(max_bytes, content_length)
    share = watchdog.body
    if share is not None and content_length is not None:
        share.grow_to(content_length)
    pieces: list[bytes] = []
    num_bytes = 0
    with watchdog.reading():
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone("The client closed the connection before its request was complete.")
            piece: bytes = message.get("body", b"")
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                raise BodyTooLarge(max_bytes)
            if share is not None and num_bytes > share.num_bytes:
                share.grow_to(num_bytes)
            if not message.get("more_body", False):
                return b"".join([*pieces, piece]) if pieces else piece
            pieces.append(piece)
            watchdog.waiting()


async def discard_rest(receive: Receive) -> None:
    """Take what a refused client is still sending, for a moment, so that it comes to read the refusal."""
    deadline, num_bytes = time.monotonic() + _LINGER_S, 0
    while num_bytes < _LINGER_BYTES and (left_s := deadline - time.monotonic()) > 0:
        try:
            async with asyncio.timeout(left_s):
                message = await receive()
        except TimeoutError:
            return
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return
        num_bytes += len(message.get("body", b""))


_PREFIX = b"x-suffice-"
# Comes back from clients and proxies for the sake of load balancers; it asks nothing of us.
_AFFINITY = b"x-suffice-affinity"
_SESSION = {name.encode(): name for name in SESSION_HEADERS}
_MAX_SESSION_BYTES = 512
_OURS = frozenset(
    {"tier", "min-tier", "max-tier", "explore", "session-id", "policy", "priority", "regions", "max-cost-usd"}
)
_KEPT = frozenset({b"authorization", b"x-api-key", b"content-length", b"traceparent", b"origin"})
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_MAX_VALUE_BYTES = 512
_NOTHING: Mapping[str, str] = {}


@dataclass(slots=True)
class Head:
    """Holds what a request says of itself before its body.

    ``authorization`` may have come as ``x-api-key``; ``session`` holds the headers by which clients name conversations;
    ``suffice`` the ``x-suffice-*`` headers without their prefix, dashes as underscores; ``connection`` is the ASGI
    scope, for those who ask where it comes from.
    """

    authorization: str | None = None
    content_length: int | None = None
    traceparent: str | None = None
    origin: str | None = None
    session: Mapping[str, str] = field(default_factory=dict)
    suffice: Mapping[str, str] = field(default_factory=dict)
    connection: Connection = field(default_factory=dict)


def read_head(connection: Connection) -> Head:
    """Pick the headers the gateway acts on; names arrive in lower case.

    Raises
    ------
    InvalidRequest
        One of them given twice with different values, too long, or (``x-suffice-*`` only) unknown.
    """
    kept: dict[bytes, bytes] = {}
    own: dict[bytes, bytes] | None = None
    session: dict[str, str] | None = None
    for name, value in connection["headers"]:
        if name in _KEPT:
            found = kept
        elif name in _SESSION:
            # Others wrote it for others: what is no name is passed over, and the first of two counts.
            if 0 < len(value) <= _MAX_SESSION_BYTES:
                session = {} if session is None else session
                session.setdefault(_SESSION[name], value.decode("latin-1").strip(" \t"))
            continue
        elif name.startswith(_PREFIX) and name != _AFFINITY:
            found = own = {} if own is None else own
            if len(value) > _MAX_VALUE_BYTES:
                raise InvalidRequest(f"The header {_quote(name)} is longer than {_MAX_VALUE_BYTES} bytes.")
        else:
            continue
        if found.setdefault(name, value) != value:
            raise InvalidRequest(f"The header {_quote(name)} was given twice with different values.")
    # A bearer token has its own check; a long origin or trace context is only quoted or dropped.
    authorization, origin, length = kept.get(b"authorization"), kept.get(b"origin"), kept.get(b"content-length")
    trace = kept.get(b"traceparent")
    if authorization is None and (key := kept.get(b"x-api-key")):
        # Anthropic's clients send the bare key so. Where both come, the other one may be a proxy's to set.
        authorization = b"Bearer " + key
    return Head(
        None if authorization is None else authorization.decode("latin-1"),
        # The server has refused malformed lengths already; a missing one means a chunked body.
        int(length) if length is not None and length.isdigit() else None,
        None if trace is None else _traceparent(trace),
        None if origin is None else origin.decode("latin-1"),
        _NOTHING if session is None else session,
        _NOTHING if own is None else _overrides(own),
        connection,
    )


def _overrides(found: Mapping[bytes, bytes]) -> dict[str, str]:
    overrides = {}
    for name, value in found.items():
        key = _quote(name[len(_PREFIX) :])
        if key not in _OURS:
            known = ", ".join(f"x-suffice-{each}" for each in sorted(_OURS))
            raise InvalidRequest(f"The header x-suffice-{shorten(key)} is unknown; known are {known}.")
        overrides[key.replace("-", "_")] = value.decode("latin-1").strip(" \t")
    return overrides


def _traceparent(value: bytes) -> str | None:
    """A malformed trace context is dropped, as W3C Trace Context section 4.3 asks."""
    if len(value) > _MAX_VALUE_BYTES:
        return None
    text = value.decode("latin-1").strip(" \t")
    return text if _TRACEPARENT.fullmatch(text) and not text.startswith("ff") else None


def _quote(name: bytes) -> str:
    return shorten(name.decode("latin-1"))


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


def note_caller(connection: Connection, caller: Caller) -> None:
    """Write into the ASGI scope whose request it is, for whoever tells of its refusal."""
    if caller.key_id is not None and isinstance(connection, dict):
        connection["suffice.key_id"] = caller.key_id


async def open_request(
    connection: Connection,
    receive: Receive,
    authenticate: Authenticate,
    *,
    max_body_bytes: int | None,
    watchdog: Watchdog,
    admission: Admission | None = None,
    bodies: BodyBudget | None = None,
) -> OpenedRequest:
    """Read and check all that comes before an endpoint's own work.

    Parameters
    ----------
    connection : the ASGI scope
    authenticate : finds the caller behind a head
    max_body_bytes : None reads no body
    watchdog : of this request
    admission : asked whether the request would be turned away, where it will take a place
    bodies : counts the body until ``watchdog`` is closed

    Raises
    ------
    InvalidRequest, OriginRefused, Unauthenticated, WrongScope, QueueFull, Draining
    BodyTooLarge, BodyTooSlow, BodiesFull, ClientGone
    """
    begun_s = time.perf_counter()
    head = read_head(connection)
    caller = await authenticate(head)
    note_caller(connection, caller)
    if admission is not None:
        admission.check(caller)
    if max_body_bytes is None:
        return OpenedRequest(head, caller, b"", begun_s)
    if bodies is not None:
        watchdog.body = bodies.share(caller.key_id)
    asked_s = time.perf_counter()
    body = await read_body(receive, head.content_length, max_body_bytes, watchdog)
    return OpenedRequest(head, caller, body, begun_s + (time.perf_counter() - asked_s))


class RequestGate:
    """Stands before the endpoints of applications.

    Attributes
    ----------
    limits : the server's
    authenticator, admission, rate_limiter, refusals : shared by all endpoints
    bodies : bounds the bytes of bodies that are held
    """

    def __init__(
        self,
        limits: ServerConfig,
        authenticator: Authenticator,
        admission: Admission,
        rate_limiter: RateLimiter,
        refusals: RefusalLog,
    ) -> None:
        self.limits = limits
        self.authenticator = authenticator
        self.admission = admission
        self.rate_limiter = rate_limiter
        self.refusals = refusals
        # The largest body must have a way in, however the limits are set.
        self.bodies = BodyBudget(
            max(limits.max_body_bytes, limits.max_body_bytes_in_flight),
            max(limits.max_body_bytes, limits.max_body_bytes_in_flight_per_key),
        )

    async def open(
        self, scope: Mapping[str, Any], receive: Receive, watchdog: Watchdog, *, takes_place: bool = True
    ) -> OpenedRequest:
        """Open a request with a body; one that will take a place is refused early where there will be none."""
        return await open_request(
            scope,
            receive,
            self.authenticate,
            max_body_bytes=self.limits.max_body_bytes,
            watchdog=watchdog,
            admission=self.admission if takes_place else None,
            bodies=self.bodies,
        )

    async def charge(self, error: Exception, request_id: str, opened: OpenedRequest | None) -> Exception:
        """Count a request that was opened and is refused against its key; the error to answer it with."""
        if opened is None or not opened.caller.is_limited or not is_callers_fault(error):
            return error
        try:
            await self.rate_limiter.charge_refusal(request_id, opened.caller)
        except (RateLimited, StoreError) as instead:
            return instead
        return error

    async def identify(self, scope: Mapping[str, Any]) -> Caller:
        """Return the caller of a request that has no body."""
        caller = await self.authenticate(read_head(scope))
        note_caller(scope, caller)
        return caller

    async def check_reader(self, scope: Mapping[str, Any]) -> None:
        """Let pass who may read what tells of this product, not of its use: anybody, but to an open server.

        Raises
        ------
        OriginRefused, Unauthenticated
        """
        if self.authenticator.is_open:
            await self._find_caller(read_head(scope), None)

    async def check_observer(self, scope: Mapping[str, Any]) -> None:
        """Let pass who may see the state of the server itself, and so of all who use it: not every holder of a key.

        Raises
        ------
        OriginRefused, Unauthenticated, WrongScope
        """
        caller = await self._find_caller(read_head(scope), None)
        if caller.key_id is not None and caller.scope not in (ADMIN, ADMIN_READ):
            raise WrongScope("This key is for using the models; the server's own state wants one of the scope 'admin'.")

    def authenticate(self, head: Head) -> Awaitable[Caller]:
        """Return the caller behind a head; keeps web pages and proxies off an open server."""
        return self._find_caller(head, USE)

    async def _find_caller(self, head: Head, key_scope: str | None) -> Caller:
        authenticator = self.authenticator
        if head.origin is not None:
            authenticator.check_origin(head.origin)
        return await authenticator.check(head.authorization, head.connection, scope=key_scope)

    def watchdog(self, scope: Mapping[str, Any], receive: Receive) -> Watchdog:
        """Make the watchdog of a request, to be closed with it."""
        limits = self.limits
        return Watchdog(
            receive,
            timeout_s=limits.request_timeout_s,
            stall_timeout_s=limits.slow_client_timeout_s,
            body_timeout_s=limits.body_timeout_s,
            disconnect=DisconnectSignal.of(scope),
        )
