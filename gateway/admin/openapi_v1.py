"""Describes the paths outside the administration for OpenAPI."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from msgspec import defstruct

from backends import errors as backends
from gateway.admin.listing import Listing
from gateway.admin.operation import answer_schema
from gateway.admin.record_views import Json, Usd
from gateway.api.chat_codec import ChatDecoder
from gateway.api.completion_codec import CompletionDecoder
from gateway.api.declaration import schema_of
from gateway.api.embedding_decoder import EmbeddingBody
from gateway.api.generation_body import BodyLimits
from gateway.api.messages_decoder import CountBody, MessagesDecoder
from gateway.api.responses_decoder import ResponsesDecoder
from gateway.endpoints.feedback import FeedbackBody
from gateway.endpoints.responses import ItemsQuery
from gateway.errors import (
    AnswerFailed,
    BodiesFull,
    BodyTooLarge,
    BodyTooSlow,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    MalformedBody,
    OriginRefused,
    PreviousResponseNotFound,
    QueueFull,
    QuotaExhausted,
    RateLimited,
    RequestNotFound,
    ResponseNotFound,
    Unauthenticated,
    UnknownModel,
    UnsupportedOption,
    WrongScope,
)
from gateway.store.errors import FeedbackFull, StoreUnavailable
from gateway.verify.errors import IdempotencyKeyReused
from policies import errors as policies


class ErrorResponses(Protocol):
    """Describes the responses of errors; ``schema`` is the component that says how they are worded."""

    def __call__(self, errors: Iterable[type[Exception]], *, schema: str = ...) -> dict[str, Any]: ...


_CALLER = (Unauthenticated, WrongScope, OriginRefused, StoreUnavailable)
_PLAIN_BODY = (InvalidRequest, MalformedBody, BodyTooLarge, BodyTooSlow)
_BODY = (*_PLAIN_BODY, BodiesFull, UnsupportedOption)
_PLACE = (RateLimited, QueueFull, Draining, DeadlineExceeded, UnknownModel)
EMBEDDING_ERRORS = (*_CALLER, *_BODY, *_PLACE)
GENERATION_ERRORS = (
    *EMBEDDING_ERRORS,
    QuotaExhausted,
    policies.ConflictingLimits,
    policies.NoTierFits,
    backends.BackendUnavailable,
    backends.BackendOverloaded,
    backends.BackendRefused,
    backends.BackendTimeout,
    backends.BackendFailure,
    AnswerFailed,
)
COUNT_ERRORS = (*EMBEDDING_ERRORS, policies.ConflictingLimits, backends.BackendUnavailable)
READING_ERRORS = _CALLER
_JSON = "application/json"
_STREAM = {"type": "string", "description": "Events of OpenAI's stream."}
_ANTHROPIC_STREAM = {"type": "string", "description": "Events of Anthropic's stream."}
_TEXT = {"type": "string"}


def _answer(**members: Any) -> dict[str, Any]:
    """Return the JSON Schema of an answer with these members."""
    return answer_schema(defstruct("Answer", list(members.items())))


_USAGE = defstruct("TokenUsage", [("prompt_tokens", int), ("completion_tokens", int), ("total_tokens", int)])
_SPENT = defstruct("PromptUsage", [("prompt_tokens", int), ("total_tokens", int)])
_NOTE = defstruct("AnswerNote", [("request_id", str), ("tier", int), ("reason", str), ("cost_usd", Usd)])
_MODEL = defstruct("ModelEntry", [("id", str), ("object", str), ("created", int), ("owned_by", str)])
_GENERATED = _answer(id=str, object=str, created=int, model=str, choices=list[Json], usage=_USAGE, suffice=_NOTE)
_RESPONSE = _answer(id=str, object=str, created_at=int, status=str, output=list[Json], usage=Json, suffice=_NOTE)
_DELETED = _answer(id=str, object=str, deleted=bool)
_ITEMS = _answer(object=str, data=list[Json], has_more=bool)
_MESSAGE = _answer(id=str, type=str, role=str, content=list[Json], stop_reason=str, usage=Json, suffice=_NOTE)
_VECTORS = _answer(object=str, data=list[Json], model=str, usage=_SPENT)
_COUNT = _answer(input_tokens=int)
_FEEDBACK = _answer(id=str, object=str, request_id=str, kind=str)
_EXPLAINED = _answer(id=str, decision=Json, tiers=list[Json])


def v1_paths(limits: BodyLimits, error_responses: ErrorResponses, *, with_metrics: bool) -> dict[str, Any]:
    """Return path -> method -> operation."""

    def asking(name: str, summary: str, schema: Mapping[str, Any], responses: Mapping[str, Any]) -> dict[str, Any]:
        content = {_JSON: {"schema": schema}}
        body = {"requestBody": {"required": True, "content": content}, "responses": responses}
        return {"post": _use(name, summary) | {"parameters": _headers(limits)} | body}

    def generation(
        name: str,
        summary: str,
        schema: Mapping[str, Any],
        answer: Mapping[str, Any] = _GENERATED,
        *errors: type[Exception],
    ) -> dict[str, Any]:
        return asking(name, summary, schema, _success(answer, _STREAM) | error_responses((*GENERATION_ERRORS, *errors)))

    def reading(name: str, summary: str, schema: Mapping[str, Any], *errors: type[Exception], path: str = "") -> Any:
        return {
            "get": _use(name, summary)
            | {
                "parameters": [_path(path)] if path else [],
                "responses": _success(schema) | error_responses((*READING_ERRORS, *errors)),
            }
        }

    embeddings = _use("create_embedding", "Vectors of texts.") | {
        "requestBody": {"required": True, "content": {_JSON: {"schema": schema_of(EmbeddingBody)}}},
        "responses": _success(_VECTORS) | error_responses(EMBEDDING_ERRORS),
    }
    feedback = _use("create_feedback", "Report what you know of an answer.") | {
        "parameters": [{"name": "Idempotency-Key", "in": "header", "required": False, "schema": _TEXT}],
        "requestBody": {
            "required": True,
            "content": {_JSON: {"schema": schema_of(FeedbackBody)}},
        },
        "responses": _success(_FEEDBACK)
        | error_responses((*_CALLER, *_PLAIN_BODY, RateLimited, RequestNotFound, FeedbackFull, IdempotencyKeyReused)),
    }
    found: dict[str, Any] = {
        "/v1/chat/completions": generation(
            "create_chat_completion", "Answer a conversation, whole or as a stream.", ChatDecoder(limits).schema()
        ),
        "/v1/completions": generation("create_completion", "Continue a text.", CompletionDecoder(limits).schema()),
        "/v1/responses": generation(
            "create_response",
            "Answer a conversation of items.",
            ResponsesDecoder(limits).schema(),
            _RESPONSE,
            PreviousResponseNotFound,
        ),
        **_kept_responses(error_responses),
        "/v1/messages": asking(
            "create_message",
            "Answer a conversation of blocks.",
            MessagesDecoder(limits).schema(),
            _success(_MESSAGE, _ANTHROPIC_STREAM) | error_responses(GENERATION_ERRORS, schema="AnthropicError"),
        ),
        "/v1/messages/count_tokens": asking(
            "count_message_tokens",
            "How many tokens a conversation of blocks has.",
            MessagesDecoder(limits, CountBody).schema(),
            _success(_COUNT) | error_responses(COUNT_ERRORS, schema="AnthropicError"),
        ),
        "/v1/embeddings": {"post": embeddings},
        "/v1/feedback": {"post": feedback},
        "/v1/models": reading(
            "list_models",
            "What `model` may name.",
            answer_schema(Listing[_MODEL]),  # type: ignore[valid-type]
        ),
        "/v1/models/{model}": reading("get_model", "One of them.", answer_schema(_MODEL), UnknownModel, path="model"),
        "/v1/requests/{request_id}": reading(
            "explain_request",
            "Why a request of yours went where it went.",
            _EXPLAINED,
            RequestNotFound,
            path="request_id",
        ),
        "/healthz": _health("get_health", "The process answers."),
        "/readyz": _health(
            "get_readiness", "Every tier has just made a token; to administrators, also which have not.", 503
        ),
        "/openapi.json": _health("get_openapi", "This document."),
    }
    page = {"description": "A page of HTML.", "content": {"text/html": {"schema": {"type": "string"}}}}
    found["/docs"] = {
        "get": {
            "operationId": "get_docs",
            "summary": "This document, to read.",
            "tags": ["health"],
            "security": [{}],
            "responses": {"200": page},
        }
    }
    if with_metrics:
        metrics = {"description": "Prometheus's text.", "content": {"text/plain": {"schema": {"type": "string"}}}}
        found["/metrics"] = {
            "get": {
                "operationId": "get_metrics",
                "summary": "Counters.",
                "tags": ["health"],
                "security": [{"key": []}, {}],
                "responses": {"200": metrics} | error_responses((Unauthenticated, WrongScope, OriginRefused)),
            }
        }
    return found


def _kept_responses(error_responses: ErrorResponses) -> dict[str, Any]:
    """Return the operations on responses that are kept."""
    path = "/v1/responses/{response_id}"

    def operation(
        name: str, summary: str, answer: Mapping[str, Any] | None, *errors: type[Exception], query: Sequence[Json] = ()
    ) -> dict[str, Any]:
        found = error_responses((*_CALLER, RateLimited, ResponseNotFound, *errors))
        return _use(name, summary) | {
            "parameters": [_path("response_id"), *query],
            "responses": found if answer is None else _success(answer) | found,
        }

    queried = [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in schema_of(ItemsQuery)["properties"].items()
    ]
    return {
        path: {
            "get": operation("get_response", "A response that is kept.", _RESPONSE, UnsupportedOption),
            "delete": operation("delete_response", "Forget it.", _DELETED),
        },
        f"{path}/input_items": {
            "get": operation("list_input_items", "What it answers.", _ITEMS, InvalidRequest, query=queried)
        },
        f"{path}/cancel": {
            "post": operation("cancel_response", "Refused: none runs in the background.", None, UnsupportedOption)
        },
    }


def _use(name: str, summary: str) -> dict[str, Any]:
    return {"operationId": name, "summary": summary, "tags": ["use"], "security": [{"key": []}, {}]}


def _health(name: str, summary: str, *more: int) -> dict[str, Any]:
    response = {"description": "As it says.", "content": {_JSON: {"schema": {"type": "object"}}}}
    responses = {str(status): response for status in (200, *more)}
    return {"get": {"operationId": name, "summary": summary, "tags": ["health"], "responses": responses}}


def _success(schema: Mapping[str, Any], stream: Mapping[str, Any] | None = None) -> dict[str, Any]:
    content: dict[str, Any] = {_JSON: {"schema": schema}}
    if stream is not None:
        content["text/event-stream"] = {"schema": stream}
    return {"200": {"description": "Done.", "content": content}}


def _headers(limits: BodyLimits) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "header", "required": False, "schema": schema}
        for name, schema in limits.header_schemas().items()
    ]


def _path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": _TEXT}
