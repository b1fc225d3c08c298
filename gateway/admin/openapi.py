"""The OpenAPI 3.1 document of every path, made of the declarations by which requests are checked."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any

from gateway.admin.openapi_v1 import v1_paths
from gateway.admin.operation import Bytes, Fields, Operation
from gateway.admin.room import PREFIX
from gateway.api.fields import schema_of
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

_EVERY = (InvalidRequest, Unauthenticated, WrongScope, OriginRefused, StoreUnavailable)
_JSON = "application/json"

# What a wrong type is called, beside the code of a wrong value.
_WRONG_TYPE = "invalid_type"


def document(limits: BodyLimits, operations: Sequence[Operation], *, with_metrics: bool = True) -> dict[str, Any]:
    """The whole document.

    Parameters
    ----------
    limits : of the bodies of ``/v1``
    operations : of the administration; none when it is switched off
    """
    paths: dict[str, Any] = v1_paths(limits, error_responses, with_metrics=with_metrics)
    for operation in operations:
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
            "schemas": {"Error": _ERROR},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "A key of the scope `use`."},
                "adminKey": {"type": "http", "scheme": "bearer", "description": "A key of the scope `admin`."},
            },
        },
        "tags": [
            {"name": "use", "description": "OpenAI's protocol."},
            {"name": "health", "description": "For those who watch the server."},
            {"name": "admin", "description": "Steering and looking into it."},
        ],
    }


def errors_of(operation: Operation) -> tuple[type[Exception], ...]:
    """Every exception class that an operation documents."""
    found: list[type[Exception]] = [*_EVERY, *operation.errors]
    if operation.body is not None:
        found += [BodyTooLarge, BodyTooSlow]
        if not isinstance(operation.body, Bytes):
            found.append(MalformedBody)
    if operation.conditional != "no":
        found.append(PreconditionFailed)
    if operation.conditional == "must":
        found.append(PreconditionRequired)
    return tuple(dict.fromkeys(found))


def codes_of(errors: Iterable[type[Exception]], *, is_typed: bool = True) -> dict[int, set[str]]:
    """Status -> codes; ``is_typed`` where something of the request can be of a wrong type."""
    found: dict[int, set[str]] = defaultdict(set)
    for each in errors:
        row = row_of_class(each)
        found[row.status].add(row.code)
        if each is InvalidRequest and is_typed:
            found[row.status].add(_WRONG_TYPE)
    return dict(found)


def error_responses(errors: Iterable[type[Exception]], *, is_typed: bool = True) -> dict[str, Any]:
    """The error responses of an operation, one a status, each with the codes it may carry."""
    found = {}
    for status, codes in sorted(codes_of(errors, is_typed=is_typed).items()):
        narrowed = {"properties": {"error": {"properties": {"code": {"enum": sorted(codes)}}}}}
        response: dict[str, Any] = {
            "description": ", ".join(f"`{code}`" for code in sorted(codes)),
            "content": {_JSON: {"schema": {"allOf": [{"$ref": "#/components/schemas/Error"}, narrowed]}}},
        }
        if status in (429, 503):
            response["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}}
        found[str(status)] = response
    return found


def _operation(operation: Operation) -> dict[str, Any]:
    success: dict[str, Any] = {
        "description": "Done.",
        "content": {_JSON: {"schema": dict(operation.returns)}},
    }
    if operation.conditional != "no":
        success["headers"] = {"ETag": {"schema": {"type": "string"}, "description": "What the next change rests on."}}
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "tags": ["admin"],
        "security": [{"adminKey": []}],
        "parameters": [*_path_parameters(operation.path), *_query(operation.query), *_conditions(operation)],
        "responses": {str(operation.status): success}
        | error_responses(errors_of(operation), is_typed=_is_typed(operation)),
    }
    if isinstance(operation.body, Bytes):
        content = {operation.body.media_type: {"schema": {"type": "string", "format": "binary"}}}
        described["requestBody"] = {"required": True, "content": content}
    elif (schema := operation.body_schema()) is not None:
        described["requestBody"] = {"required": bool(schema.get("required")), "content": {_JSON: {"schema": schema}}}
    return described


def _is_typed(operation: Operation) -> bool:
    """Whether anything of the request can be of a wrong type: a query is text, except where it stands for a number."""
    kinds = {schema_of(each.check).get("type") for each in operation.query.values()}
    return bool(kinds & {"integer", "number", "boolean"}) or isinstance(operation.body, Mapping)


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]


def _query(declared: Fields) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "query",
            "required": each.required,
            "description": each.help,
            "schema": schema_of(each.check)
            | ({} if each.default in (None, "") or isinstance(each.default, tuple) else {"default": each.default}),
        }
        for name, each in declared.items()
    ]


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
                "param": {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "The field to blame."},
                "code": {"type": "string"},
            },
        }
    },
}
