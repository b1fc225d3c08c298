"""Reads and writes policies as JSON: the form in which versions of them are stored, edited and compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gateway.config.display import digest, shown_value
from gateway.config.raw_config import Leaf, Table, tree
from gateway.config.table_reader import ConfigReader, join
from policies.errors import InvalidPolicy
from policies.ladder import Ladder
from policies.policy import Policy

_UNNUMBERED = "1"


def to_body(policy: Policy) -> dict[str, Any]:
    """Return everything but name and version, as JSON."""
    return {name: value for name, value in shown_value(policy).items() if name not in ("name", "version")}


def edited_mark(policy: Policy) -> str:
    """Return a digest of what differs from the defaults: a field that a newer version adds leaves it as it is."""
    plain = Policy(name=policy.name, version=policy.version)
    names = [
        each.name for each in dataclasses.fields(policy) if getattr(policy, each.name) != getattr(plain, each.name)
    ]
    return digest({name: shown_value(getattr(policy, name)) for name in names})


def from_body(name: str, body: Mapping[str, Any], ladder: Ladder, *, version: str | None = None) -> Policy:
    """Read a policy from its JSON; fields that are not there have their defaults.

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
    policy = read_policy(reader, tree(body, "body"), "", name, ladder, version=version)
    reader.finish()
    assert policy is not None, "finish raises where nothing could be read"
    return policy


def read_policy(
    reader: ConfigReader,
    node: Table | Leaf | None,
    path: str,
    name: str,
    ladder: Ladder,
    *,
    version: str | None = None,
    base: Policy | None = None,
) -> Policy | None:
    """Read one policy and hold it against the ladder; ``base`` has the values that are not written.

    Returns
    -------
    The policy, or None when there were problems; the reader has noted them.
    """
    source = "as in [policy]" if base else "default"
    given = {"name": name, "version": version or _UNNUMBERED}
    policy = reader.read(Policy, node, path, given=given, base=base, base_source=source)
    if policy is None:
        return None
    try:
        policy.check_against(ladder)
    except InvalidPolicy as error:
        reader.note(join(path, error.field_name), str(error))
    # The version is the content: an edited policy is another version without anyone counting.
    return policy if version else dataclasses.replace(policy, version=digest(shown_value(policy)))
