"""Declares what a key may use, and binds requests to it: policies, tiers and regions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any

from msgspec import Meta, structs

from gateway.api.declaration import ClosedShape, Words, checked, wrong_value
from gateway.api.request import InferenceRequest, RoutingPreferences
from gateway.errors import InvalidRequest, PolicyNotPermitted
from gateway.models.catalog import Catalog
from policies.ladder import Ladder
from policies.types import EVERYTHING, Permissions

_MOST = 64


def _nothing(value: Any, param: str) -> InvalidRequest | None:
    # A list that was left empty by mistake must not mean "any".
    return wrong_value(param, "at least one name, or null for any", "an empty list") if value == [] else None


Name = Annotated[str, Meta(min_length=1, max_length=64)]
Names = Annotated[tuple[Name, ...], Meta(min_length=1, max_length=_MOST), Words(items="strings", error=_nothing)]
TierName = Annotated[int | Name, Words(kind="a tier's name or number")]
TierNames = Annotated[tuple[TierName, ...], Meta(min_length=1, max_length=_MOST), Words(error=_nothing)]


class KeyPermissions(ClosedShape, frozen=True):
    """What one key may use; null is any. Tiers go by name or number, and are kept by name."""

    member = "permission"

    allowed_policies: Annotated[Names | None, Meta(description="Policies that its requests may be decided by.")] = None
    allowed_tiers: Annotated[TierNames | None, Meta(description="Tiers that its prompts may be sent to.")] = None
    allowed_regions: Annotated[Names | None, Meta(description="Regions that its prompts may be sent to.")] = None


ANYTHING = KeyPermissions()


def read_permissions(value: Any, param: str) -> KeyPermissions:
    """Return the permissions a JSON object states.

    Raises
    ------
    InvalidRequest
    """
    return checked(value, KeyPermissions, param)


def named_permissions(given: KeyPermissions, ladder: Ladder, policies: Iterable[str], scope: str) -> dict[str, Any]:
    """Return permissions as they are stored, each thing by its name: numbers of tiers change with the ladder.

    Raises
    ------
    InvalidRequest
        A policy, tier or region that there is not; or a key of a scope that uses none.
    """
    if given != KeyPermissions() and scope != "use":
        said = f"A key of the scope {scope!r} uses no models, so it can have no permissions."
        raise InvalidRequest(said, param="permissions")
    numbers = {alias: tier.name for tier in ladder for alias in (tier.index, f"{tier.index}", f"tier-{tier.index}")}
    known = {
        "allowed_policies": tuple(policies),
        "allowed_tiers": tuple(tier.name for tier in ladder),
        "allowed_regions": tuple(dict.fromkeys(tier.region for tier in ladder if tier.region is not None)),
    }
    found: dict[str, Any] = {}
    for kind, there in known.items():
        for place, written in enumerate(getattr(given, kind) or ()):
            name = numbers.get(written, written) if kind == "allowed_tiers" and written not in there else written
            if name not in there:
                expected = f"one of {', '.join(there)}" if there else "none: there is none"
                raise wrong_value(f"permissions.{kind}[{place}]", expected, written)
            found.setdefault(kind, []).append(name)
    return {kind: list(dict.fromkeys(names)) for kind, names in found.items()}


def stored_permissions(stored: Mapping[str, Any]) -> Permissions:
    """Return the permissions that a key's row holds; :data:`EVERYTHING` itself where it has none."""
    return Permissions(**{kind: tuple(names) for kind, names in stored.items()}) if stored else EVERYTHING


def bound_request(request: InferenceRequest, permissions: Permissions, catalog: Catalog) -> InferenceRequest:
    """Return a request that can go nowhere but where its key may.

    Whatever decides about it later, and whatever replays it from the log, reads the permissions beside what was asked.

    Raises
    ------
    UnknownModel, PolicyNotPermitted
    """
    asked = request.preferences
    target = catalog.resolve(request.model, permissions)
    named = {"suffice.policy": asked.policy, "model": target.policy.name if target.kind == "policy" else None}
    for param, name in named.items():
        if name is not None and not permissions.permits_policy(name):
            raise PolicyNotPermitted(name, permissions.allowed_policies, param)
    # By name, so that the default policy cannot change to another while the request waits for its place.
    policy = asked.policy or named["model"] or catalog.default_policy(permissions).name
    bounds = {kind: names for kind in ("allowed_tiers", "allowed_regions") if (names := getattr(permissions, kind))}
    preferences = RoutingPreferences(
        replace(asked.overrides, permissions=permissions),
        policy,
        asked.priority,
        {**asked.given, "permissions": bounds} if bounds else asked.given,
    )
    return structs.replace(request, preferences=preferences)
