"""Writes the OpenAPI 3.1 document of every path from the declarations by which requests are checked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from importlib import metadata
from typing import TYPE_CHECKING, Any

from gateway.admin.api import PREFIX, admin_operations
from gateway.admin.openapi_v1 import v1_paths
from gateway.admin.operation import Operation, answer_schema
from gateway.api.declaration import schema_of
from gateway.api.generation_body import BodyLimits
from gateway.edge.error_table import row_of_class
from gateway.errors import (
    BodyTooLarge,
    BodyTooSlow,
    InvalidRequest,
    MalformedBody,
    OriginRefused,
    PreconditionFailed,
    PreconditionRequired,
    Unauthenticated,
    WrongScope,
)
from gateway.store.errors import StoreUnavailable

if TYPE_CHECKING:
    from gateway.config.settings import Settings

_EVERY = (InvalidRequest, Unauthenticated, WrongScope, OriginRefused, StoreUnavailable)
_JSON = "application/json"

# What a wrong type is called, beside the code of a wrong value.
_WRONG_TYPE = "invalid_type"


def describe_settings(settings: Settings) -> dict[str, Any]:
    """Return the document of a server with these settings."""
    numbers = {tier.name: tier.index for tier in settings.ladder}
    names = numbers | {f"tier-{tier.index}": tier.index for tier in settings.ladder}
    return document(settings, BodyLimits(settings.server, names))


def document(settings: Settings, limits: BodyLimits) -> dict[str, Any]:
    """Return the whole document; ``limits`` are those of the bodies of ``/v1``."""
    paths: dict[str, Any] = v1_paths(limits, error_responses, with_metrics=settings.metrics.enabled)
    for operation in admin_operations(settings.admin) if settings.admin.enabled else ():
        paths.setdefault(PREFIX + operation.path, {})[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Suffice",
            "version": metadata.version("suffice"),
            "summary": "Answers every request with the cheapest model that suffices.",
        },
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "A key of the scope `use`."},
                "adminKey": {"type": "http", "scheme": "bearer", "description": "A key of the scope `admin`."},
            },
        },
        "tags": [
            {"name": "use", "description": "OpenAI's and Anthropic's protocols."},
            {"name": "health", "description": "For those who watch the server."},
            {"name": "admin", "description": "Steering and looking into it."},
        ],
    }


def errors_of(operation: Operation) -> tuple[type[Exception], ...]:
    """Return every exception class that an operation documents."""
    found: list[type[Exception]] = [*_EVERY, *operation.errors]
    if operation.body_kind != "none":
        found += [BodyTooLarge, BodyTooSlow]
    if operation.body_kind in ("members", "free"):
        found.append(MalformedBody)
    if operation.conditional != "no":
        found.append(PreconditionFailed)
    if operation.conditional == "must":
        found.append(PreconditionRequired)
    return tuple(dict.fromkeys(found))


def codes_of(errors: Iterable[type[Exception]], *, is_typed: bool = True) -> dict[int, set[str]]:
    """Return codes by status; ``is_typed`` where something of the request can be of a wrong type."""
    found: dict[int, set[str]] = defaultdict(set)
    for each in errors:
        row = row_of_class(each)
        found[row.status].add(row.code)
        if each is InvalidRequest and is_typed:
            found[row.status].add(_WRONG_TYPE)
    return dict(found)


def error_responses(
    errors: Iterable[type[Exception]], *, is_typed: bool = True, schema: str = "Error"
) -> dict[str, Any]:
    """Return the error responses of an operation, one a status, each with the codes it may carry."""
    found = {}
    for status, codes in sorted(codes_of(errors, is_typed=is_typed).items()):
        narrowed = {"properties": {"error": {"properties": {"code": {"enum": sorted(codes)}}}}}
        response: dict[str, Any] = {
            "description": ", ".join(f"`{code}`" for code in sorted(codes)),
            "content": {_JSON: {"schema": {"allOf": [{"$ref": f"#/components/schemas/{schema}"}, narrowed]}}},
        }
        if status in (429, 503):
            response["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}}
        found[str(status)] = response
    return found


def _operation(operation: Operation) -> dict[str, Any]:
    success: dict[str, Any] = {
        "description": "Done.",
        "content": {_JSON: {"schema": answer_schema(operation.returns)}},
    }
    if operation.conditional != "no":
        success["headers"] = {"ETag": {"schema": {"type": "string"}, "description": "What the next change rests on."}}
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "tags": ["admin"],
        "security": [{"adminKey": []}],
        "parameters": [*_parameters(operation), *_conditions(operation)],
        "responses": {str(operation.status): success}
        | error_responses(errors_of(operation), is_typed=_is_typed(operation)),
    }
    if operation.body_kind == "bytes":
        content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
        described["requestBody"] = {"required": True, "content": content}
    elif operation.body_kind != "none":
        schema = operation.body_schema()
        described["requestBody"] = {"required": bool(schema.get("required")), "content": {_JSON: {"schema": schema}}}
    return described


def _is_typed(operation: Operation) -> bool:
    """Whether anything of the request can be of a wrong type: a query is text, except where it stands for a number."""
    kinds = {schema.get("type") for schema in operation.query_schemas.values()}
    return bool(kinds & {"integer", "boolean"}) or operation.body_kind == "members"


def _parameters(operation: Operation) -> Iterator[dict[str, Any]]:
    for name in operation.path_parameters:
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    required = () if operation.query is None else schema_of(operation.query)["required"]
    for name, schema in operation.query_schemas.items():
        schema = dict(schema)
        about = {"required": name in required, "description": schema.pop("description")}
        yield {"name": name, "in": "query", **about, "schema": schema}


def _conditions(operation: Operation) -> list[dict[str, Any]]:
    if operation.conditional == "no":
        return []
    text = "The ETag that the change rests on."
    found = [{"name": "If-Match", "in": "header", "required": False, "description": text, "schema": {"type": "string"}}]
    if operation.conditional == "must":
        create = "`*`: only if there is none yet. One of this and `If-Match` must be sent."
        schema = {"type": "string", "const": "*"}
        found.append(
            {"name": "If-None-Match", "in": "header", "required": False, "description": create, "schema": schema}
        )
    return found


_PARAM = {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "The field to blame."}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _PARAM,
                "code": {"type": "string"},
            },
        }
    },
}
# Anthropic's, with the members of ours that its clients pass over.
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "additionalProperties": False,
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message", "code"],
            "additionalProperties": False,
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string"},
                "code": {"type": "string"},
                "param": _PARAM,
                "details": {"type": "object", "description": "What Anthropic's packages act upon."},
            },
        },
        "request_id": {"type": "string"},
    },
}
