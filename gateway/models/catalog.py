"""Resolves what a request's ``model`` may name: ``auto``, a tier, a served model, a policy; and its backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backends.protocol import Backend
from gateway.errors import InvalidRequest, UnknownModel
from policies.errors import OutsideRegions
from policies.ladder import Ladder
from policies.policy import Policy
from policies.types import Tier

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Target:
    """Holds what a model name stands for: a policy to decide by, or a tier to go to."""

    kind: str
    policy: Policy
    tier: Tier | None = None


class Catalog:
    """All names that are served, and what is behind them.

    Where two kinds share a name, the first of ``auto``, tier name, ``tier-N``, served model and policy wins. A model on
    several tiers stands for the cheapest of them.
    """

    def __init__(
        self, ladder: Ladder, policy: Policy, policies: Mapping[str, Policy], backends: Mapping[str, Backend]
    ) -> None:
        self.ladder = ladder
        self.backends = backends
        self._regions = {tier.model: tier.region for tier in ladder}
        self.tier_numbers = {tier.name: tier.index for tier in ladder} | {f"tier-{t.index}": t.index for t in ladder}
        self.replace_policies(policies, policy)

    def replace_policies(self, policies: Mapping[str, Policy], default: Policy) -> None:
        """Serve by other policies from now on; requests that have read theirs keep them."""
        targets: dict[str, Target] = {AUTO: Target("auto", default)}
        for tier in self.ladder:
            targets.setdefault(tier.name, Target("tier", default, tier))
        for tier in self.ladder:
            targets.setdefault(f"tier-{tier.index}", Target("tier", default, tier))
        for tier in self.ladder:
            targets.setdefault(tier.model, Target("model", default, tier))
        for name, each in policies.items():
            targets.setdefault(name, Target("policy", each))
        self._policies, self._default, self._targets = dict(policies), default, targets

    @property
    def policies(self) -> Mapping[str, Policy]:
        """Return the active policies, with what was derived for them."""
        return self._policies

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._targets)

    def resolve(self, model: str) -> Target:
        """Return what ``model`` stands for.

        Raises
        ------
        UnknownModel
        """
        target = self._targets.get(model)
        if target is None:
            raise UnknownModel(model, self.names)
        return target

    def policy(self, name: str) -> Policy:
        """A policy asked for by ``suffice.policy``.

        Raises
        ------
        InvalidRequest
        """
        if name not in self._policies:
            known = ", ".join(self._policies)
            raise InvalidRequest(
                f"'suffice.policy' is {name[:80]!r}; the policies are {known}.",
                param="suffice.policy",
                code="unknown_policy",
            )
        return self._policies[name]

    def backend(self, tier: Tier) -> Backend:
        return self.backends[tier.model]

    def embedder(self, model: str, regions: tuple[str, ...] = ()) -> tuple[str, Backend]:
        """The served model that embeds for this name: the named one, or for ``auto`` the first that can and may.

        A model is where its tiers are, and in no region without one. ``regions`` narrows those of the default policy.

        Raises
        ------
        UnknownModel
            The name is not served, or what it names makes no embeddings.
        OutsideRegions
            Default policy or request does not permit where it is.
        """
        able = {name: each for name, each in self.backends.items() if "embed" in each.capabilities}
        target = self._targets.get(model)
        name = target.tier.model if target is not None and target.tier is not None else model
        if name not in able and not (model == AUTO and able):
            raise UnknownModel(model, tuple(able))
        limits = [each for each in (self._default.allowed_regions, regions) if each]
        for each in able if model == AUTO else (name,):
            if all(self._regions.get(each) in limit for limit in limits):
                return each, able[each]
        said = " and ".join(", ".join(limit) for limit in limits)
        field = "regions" if regions else "policy"
        raise OutsideRegions(f"No model that makes embeddings for {model!r} is in {said}.", fields=(field,))

    def listing(self, created_s: int) -> list[dict[str, Any]]:
        """The entries of ``GET /v1/models``."""
        entries = [self._entry(name, target, created_s) for name, target in self._targets.items()]
        for name in self.backends:
            if name not in self._targets:
                entries.append(_model_entry(name, created_s) | {"suffice": {"kind": "embeddings"}})
        return entries

    def entry(self, model: str, created_s: int) -> dict[str, Any]:
        """One entry.

        Raises
        ------
        UnknownModel
        """
        for entry in self.listing(created_s):
            if entry["id"] == model:
                return entry
        raise UnknownModel(model, self.names)

    def _entry(self, name: str, target: Target, created_s: int) -> dict[str, Any]:
        note: dict[str, Any] = {"kind": target.kind}
        if target.tier is None:
            note["policy"] = {"name": target.policy.name, "version": target.policy.version}
            note["tiers"] = [tier.index for tier in self.ladder if target.policy.permits(tier)]
            return _model_entry(name, created_s) | {"suffice": note}
        tier, backend = target.tier, self.backend(target.tier)
        context = tier.context_length or backend.context_length
        note |= {
            "tier": tier.index,
            "name": tier.name,
            "model": tier.model,
            "price_per_request_usd": str(tier.price_per_request_usd),
            "price_per_input_token_usd": str(tier.price_per_input_token_usd),
            "price_per_output_token_usd": str(tier.price_per_output_token_usd),
            "region": tier.region,
        }
        # vLLM's name for it, which clients of local servers read.
        return _model_entry(name, created_s) | {"max_model_len": context, "suffice": note}


def _model_entry(name: str, created_s: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created_s, "owned_by": "suffice"}
