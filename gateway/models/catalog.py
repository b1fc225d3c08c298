"""Resolves what a request's ``model`` may name: ``auto``, a tier, a served model, a policy; and its backend."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache, partial
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

from backends.protocol import Backend
from gateway.config.ladder_tables import AUTO
from gateway.errors import InvalidRequest, PolicyNotPermitted, UnknownModel
from policies.errors import OutsideRegions, TierNotPermitted
from policies.ladder import Ladder
from policies.policy import Policy
from policies.types import EVERYTHING, Permissions, Tier


@dataclass(frozen=True, slots=True)
class Target:
    """Holds what a model name stands for: a policy to decide by, or a tier to go to."""

    kind: str
    policy: Policy
    tier: Tier | None = None


class Catalog:
    """All names that are served, and what is behind them.

    Where two kinds share a name, the first of ``auto``, tier name, ``tier-N``, served model, policy and alias wins. A
    model on several tiers stands for the cheapest of them.

    ``shares_prefix_cache``: tenants may read each other's prefixes from the backends' caches.
    ``embedding_prices_usd``: served model -> price of a token read for its vector, where it is not that of its tier.
    ``aliases``: further name, or beginning of names before a ``*`` -> one of the names above; the longest match counts.
    """

    def __init__(
        self,
        ladder: Ladder,
        policy: Policy,
        policies: Mapping[str, Policy],
        backends: Mapping[str, Backend],
        *,
        shares_prefix_cache: bool = False,
        embedding_prices_usd: Mapping[str, Decimal] = MappingProxyType({}),
        aliases: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._aliases = aliases
        self._embedding_prices_usd = embedding_prices_usd
        # Of this process alone: caches live no longer, and no tenant's salt can be guessed from its name.
        self._salt = None if shares_prefix_cache else lru_cache(1024)(partial(_keyed_hash, secrets.token_bytes(16)))
        self.ladder = ladder
        self.backends = backends
        # When each model last answered a request, by ``time.monotonic``: it works, whoever asked.
        self.answered_s: dict[str, float] = {}
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

    def names(self, permissions: Permissions = EVERYTHING) -> tuple[str, ...]:
        """Return what a caller may name as its model."""
        return tuple(self._targets if permissions is EVERYTHING else dict(self._usable(permissions)))

    def resolve(self, model: str, permissions: Permissions = EVERYTHING) -> Target:
        """Return what ``model`` stands for; ``permissions`` say which names an error may tell.

        Raises
        ------
        UnknownModel
        """
        target = self._targets.get(model) or self._targets.get(self._unaliased(model))
        if target is None:
            raise UnknownModel(model, self.names(permissions))
        return target

    def _unaliased(self, model: str) -> str:
        """Return the name that another stands for; a name of its own, and one that nobody knows, stay."""
        if model in self._targets or model in self.backends or not self._aliases:
            return model
        if model in self._aliases:
            return self._aliases[model]
        matching = [each for each in self._aliases if each.endswith("*") and model.startswith(each[:-1])]
        return self._aliases[max(matching, key=len)] if matching else model

    def default_policy(self, permissions: Permissions) -> Policy:
        """Return the policy of a caller that names none: the default one, or the first that its key permits.

        Raises
        ------
        PolicyNotPermitted
            None of those that the key permits is served.
        """
        if permissions.permits_policy(self._default.name):
            return self._default
        served = [self._policies[name] for name in permissions.allowed_policies if name in self._policies]
        if not served:
            raise PolicyNotPermitted(self._default.name, permissions.allowed_policies, "suffice.policy")
        return served[0]

    def policy(self, name: str, permissions: Permissions = EVERYTHING) -> Policy:
        """A policy asked for by ``suffice.policy``; ``permissions`` say which names an error may tell.

        Raises
        ------
        InvalidRequest
        """
        if name not in self._policies:
            known = ", ".join(filter(permissions.permits_policy, self._policies)) or "none of the key's"
            raise InvalidRequest(
                f"'suffice.policy' is {name[:80]!r}; the policies are {known}.",
                param="suffice.policy",
                code="unknown_policy",
            )
        return self._policies[name]

    def cache_salt(self, tenant: str) -> str:
        """Return what keeps a tenant's entries apart in every cache of prompts; empty where tenants share them."""
        return "" if self._salt is None else self._salt(tenant)

    def backend(self, tier: Tier) -> Backend:
        return self.backends[tier.model]

    def embedder(
        self, model: str, regions: tuple[str, ...] = (), permissions: Permissions = EVERYTHING
    ) -> tuple[str, Backend]:
        """The served model that embeds for this name: the named one, or for ``auto`` the first that can and may.

        A model is where its tiers are, and in no region without one. ``regions`` narrows those of the caller's default
        policy; a key with permissions uses the models of its tiers.

        Raises
        ------
        UnknownModel
            The name is not served, or what it names makes no embeddings.
        PolicyNotPermitted, TierNotPermitted
            The key permits none.
        OutsideRegions
            Default policy or request does not permit where it is.
        """
        able = {name: each for name, each in self.backends.items() if "embed" in each.capabilities}
        permitted = {name: each for name, each in able.items() if self._permits_model(permissions, name)}
        asked, model = model, self._unaliased(model)
        target = self._targets.get(model)
        name = target.tier.model if target is not None and target.tier is not None else model
        if name not in able and not (model == AUTO and able):
            raise UnknownModel(asked, tuple(permitted))
        if not permitted or (model != AUTO and name not in permitted):
            said = f"Of the models that make embeddings the API key may use {', '.join(permitted) or 'none'}."
            raise TierNotPermitted(said, fields=("model",))
        limits = [each for each in (self.default_policy(permissions).allowed_regions, regions) if each]
        for each in permitted if model == AUTO else (name,):
            if all(self._regions.get(each) in limit for limit in limits):
                return each, able[each]
        said = " and ".join(", ".join(limit) for limit in limits)
        field = "regions" if regions else "policy"
        raise OutsideRegions(f"No model that makes embeddings for {asked!r} is in {said}.", fields=(field,))

    def embedding_tier(self, model: str) -> Tier:
        """Return what a served model's vectors are priced by: its cheapest tier, or as the configuration says."""
        tier = next((tier for tier in self.ladder if tier.model == model), Tier(0, "", model))
        price_usd = self._embedding_prices_usd.get(model)
        return tier if price_usd is None else replace(tier, price_per_input_token_usd=price_usd)

    def listing(self, created_s: int, permissions: Permissions = EVERYTHING) -> list[dict[str, Any]]:
        """The entries of ``GET /v1/models``: what a caller may use."""
        usable = self._usable(permissions)
        entries = [self._entry(name, target, created_s, permissions) for name, target in usable]
        for name in self.backends:
            if name not in self._targets and self._permits_model(permissions, name):
                entries.append(_model_entry(name, created_s) | {"suffice": {"kind": "embeddings"}})
        return entries

    def entry(self, model: str, created_s: int, permissions: Permissions = EVERYTHING) -> dict[str, Any]:
        """One entry.

        Raises
        ------
        UnknownModel
        """
        for entry in self.listing(created_s, permissions):
            if entry["id"] == model:
                return entry
        raise UnknownModel(model, self.names(permissions))

    def _usable(self, permissions: Permissions) -> Iterator[tuple[str, Target]]:
        """Yield the names that a key permits, and what they stand for with it."""
        policies = [each for name, each in self._policies.items() if permissions.permits_policy(name)]
        for name, target in self._targets.items():
            if (tier := target.tier) is not None:
                is_usable = permissions is EVERYTHING or (
                    permissions.permits(tier) and any(policy.permits(tier) for policy in policies)
                )
            else:
                if target.kind == AUTO:
                    with suppress(PolicyNotPermitted):
                        target = Target(AUTO, self.default_policy(permissions))
                is_usable = permissions.permits_policy(target.policy.name) and any(self._tiers(target, permissions))
            if is_usable:
                yield name, target

    def _tiers(self, target: Target, permissions: Permissions) -> list[int]:
        permits, of_key = target.policy.permits, permissions.permits
        return [tier.index for tier in self.ladder if permits(tier) and of_key(tier)]

    def _permits_model(self, permissions: Permissions, model: str) -> bool:
        """Return whether a key permits one of a model's tiers; one without tiers is for keys that may use any."""
        if not permissions.allowed_tiers and not permissions.allowed_regions:
            return True
        return any(permissions.permits(tier) for tier in self.ladder if tier.model == model)

    def _entry(self, name: str, target: Target, created_s: int, permissions: Permissions) -> dict[str, Any]:
        note: dict[str, Any] = {"kind": target.kind}
        if target.tier is None:
            note["policy"] = {"name": target.policy.name, "version": target.policy.version}
            note["tiers"] = self._tiers(target, permissions)
            return _model_entry(name, created_s) | {"suffice": note}
        tier, backend = target.tier, self.backend(target.tier)
        context = tier.context_length or backend.context_length
        cached = tier.price_per_cached_token_usd
        cached = tier.price_per_input_token_usd if cached is None else cached
        note |= {
            "tier": tier.index,
            "name": tier.name,
            "model": tier.model,
            "price_per_request_usd": str(tier.price_per_request_usd),
            "price_per_input_token_usd": str(tier.price_per_input_token_usd),
            "price_per_cached_token_usd": str(cached),
            "price_per_output_token_usd": str(tier.price_per_output_token_usd),
            "region": tier.region,
        }
        # vLLM's name for it, which clients of local servers read.
        return _model_entry(name, created_s) | {"max_model_len": context, "suffice": note}


def _model_entry(name: str, created_s: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created_s, "owned_by": "suffice"}


def _keyed_hash(key: bytes, name: str) -> str:
    return blake2b(name.encode("utf-8", "surrogatepass"), key=key, digest_size=16).hexdigest()
