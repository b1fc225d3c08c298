"""Maps every exception of ours to the one response that a caller gets for it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from backends import errors as backends
from classifier import errors as classifier
from gateway.control import errors as control
from gateway.edge.error_format import OPENAI, ErrorFormat
from gateway.errors import (
    AnswerFailed,
    BodiesFull,
    BodyTooLarge,
    BodyTooSlow,
    ClientGone,
    ClientStalled,
    DeadlineExceeded,
    Draining,
    GatewayError,
    HeadTooLarge,
    HeadTooSlow,
    InvalidRequest,
    KeyWanted,
    MalformedBody,
    MethodNotAllowed,
    NotFound,
    NotHere,
    NotHttp,
    OriginRefused,
    PolicyNotPermitted,
    PreconditionFailed,
    PreconditionRequired,
    PreviousResponseNotFound,
    QueueFull,
    QuotaExhausted,
    RateLimited,
    RequestNotFound,
    ResponseNotFound,
    RouteNotFound,
    TooManyConnections,
    Unauthenticated,
    UnknownModel,
    UnsupportedOption,
    WrongScope,
)
from gateway.learn import errors as learn
from gateway.store import errors as store
from gateway.verify import errors as verify
from policies import errors as policies


@dataclass(frozen=True, slots=True)
class Row:
    """Says how one exception is answered.

    ``retryable`` says whether the same request may succeed later; ``is_public`` whether the exception's own message is
    for the caller (otherwise it goes to the log, and the caller gets a fixed sentence with the request's id).
    """

    status: int
    type: str
    code: str
    retryable: bool = False
    log_level: int = logging.INFO
    is_public: bool = True


# Retry-After of what passes, and of a budget that is whole again with its window.
_LONGEST_WAIT_S = 60
_LONGEST_QUOTA_S = 31 * 86_400

_INVALID = "invalid_request_error"
_SERVER = "server_error"


def _broken(code: str, status: int = 500) -> Row:
    return Row(status, _SERVER, code, log_level=logging.ERROR, is_public=False)


def _down(code: str, status: int = 503, *, is_public: bool = True) -> Row:
    return Row(status, _SERVER, code, retryable=True, log_level=logging.WARNING, is_public=is_public)


TABLE: Mapping[type[Exception], Row] = {
    GatewayError: _broken("internal_error"),
    InvalidRequest: Row(400, _INVALID, "invalid_value"),
    MalformedBody: Row(400, _INVALID, "invalid_json"),
    UnsupportedOption: Row(400, _INVALID, "unsupported_parameter"),
    UnknownModel: Row(404, _INVALID, "model_not_found"),
    RouteNotFound: Row(404, _INVALID, "unknown_url"),
    MethodNotAllowed: Row(405, _INVALID, "method_not_allowed"),
    RequestNotFound: Row(404, _INVALID, "request_not_found"),
    ResponseNotFound: Row(404, _INVALID, "response_not_found"),
    PreviousResponseNotFound: Row(400, _INVALID, "previous_response_not_found"),
    Unauthenticated: Row(401, "authentication_error", "invalid_api_key"),
    KeyWanted: Row(401, "authentication_error", "invalid_api_key"),
    WrongScope: Row(403, "permission_error", "wrong_key_scope"),
    PolicyNotPermitted: Row(403, "permission_error", "policy_not_permitted"),
    PreconditionRequired: Row(428, _INVALID, "precondition_required"),
    PreconditionFailed: Row(412, _INVALID, "precondition_failed"),
    NotFound: Row(404, _INVALID, "not_found"),
    NotHere: Row(501, _SERVER, "not_enabled"),
    OriginRefused: Row(403, "permission_error", "origin_refused"),
    BodyTooLarge: Row(413, _INVALID, "request_too_large"),
    BodyTooSlow: Row(408, _INVALID, "request_timeout", retryable=True),
    NotHttp: Row(400, _INVALID, "invalid_http"),
    HeadTooLarge: Row(431, _INVALID, "headers_too_large"),
    HeadTooSlow: Row(408, _INVALID, "request_timeout", retryable=True),
    RateLimited: Row(429, "rate_limit_error", "rate_limit_exceeded", retryable=True),
    # Waiting does not mend it soon: clients that retry by themselves should not.
    QuotaExhausted: Row(429, "insufficient_quota", "insufficient_quota"),
    # Not a warning each: an overload has many, and they are counted, and told of with all refusals.
    QueueFull: Row(429, "rate_limit_error", "rate_limit_exceeded", retryable=True),
    BodiesFull: Row(429, "rate_limit_error", "rate_limit_exceeded", retryable=True),
    TooManyConnections: _down("overloaded"),
    Draining: _down("shutting_down"),
    DeadlineExceeded: _down("deadline_exceeded", 504),
    AnswerFailed: _down("answer_failed", 502, is_public=False),
    ClientGone: Row(499, _INVALID, "client_closed"),
    ClientStalled: Row(499, _INVALID, "client_stalled"),
    # backends
    backends.BackendError: _broken("backend_error"),
    backends.BackendUnavailable: _down("model_unavailable", is_public=False),
    backends.BackendOverloaded: _down("overloaded", is_public=False),
    backends.BackendRefused: Row(502, _SERVER, "model_refused", log_level=logging.ERROR, is_public=False),
    backends.BackendTimeout: _down("model_timeout", 504, is_public=False),
    backends.BackendFailure: _down("model_failed", 502, is_public=False),
    backends.ContextLengthExceeded: Row(400, _INVALID, "context_length_exceeded"),
    backends.UnsupportedByBackend: Row(400, _INVALID, "unsupported_parameter"),
    backends.RequestRejected: Row(400, _INVALID, "rejected_by_model"),
    backends.RejectedByServer: Row(400, _INVALID, "rejected_by_model", is_public=False),
    backends.ModelLoadError: _broken("model_not_loaded"),
    backends.InvalidConfig: _broken("model_misconfigured"),
    # verification: all but the last are met at start or swallowed by the worker
    verify.VerificationError: _broken("verification_error"),
    verify.CombinationUnusable: _broken("combination_unusable"),
    verify.NothingToGoBy: _broken("no_verdict"),
    verify.IdempotencyKeyReused: Row(409, _INVALID, "idempotency_key_reused"),
    # policies
    policies.PolicyError: _broken("policy_error"),
    policies.InvalidPolicy: _broken("invalid_policy"),
    policies.InvalidLadder: _broken("invalid_ladder"),
    policies.ConflictingLimits: Row(400, _INVALID, "conflicting_limits"),
    policies.OutsideRegions: Row(400, _INVALID, "region_not_permitted"),
    policies.BeyondCost: Row(400, _INVALID, "cost_not_permitted"),
    policies.TierNotPermitted: Row(403, "permission_error", "tier_not_permitted"),
    policies.UnknownTier: Row(400, _INVALID, "unknown_tier"),
    policies.NoTierFits: Row(400, _INVALID, "context_length_exceeded"),
    policies.NoTierAvailable: _down("no_tier_available"),
    # classifier: met at start, or swallowed by the choice that needs no estimate
    classifier.ClassifierError: _broken("router_error"),
    classifier.ArtifactError: _broken("router_unusable"),
    classifier.ArtifactNotFound: _broken("router_not_found"),
    classifier.ArtifactCorrupt: _broken("router_corrupt"),
    classifier.ArtifactUnsupported: _broken("router_unsupported"),
    classifier.TrainingError: _broken("training_failed"),
    classifier.EmbeddingError: _broken("embedding_failed"),
    # learning: met by the command and by the child process; no request waits for it
    learn.LearningError: _broken("learning_failed"),
    learn.NothingToLearn: _broken("nothing_to_learn"),
    learn.RetrainRefused: _broken("retrain_refused"),
    # control: changes to what is active
    control.ControlError: _broken("control_error"),
    control.Conflict: Row(409, _INVALID, "conflict"),
    control.UnknownVersion: Row(404, _INVALID, "not_found"),
    control.RouterRefused: Row(400, _INVALID, "router_refused"),
    control.LeaseLost: _broken("lease_lost"),
    # store: what is not committed is not answered
    store.StoreError: _broken("log_error"),
    store.StoreUnavailable: _down("log_unavailable", is_public=False),
    store.StoreFull: _down("log_full", is_public=False),
    store.StoreOverloaded: _down("log_overloaded", is_public=False),
    store.StoreClosed: _down("shutting_down", is_public=False),
    store.RecordRejected: _broken("log_rejected"),
    store.FeedbackFull: Row(400, _INVALID, "too_much_feedback"),
    store.StoreUrlInvalid: _broken("log_misconfigured"),
    store.DatabaseInUse: _broken("log_in_use"),
    store.SchemaMismatch: _broken("log_schema"),
}

_INTERNAL = Row(500, _SERVER, "internal_error", log_level=logging.ERROR, is_public=False)

# ``{model}`` is the served model where it is known.
_PRIVATE_MESSAGES: Mapping[str, str] = {
    "model_unavailable": "{model} is not available now. Try again.",
    "overloaded": "{model} has more requests than it can take. Try again.",
    "model_timeout": "{model} did not answer in time. Try again.",
    "model_failed": "{model} failed to answer. Try again.",
    "model_refused": "{model} does not take requests of this server; only its operator can mend that.",
    "answer_failed": "{model} failed before its answer was complete. Try again.",
    "rejected_by_model": "{model} rejected the request.",
    "log_unavailable": "The decision log is unavailable, so the answer was withheld. Try again.",
    "log_full": "The decision log has no space left, so the answer was withheld.",
    "log_overloaded": "The decision log is behind, so the answer was withheld. Try again.",
    "shutting_down": "The server is stopping.",
}


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """Holds what a caller is told: status, headers and the error object of the caller's protocol."""

    status: int
    body: Mapping[str, Any]
    row: Row
    retry_after_s: int | None = None
    extra_headers: Sequence[tuple[bytes, bytes]] = ()

    @property
    def code(self) -> str:
        return str(self.body["error"]["code"])

    def json(self) -> bytes:
        return orjson.dumps(self.body)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers that belong to the error itself."""
        headers = [(b"content-type", b"application/json"), *self.extra_headers]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % self.retry_after_s))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers


def row_of(error: BaseException) -> Row:
    """The table's row for this exception: its own class's, or the nearest base's."""
    if isinstance(error, backends.RequestRejected) and error.status not in (400, 404, 413, 422):
        # A refusal of our own credentials or quota by the remote server is not the caller's to mend.
        return TABLE[backends.BackendRefused]
    return row_of_class(type(error))


def row_of_class(kind: type[BaseException]) -> Row:
    """The table's row for exceptions of a class."""
    for cls in kind.__mro__:
        if (row := TABLE.get(cls)) is not None:
            return row
    return _INTERNAL


def code_of(error: BaseException) -> str:
    """The code of this exception, as callers, log and metrics have it."""
    row = row_of(error)
    is_refusal = row is TABLE[backends.BackendRefused]
    return row.code if is_refusal else getattr(error, "code", None) or row.code


def is_callers_fault(error: BaseException) -> bool:
    """Tell whether an exception refuses a request for what it is, rather than for when it comes or who hung up."""
    status = row_of(error).status
    return 400 <= status < 500 and status not in (429, 499)


def answer_to(error: BaseException, request_id: str, shape: ErrorFormat = OPENAI) -> ErrorAnswer:
    """Turn an exception into what the caller is told; the one place where that happens."""
    row = row_of(error)
    is_ours = row.type == _SERVER
    status = error.status if isinstance(error, backends.RequestRejected) and not is_ours else row.status
    told = {
        "message": _message(error, row, request_id),
        "type": row.type,
        "param": None if is_ours else param_of(error),
        "code": code_of(error),
    }
    body = shape.body(told, status, request_id)
    return ErrorAnswer(status, body, row, _retry_after(error, row, status), getattr(error, "headers", ()))


def _message(error: BaseException, row: Row, request_id: str) -> str:
    model = getattr(error, "model", None)
    named = "The model" if model is None else f"The model {model!r}"
    if isinstance(error, backends.UnsupportedByBackend):
        # Its own message has the name that the model has at a remote server.
        return f"{error.option!r} is not supported by {named[0].lower()}{named[1:]}."
    if row.is_public:
        return str(error) or row.code
    sentence = _PRIVATE_MESSAGES.get(row.code, "The server failed to answer.")
    return f"{sentence.replace('{model}', named)} Request id: {request_id}."


def param_of(error: BaseException) -> str | None:
    """The field of the request that is to blame, in the caller's spelling."""
    if isinstance(error, policies.ConflictingLimits):
        field = error.fields[0] if error.fields else None
        return field if field in (None, "model") else f"suffice.{field}"
    if isinstance(error, policies.UnknownTier):
        return f"suffice.{error.field_name}"
    if isinstance(error, backends.UnsupportedByBackend):
        return error.option
    if isinstance(error, policies.NoTierFits):
        return "messages"
    return getattr(error, "param", None)


def _retry_after(error: BaseException, row: Row, status: int) -> int | None:
    if status not in (429, 503):
        return None
    wanted_s = getattr(error, "retry_after_s", None)
    most_s = _LONGEST_WAIT_S if row.retryable else _LONGEST_QUOTA_S
    return max(1, min(most_s, math.ceil(wanted_s))) if wanted_s else 1
