"""Defines the gateway's own exceptions; :mod:`gateway.edge.error_table` says how each is answered.

::

    GatewayError
    ├── InvalidRequest            a field is missing, of the wrong type or out of range; ``param`` names it
    │   ├── MalformedBody         not JSON, not UTF-8, nested too deeply
    │   ├── UnsupportedOption     understood, but nothing here can do it yet
    │   └── PreviousResponseNotFound   no response of the caller's tenant has this id, or a part of it is gone
    ├── UnknownModel              ``model`` names nothing that is served
    ├── PolicyNotPermitted        the caller's key is bound to other policies; ``param`` says where it was named
    ├── RouteNotFound             no such path
    ├── MethodNotAllowed          the path exists, not with this method
    ├── RequestNotFound           no request of the caller's has this id
    ├── ResponseNotFound          no response of the caller's tenant that is kept has this id
    ├── Unauthenticated           no key, or not a valid one
    │   └── KeyWanted             no key, in a request that an open server is not open to
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
    ├── BodiesFull                more bytes of bodies are held than may be; carries ``retry_after_s``
    ├── TooManyConnections        as many are open as may be; carries ``retry_after_s``
    ├── Draining                  the server is stopping; carries ``retry_after_s``
    ├── DeadlineExceeded          the request lived longer than ``server.request_timeout_s``
    ├── AnswerFailed              the model failed after its first token; nobody went on
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


class PreviousResponseNotFound(InvalidRequest):
    def __init__(self, response_id: str, *, is_part_gone: bool = False) -> None:
        """``is_part_gone``: it is there, but not all that it goes on from."""
        kept = "Kept are responses whose requests said 'store': true"
        why = "An earlier response that it goes on from is gone" if is_part_gone else kept
        super().__init__(
            f"Previous response with id {shorten(response_id)!r} not found. {why}; send the whole conversation.",
            param="previous_response_id",
        )


class UnknownModel(GatewayError):
    param = "model"

    def __init__(self, model: str, known: tuple[str, ...]) -> None:
        super().__init__(
            f"The model {shorten(model)!r} is not served here. GET /v1/models lists what is: {', '.join(known)}."
        )
        self.model = model


class PolicyNotPermitted(GatewayError):
    def __init__(self, policy: str, permitted: tuple[str, ...], param: str) -> None:
        super().__init__(
            f"The API key may not use the policy {shorten(policy)!r}; it may use {', '.join(permitted)}, "
            "as far as they are served."
        )
        self.param = param


class RouteNotFound(GatewayError):
    pass


class MethodNotAllowed(GatewayError):
    pass


class RequestNotFound(GatewayError):
    def __init__(self, request_id: str) -> None:
        super().__init__(f"No request of yours has the id {shorten(request_id)!r}.")


class ResponseNotFound(GatewayError):
    def __init__(self, response_id: str) -> None:
        super().__init__(f"Response with id {shorten(response_id)!r} not found.")


class Unauthenticated(GatewayError):
    pass


class KeyWanted(Unauthenticated):
    def __init__(self, reason: str) -> None:
        super().__init__(
            f"This server wants an API key of this request. Without one {reason}. Send a key as 'Authorization: Bearer "
            "sk-suffice-…'; 'suffice keys create' makes one."
        )


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
    def __init__(self, timeout_s: float, *, is_whole: bool = False) -> None:
        """``is_whole`` says that the time is that of the whole body, not that of one silence."""
        said = f"The request body was not whole after {timeout_s:g} s."
        super().__init__(said if is_whole else f"No further byte of the request body came for {timeout_s:g} s.")


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


class BodiesFull(GatewayError):
    def __init__(self, num_bytes: int, max_bytes: int, *, is_of_key: bool) -> None:
        whose = "this key's requests" if is_of_key else "all requests"
        super().__init__(
            f"{num_bytes} bytes in bodies of {whose} are being read or answered, of at most {max_bytes}; try again."
        )
        self.retry_after_s = 1.0


class TooManyConnections(GatewayError):
    def __init__(self) -> None:
        super().__init__("The server has as many connections as it may have.")
        self.retry_after_s = 1.0


class Draining(GatewayError):
    def __init__(self) -> None:
        super().__init__("The server is stopping and takes no new requests.")
        self.retry_after_s = 1.0


class DeadlineExceeded(GatewayError):
    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"The request took longer than {timeout_s:g} s, the longest a request may live here.")


class AnswerFailed(GatewayError):
    """``model`` is the served model that failed; the message is for the log."""

    def __init__(self, message: str, *, model: str | None = None) -> None:
        super().__init__(message)
        self.model = model


class ClientGone(GatewayError):
    pass


class ClientStalled(GatewayError):
    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"The client took no byte of the answer for {timeout_s:g} s.")


def shorten(text: str, max_chars: int = 80) -> str:
    """Quote no more of a caller's text than a message can bear."""
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"
