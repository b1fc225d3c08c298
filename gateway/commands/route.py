"""Explains the decision for one prompt, with nothing generated and no model loaded: ``suffice route``."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from classifier.types import RouterRequest, Sufficiency
from gateway.commands.result_printer import print_json, print_table
from gateway.config.settings import Settings, load_settings
from gateway.failure_report import USAGE_STATUS, CommandError
from gateway.models.loader import complete_policies, load_router
from policies.policy import Policy
from policies.routing_decision import decide
from policies.tier_choice import candidate_costs_usd
from policies.types import Overrides, RequestFacts, RoutingDecision, TierEstimate


def route(
    prompt: str, config: Path | None, *, policy: str | None, min_tier: int | None, max_tier: int | None, as_json: bool
) -> None:
    """Print where the prompt would go and why; exploration is shown as probabilities, not drawn.

    Raises
    ------
    CommandError
        The policy is not in the configuration, or there is no prompt.
    PolicyError
        The limits leave no tier.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise CommandError("The prompt is empty.", status=USAGE_STATUS)
    settings = load_settings(config, need_secrets=False)
    router = load_router(settings)
    policies = complete_policies(settings.policies, router)
    name = policy or settings.policy.name
    if name not in policies:
        raise CommandError(f"--policy is {name!r}; known are {', '.join(policies)}.", status=USAGE_STATUS)
    estimate = router.predict([RouterRequest((("user", text),))])[0] if router is not None else None
    facts = _facts(estimate, Overrides(min_tier=min_tier, max_tier=max_tier))
    # What would be served without the dice; the dice are in the propensities.
    still = structs.replace(facts, overrides=replace(facts.overrides, explore=False))
    decision = decide(still, policies[name], settings.ladder, random.Random(0))
    drawn = decide(facts, policies[name], settings.ladder, random.Random(0))
    told = structs.replace(decision, propensities=drawn.propensities)
    shown = _as_json(settings, policies[name], facts, estimate, told)
    if as_json:
        print_json(shown)
    else:
        _print(shown)


def _facts(estimate: Sufficiency | None, overrides: Overrides) -> RequestFacts:
    return RequestFacts(
        num_prompt_tokens=None,
        max_tokens=None,
        estimates=tuple(TierEstimate(each.tier, each.p_right, each.p_as_good) for each in estimate.tiers)
        if estimate
        else (),
        overrides=overrides,
        novelty=estimate.novelty if estimate else 0.0,
    )


def _as_json(
    settings: Settings, policy: Policy, facts: RequestFacts, estimate: Sufficiency | None, decision: RoutingDecision
) -> dict[str, Any]:
    by_tier = {each.tier: each for each in facts.estimates}
    costs_usd = candidate_costs_usd(settings.ladder, facts, policy, settings.ladder)
    return {
        "tier": decision.tier,
        "reason": decision.reason.value,
        "detail": decision.detail,
        "confidence": decision.confidence,
        "fallback_order": list(decision.ladder),
        "policy": {"name": policy.name, "version": policy.version, "mode": policy.mode.value},
        "router_version": estimate.router_version if estimate else "none",
        "router_ms": round(estimate.latency_s * 1000, 3) if estimate else None,
        "novelty": estimate.novelty if estimate else None,
        "tiers": [
            {
                "tier": tier.index,
                "name": tier.name,
                "model": tier.model,
                "p_right": by_tier[tier.index].p_right if tier.index in by_tier else None,
                "p_as_good": by_tier[tier.index].p_as_good if tier.index in by_tier else None,
                "needed": policy.threshold(tier.index),
                "expected_cost_usd": round(costs_usd[tier.index], 12),
                "propensity": decision.propensities.get(tier.index, 0.0),
            }
            for tier in settings.ladder
        ],
        "features": dict(estimate.features) if estimate else {},
    }


def _print(shown: dict[str, Any]) -> None:
    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.3f}"

    rows = [
        (
            "→" if each["tier"] == shown["tier"] else "",
            each["tier"],
            each["name"],
            each["model"],
            number(each["p_right"]),
            number(each["p_as_good"]),
            number(each["needed"]) if shown["policy"]["mode"] == "floor" else "",
            f"${each['expected_cost_usd']:.6f}",
            number(each["propensity"]),
        )
        for each in shown["tiers"]
    ]
    print_table(("", "tier", "name", "model", "P(right)", "P(as good)", "needed", "cost", "propensity"), rows)
    policy = shown["policy"]
    print(f"tier {shown['tier']}, {shown['reason']}: {shown['detail']}")
    print(f"policy {policy['name']} {policy['version']} ({policy['mode']}), router {shown['router_version']}")
    if shown["novelty"] is not None:
        print(f"novelty {shown['novelty']:.3f}, estimated in {shown['router_ms']} ms")
