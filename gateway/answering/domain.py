"""What a prompt is about, by the router's own word groups."""

from __future__ import annotations

from collections.abc import Mapping

# The groups that name a subject; the others say how a prompt is put.
DOMAINS = ("math", "code", "science", "medicine", "law", "finance", "history", "writing", "calendar", "unit")
_GROUPS = tuple((f"group_{name}", name) for name in DOMAINS)


def domain_of(features: Mapping[str, float]) -> str:
    """The subject whose words a prompt uses most; empty without any."""
    most, found = 0.0, ""
    for feature, name in _GROUPS:
        count = features.get(feature, 0.0)
        if count > most:
            most, found = count, name
    return found
