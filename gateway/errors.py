"""Defines the gateway's own exceptions; :mod:`gateway.edge.error_table` says how each is answered.

::

    GatewayError
    ├── InvalidRequest            a field is missing, of the wrong type or out of range; ``param`` names it
    │   ├── MalformedBody         not JSON, not UTF-8, nested too deeply
    │   └── UnsupportedOption     understood, but nothing here can do it yet
    ├── UnknownModel              ``model`` names nothing that is served
    ├── RouteNotFound             no such path
    ├── MethodNotAllowed          the path exists, not with this method
    ├── RequestNotFound           no request of the caller's has this id
    ├── Unauthenticated           no key, or not a valid one
    ├── WrongScope                a key for use where one for administration is wanted, or the other way round
    ├── OriginRefused             a web page that may not call this server
    ├── PreconditionRequired      a change that does not say what it rests on
    ├── PreconditionFailed        what it rests on has changed meanwhile
    ├── NotFound                  nothing of this name, below ``/admin/v1``
    ├── NotHere                   this server was started without the part that is asked for
    ├── BodyTooLarge              more bytes than ``server.max_body_bytes``
    ├── BodyTooSlow               the body did not arrive in time
    ├── NotHttp                   what came is no HTTP request
    ├── HeadTooLarge              request line and headers are too large
    ├── HeadTooSlow               they did not arrive in time
    ├── RateLimited               a key's requests or tokens of the minute are used up; carries ``retry_after_s``
    ├── QuotaExhausted            a key's budget is used up; carries ``retry_after_s``
    ├── QueueFull                 all places and the queue before them are taken; carries ``retry_after_s``
    ├── Draining                  the server is stopping; carries ``retry_after_s``
    ├── DeadlineExceeded          the request lived longer than ``server.request_timeout_s``
    ├── AnswerFailed              the model failed after its first token; no other tier can take over
    ├── ClientGone                the client closed the connection   (nobody left to tell)
    └── ClientStalled             the client stopped reading         (nobody left to tell)
"""

from __future__ import annotations


class GatewayError(Exception):
    """Base of the tree. ``param`` and ``code`` override the table's where an instance knows better."""

    param: str | None = None
    code: str | None = None


class InvalidRequest(GatewayError):
    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class MalformedBody(InvalidRequest):
    pass


class UnsupportedOption(InvalidRequest):
    pass


class UnknownModel(GatewayError):
    param = "model"

    def __init__(self, model: str, known: tuple[str, ...]) -> None:
        super().__init__(
            f"The model {shorten(model)!r} is not served here. GET /v1/models lists what is: {', '.join(known)}."
        )
        self.model = model


class RouteNotFound(GatewayError):
    pass


class MethodNotAllowed(GatewayError):
    pass


class RequestNotFound(GatewayError):
    def __init__(self, request_id: str) -> None:
        super().__init__(f"No request of yours has the id {shorten(request_id)!r}.")


class Unauthenticated(GatewayError):
    pass


class WrongScope(GatewayError):
    pass


class PreconditionRequired(GatewayError):
    param = "If-Match"


class PreconditionFailed(GatewayError):
    param = "If-Match"


class NotFound(GatewayError):
    def __init__(self, kind: str, name: str) -> None:
        super().__init__(f"There is no {kind} {shorten(name)!r}.")


class NotHere(GatewayError):
    pass


class OriginRefused(GatewayError):
    def __init__(self, origin: str) -> None:
        super().__init__(
            f"Pages of {shorten(origin)!r} may not call this server; server.cors_origins lists those that may."
        )


class BodyTooLarge(GatewayError):
    def __init__(self, max_body_bytes: int, num_bytes: int | None = None) -> None:
        said = f" It announced {num_bytes}." if num_bytes is not None else ""
        super().__init__(f"The request body may have at most {max_body_bytes} bytes.{said}")


class BodyTooSlow(GatewayError):
    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"No further byte of the request body came for {timeout_s:g} s.")


class NotHttp(GatewayError):
    def __init__(self) -> None:
        super().__init__("What was sent is not a valid HTTP/1.1 request.")


class HeadTooLarge(GatewayError):
    def __init__(self, max_head_bytes: int) -> None:
        super().__init__(f"The request line and headers may have at most {max_head_bytes} bytes.")


class HeadTooSlow(GatewayError):
    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"The request line and headers were not whole after {timeout_s:g} s.")


class RateLimited(GatewayError):
    """``headers`` are those that every answer to a limited key carries."""

    def __init__(
        self, meter: str, limit: int, amount: int, retry_after_s: float, headers: list[tuple[bytes, bytes]]
    ) -> None:
        wanted = f" The request alone wants {amount}." if amount > limit else ""
        super().__init__(f"The key may use {limit} {meter} a minute, and has used them.{wanted}")
        self.retry_after_s = retry_after_s
        self.headers = headers


class QuotaExhausted(GatewayError):
    """``whose`` budget it was: the key's, or a policy's by name."""

    def __init__(self, whose: str, window: str, limit_nano_usd: int, retry_after_s: float) -> None:
        budget_usd = f"{limit_nano_usd / 1e9:.9f}".rstrip("0").rstrip(".")
        super().__init__(f"The budget of {whose} of ${budget_usd} a {window} does not cover this request any more.")
        self.retry_after_s = retry_after_s


class QueueFull(GatewayError):
    def __init__(self, num_running: int, num_waiting: int, retry_after_s: float) -> None:
        super().__init__(
            f"{num_running} requests are being answered and {num_waiting} wait; try again in {retry_after_s:.0f} s."
        )
        self.retry_after_s = retry_after_s


class Draining(GatewayError):
    def __init__(self) -> None:
        super().__init__("The server is stopping and takes no new requests.")
        self.retry_after_s = 1.0


class DeadlineExceeded(GatewayError):
    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"The request took longer than {timeout_s:g} s, the longest a request may live here.")


class AnswerFailed(GatewayError):
    pass


class ClientGone(GatewayError):
    pass


class ClientStalled(GatewayError):
    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"The client took no byte of the answer for {timeout_s:g} s.")


def shorten(text: str, max_chars: int = 80) -> str:
    """Quote no more of a caller's text than a message can bear."""
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"
