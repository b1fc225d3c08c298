"""A policy's JSON Schema, made of the policy's own class and of the words its documentation has for each field."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields
from decimal import Decimal
from enum import StrEnum
from typing import Any, Union, get_args, get_origin, get_type_hints

from gateway.config.display import shown_value
from gateway.config.reference import described
from policies.policy import Policy

_IDENTITY = frozenset({"name", "version"})
_PLAIN: Mapping[Any, dict[str, Any]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    Decimal: {"anyOf": [{"type": "number", "minimum": 0}, {"type": "string"}]},
}


def policy_schema() -> dict[str, Any]:
    """What a policy's body may hold; ranges are checked beyond it."""
    return _object(Policy, _IDENTITY)


def _object(cls: type[Any], hidden: frozenset[str] = frozenset()) -> dict[str, Any]:
    hints, meanings = get_type_hints(cls), described(cls)
    properties: dict[str, Any] = {}
    for each in fields(cls):
        if each.name in hidden:
            continue
        value = each.default_factory() if each.default_factory is not MISSING else each.default
        properties[each.name] = _type(hints[each.name]) | {"description": meanings.get(each.name, "")}
        if value is not MISSING and value is not None:
            properties[each.name]["default"] = shown_value(value)
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _type(annotation: Any) -> dict[str, Any]:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return {"anyOf": [{"type": "null"} if each is type(None) else _type(each) for each in args]}
    if origin is tuple:
        return {"type": "array", "items": _type(args[0])}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _type(args[1])}
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return {"type": "string", "enum": [each.value for each in annotation]}
    if hasattr(annotation, "__dataclass_fields__"):
        return _object(annotation)
    return dict(_PLAIN[annotation])
