"""Policies as JSON: the form in which versions of them are stored, edited and compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gateway.config.display import digest, shown_value
from gateway.config.raw_config import Leaf, Table
from gateway.config.table_reader import ConfigReader
from policies.ladder import Ladder
from policies.policy import Policy

_IDENTITY = frozenset({"name", "version"})


def content_version(policy: Policy) -> str:
    """The version is the content: an edited policy is another version without anyone counting."""
    plain = dataclasses.replace(policy, version="1")
    return digest({each.name: shown_value(getattr(plain, each.name)) for each in dataclasses.fields(plain)})


def to_body(policy: Policy) -> dict[str, Any]:
    """Everything but name and version, as JSON."""
    fields = (each.name for each in dataclasses.fields(policy) if each.name not in _IDENTITY)
    return {name: shown_value(getattr(policy, name)) for name in fields}


def edited_mark(policy: Policy) -> str:
    """A digest of what differs from the defaults: it stays when a newer version of the software adds a field."""
    plain = Policy(name=policy.name)
    given = {each.name: getattr(policy, each.name) for each in dataclasses.fields(policy) if each.name != "version"}
    return digest({name: shown_value(value) for name, value in given.items() if value != getattr(plain, name)})


def from_body(name: str, body: Mapping[str, Any], ladder: Ladder, *, version: str | None = None) -> Policy:
    """A policy from its JSON; fields that are not there have their defaults.

    Parameters
    ----------
    version : as stored; None makes it from the content

    Raises
    ------
    SettingsError
        Unknown fields, values of the wrong type or out of range, tiers the ladder does not have; all of them at once,
        each with its path.
    """
    reader = ConfigReader()
    policy = reader.read(Policy, _table(body), "", given={"name": name, "version": version or "1"})
    reader.finish()
    assert policy is not None, "finish raises where nothing could be read"
    try:
        policy.check_against(ladder)
    except ValueError as error:
        reader.note(getattr(error, "field_name", ""), str(error))
        reader.finish()
    return policy if version is not None else dataclasses.replace(policy, version=content_version(policy))


def _table(body: Mapping[str, Any]) -> Table:
    return {key: _node(each) for key, each in body.items()}


def _node(value: Any) -> Table | Leaf:
    if isinstance(value, Mapping):
        return _table(value)
    return Leaf(value, "body")
