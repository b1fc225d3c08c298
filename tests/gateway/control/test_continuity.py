"""An edit that decides nothing anew keeps a certificate's evidence; one that does begins anew."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from gateway.config.policy_body import from_body, to_body
from gateway.control.equivalent_versions import rule_of
from gateway.store.records import PolicyVersion
from policies.policy import Policy
from policies.routing_decision import decide
from policies.types import RequestFacts, TierEstimate
from tests.gateway.control.checks import Check, put_checks
from tests.gateway.control.test_monitor import default, floor_of, watched
from tests.gateway.harness import Gateway
from tests.policies.strategies import PLACED, usable_policies

BAD = [Check(0.3, tenant=f"t{n % 3}", inclusion=0.5) for n in range(90)]


async def edit(gateway: Gateway, **changes: Any) -> None:
    """Put another version in force, named by its content."""
    present = gateway.parts.control.policies["default"]
    policy = from_body("default", to_body(present) | changes, gateway.parts.control.ladder)
    version = PolicyVersion(name="default", version=policy.version, created_at=datetime.now(UTC), body=to_body(policy))
    await gateway.parts.control.writer.policies.put(version, by="ada")
    assert gateway.parts.control.policies["default"].version == policy.version != present.version


async def test_evidence_outlives_an_edit_of_what_is_drawn(tmp_path: Path, database_url: str) -> None:
    async with watched(tmp_path, database_url) as (gateway, lease):
        store = gateway.parts.store
        await put_checks(store, BAD, policy=default(gateway))
        before = await floor_of(gateway)
        await edit(gateway, sampling_share=0.5)
        shared = ("num_checked", "num_requests", "loss", "loss_high", "status")
        assert {name: (await floor_of(gateway))[name] for name in shared} == {name: before[name] for name in shared}
        groups = (await gateway.parts.monitor.floor_report())["groups"]
        assert sum(each["num_checked"] for each in groups) in (0, 90)
        await put_checks(store, BAD, policy=default(gateway))
        both = await floor_of(gateway)
        assert (both["num_checked"], both["num_requests"]) == (180, 180)
        await edit(gateway, thresholds={"1": 0.7})
        assert (await floor_of(gateway))["num_checked"] == 0, "another rule begins anew"
        await edit(gateway, thresholds={"1": 0.7}, confidence=0.99)
        await edit(gateway, thresholds={}, confidence=0.99)
        assert (await floor_of(gateway))["num_checked"] == 180, "the first rule is back"
        await gateway.parts.monitor.look(lease, at_once=True)
        assert gateway.parts.control.state.quarantine("default", None), "and what it showed is acted on"


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({"sampling_share": 0.5}, True),
        ({"confidence": 0.8}, True),
        ({"budget_usd_per_day": Decimal(5)}, True),
        ({"allowed_regions": ("eu",)}, False),
        ({"max_cost_usd": Decimal("0.1")}, False),
        ({"quality_floor": 0.5, "thresholds": {1: 0.95, 2: 0.95, 3: 0.95}}, True),
        ({"quality_floor": 0.5}, False),
        ({"thresholds": {1: 0.9}}, False),
        ({"allowed_tiers": (1, 2)}, False),
        ({"exploration_share": 0.5}, False),
        ({"max_novelty": 0.5}, False),
        ({"max_fallbacks": 0}, False),
    ],
)
def test_a_rule_is_what_decides(change: dict[str, Any], is_same: bool) -> None:
    policy = Policy()
    assert (rule_of(policy, 4) == rule_of(replace(policy, version="2", **change), 4)) is is_same


@given(one=usable_policies, floor=st.floats(0, 1), estimates=st.lists(st.floats(0, 1), min_size=4, max_size=4))
def test_equal_rules_decide_equally(one: Policy, floor: float, estimates: list[float]) -> None:
    other = replace(
        one, version="2", quality_floor=floor, thresholds={tier: one.threshold(tier) for tier in range(1, 4)}
    )
    if rule_of(one, 4) != rule_of(other, 4):
        return
    facts = RequestFacts(10, 10, tuple(TierEstimate(tier, p, p) for tier, p in enumerate(estimates, start=1)))

    class Dice:
        def random(self) -> float:
            return 0.5

    first, second = (decide(facts, each, PLACED, Dice()) for each in (one, other))
    # The words may name a threshold that decides nothing, such as the top tier's.
    assert structs.replace(first, detail="") == structs.replace(second, detail="")
