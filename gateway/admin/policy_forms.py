"""A policy's forms: read from a request, compared, shown as a version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.admin.views import moment
from gateway.config.errors import SettingsError
from gateway.config.policy_body import from_body
from gateway.control.control_state import ControlState, group_quarantines_as_dict, quarantines_as_dict
from gateway.errors import InvalidRequest
from gateway.store.records import PolicyVersion
from policies.errors import InvalidPolicy
from policies.ladder import Ladder
from policies.policy import Policy

MAX_NAME = 64


def checked_policy(name: str, body: Mapping[str, Any], ladder: Ladder, where: str = "") -> Policy:
    """A policy from a request's JSON; ``where`` comes before the names of its fields.

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


def changes(before: Mapping[str, Any], after: Mapping[str, Any], where: str = "") -> list[dict[str, Any]]:
    """What differs between two bodies, field by field; what one of them lacks is null there."""
    found: list[dict[str, Any]] = []
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += changes(old, new, f"{where}{name}.")
        elif old != new:
            found.append({"field": f"{where}{name}", "from": old, "to": new})
    return found


def quarantine_view(state: ControlState, name: str) -> dict[str, Any]:
    """Router's version -> tier -> what the monitor asks of it; under ``groups`` the same by tenant and domain."""
    shown: dict[str, Any] = quarantines_as_dict({name: state.quarantines.get(name, {})}).get(name, {})
    groups = group_quarantines_as_dict({name: state.groups.get(name, {})}).get(name, {})
    return shown | ({"groups": groups} if groups else {})


def version_view(version: PolicyVersion) -> dict[str, Any]:
    """A stored version."""
    return {
        "object": "suffice.policy_version",
        "name": version.name,
        "version": version.version,
        "created_at": moment(version.created_at),
        "author": version.author,
        "note": version.note,
        "body": version.body,
    }


def checked_name(name: str) -> str:
    """A name that a path can hold.

    Raises
    ------
    InvalidRequest
    """
    if not 1 <= len(name) <= MAX_NAME or any(ord(char) < 33 or ord(char) == 127 for char in name):
        expected = f"1 to {MAX_NAME} characters without spaces or control characters"
        raise InvalidRequest(str(InvalidPolicy("name", name, expected)), param="name")
    return name
