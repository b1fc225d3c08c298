"""Knows a policy's JSON: its schema, how one is read from a request, compared, and shown with its quarantines."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from msgspec import Meta

from gateway.config.display import shown_value
from gateway.config.errors import SettingsError
from gateway.config.policy_body import from_body
from gateway.config.reference import described
from gateway.control.control_state import ControlState, group_quarantines_as_dict, quarantines_as_dict
from gateway.errors import InvalidRequest
from policies.errors import InvalidPolicy
from policies.ladder import Ladder
from policies.policy import Policy

MAX_NAME = 64

_IDENTITY = frozenset({"name", "version"})
_PLAIN: Mapping[Any, dict[str, Any]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    Decimal: {"anyOf": [{"type": "number", "minimum": 0}, {"type": "string"}]},
}


def checked_policy(name: str, body: Mapping[str, Any], ladder: Ladder, where: str = "") -> Policy:
    """Return a policy from a request's JSON; ``where`` comes before the names of its fields.

    Raises
    ------
    InvalidRequest
        Says all that is wrong, and names the first field.
    """
    try:
        return from_body(checked_name(name), body, ladder)
    except SettingsError as error:
        said = "; ".join(f"{where}{each.path}: {each.message}" for each in error.problems)
        raise InvalidRequest(f"The policy cannot be used: {said}.", param=f"{where}{error.problems[0].path}") from error


def checked_name(name: str) -> str:
    """Return a name that a path can hold.

    Raises
    ------
    InvalidRequest
    """
    if not 1 <= len(name) <= MAX_NAME or any(ord(char) < 33 or ord(char) == 127 for char in name):
        expected = f"1 to {MAX_NAME} characters without spaces or control characters"
        raise InvalidRequest(str(InvalidPolicy("name", name, expected)), param="name")
    return name


def changes(before: Mapping[str, Any], after: Mapping[str, Any], where: str = "") -> list[dict[str, Any]]:
    """Return what differs between two bodies, field by field; what one of them lacks is null there."""
    found: list[dict[str, Any]] = []
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += changes(old, new, f"{where}{name}.")
        elif old != new:
            found.append({"field": f"{where}{name}", "from": old, "to": new})
    return found


def quarantine_view(state: ControlState, name: str) -> dict[str, Any]:
    """Return what the monitor asks: router's version -> tier -> threshold; under ``groups`` by tenant and domain."""
    shown: dict[str, Any] = quarantines_as_dict({name: state.quarantines.get(name, {})}).get(name, {})
    groups = group_quarantines_as_dict({name: state.groups.get(name, {})}).get(name, {})
    return shown | ({"groups": groups} if groups else {})


def policy_schema() -> dict[str, Any]:
    """Return the JSON Schema of a policy's body, from the policy's class and its documentation.

    Ranges are checked beyond it.
    """
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
    if isinstance(annotation, type) and is_dataclass(annotation):
        return _object(annotation)
    return dict(_PLAIN[annotation])


# Checked by `checked_policy`, which says all that is wrong at once, as for a policy in a file.
PolicyBody = Annotated[dict[str, Any], Meta(extra_json_schema=policy_schema())]
