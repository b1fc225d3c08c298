"""One tenant or one domain below the floor goes up by itself, the rest stays, and evidence brings it back."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.control.control_state import CLOSED, Quarantine, groups_of
from gateway.control.floor_findings import FloorEvidence
from gateway.control.group_findings import GroupScope, groups_to_judge, single_out
from gateway.store.monitoring import CheckedRow, Key, Traffic
from policies.policy import Policy
from tests.gateway.admin.kit import add_key
from tests.gateway.control.checks import Check, put_checks
from tests.gateway.control.ladder import serving
from tests.gateway.control.test_monitor import alerts, default, floor_of, retrains, watched
from tests.gateway.harness import Gateway

NOW = datetime(2026, 1, 1, tzinfo=UTC)
MIN_CHECKED = 20
SCOPE = GroupScope(Policy(name="p", version="1", quality_floor=0.9), "r", 3, {}, MIN_CHECKED)

# ---- over HTTP


async def ask(gateway: Gateway, headers: dict[str, str], prompt: str) -> tuple[int, str]:
    body = {"model": "auto", "messages": [{"role": "user", "content": prompt}]}
    answer: httpx.Response = await gateway.client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return int(answer.headers["x-suffice-tier"]), answer.headers["x-suffice-reason"]


@pytest.mark.slow
async def test_a_bad_tenant_goes_up_alone_and_comes_back(tmp_path: Path, database_url: str) -> None:
    given = {"policy__exploration_share": 0, "policy__quality_floor": 0.9}
    async with serving(tmp_path, database_url, **given) as gateway:
        control, monitor, store = gateway.parts.control, gateway.parts.monitor, gateway.parts.store
        version, lease = control.routers.version, control.leader.lease
        acme, other = [(await add_key(gateway, tenant=name))[0] for name in ("acme", "other")]
        before = await ask(gateway, acme, "What is 2 + 2?")
        tier = before[0]
        assert tier < 4
        policy = default(gateway)
        about = {"policy": policy, "router_version": version, "top": 4}
        good = [Check(1.0, tier=tier, tenant="other") for _ in range(300)]
        bad = [Check(0.2, tier=tier, tenant="acme") for _ in range(30)]
        await put_checks(store, good + bad[:10], **about)
        await monitor.look(lease, at_once=True)
        assert control.state.groups == {}, "too little is known of it"
        await put_checks(store, bad * 2, **about)
        await monitor.look(lease, at_once=True)
        assert control.state.quarantines == {}, "the policy holds its floor without that tenant"
        (asked,) = control.state.group_quarantine("default", version).items()
        assert asked[0] == "tenant:acme"
        assert asked[1][tier].least == CLOSED
        up = await ask(gateway, acme, "What is 2 + 2?")
        assert up[0] > tier
        assert up[1] == "tightened"
        assert await ask(gateway, other, "What is 2 + 2?") == before
        assert "floor" in await alerts(gateway)
        assert len(await retrains(gateway)) == 1
        generation = control.state.generation
        await monitor.look(lease, at_once=True)
        assert control.state.generation == generation, "said once"
        shown = {(each["family"], each["name"]): each for each in (await monitor.floor_report())["groups"]}
        assert shown["tenant", "acme"]["tightened"][str(tier)]["least"] == 2.0
        assert shown["tenant", "other"]["tightened"] == {}
        # Beside the higher tier's answers the lower one is asked again, and is as good now.
        beside = Check(1.0, tier=tier + 1, direction="down", tenant="acme", reason="tightened", p_as_good=0.99)
        await put_checks(store, [beside] * 100, **about)
        await monitor.look(lease, at_once=True)
        assert control.state.group_quarantine("default", version) == {}
        assert "floor" not in await alerts(gateway)
        assert await ask(gateway, acme, "What is 2 + 2?") == before


async def test_a_domain_goes_up_for_whoever_asks_about_it(tmp_path: Path, sqlite_url: str) -> None:
    async with serving(tmp_path, sqlite_url, policy__exploration_share=0, policy__quality_floor=0.5) as gateway:
        control = gateway.parts.control
        about, plain = "Solve the equation: what is the sum of 2 and 2?", "hi"
        before = [await ask(gateway, {}, prompt) for prompt in (about, plain)]
        assert [row.domain for row in await gateway.rows()].count("math") == 1
        closed = dict.fromkeys(range(1, 4), Quarantine(CLOSED, "doubt", NOW.isoformat()))
        await control.writer.quarantines.set_groups(
            "default", control.routers.version, {"domain:math": closed}, by="test"
        )
        assert await ask(gateway, {}, about) == (4, "tightened")
        assert await ask(gateway, {}, plain) == before[1]
        answer = await gateway.client.post("/admin/v1/policies/default/release", json={"reason": "looked at"})
        assert list(answer.json()["released"]["groups"][control.routers.version]) == ["domain:math"]
        assert await ask(gateway, {}, about) == before[0]


async def test_a_doubt_that_all_share_is_the_policys(tmp_path: Path, database_url: str) -> None:
    async with watched(tmp_path, database_url) as (gateway, lease):
        checks = [Check(0.3, tenant=f"t{n % 3}") for n in range(240)]
        await put_checks(gateway.parts.store, checks, policy=default(gateway))
        await gateway.parts.monitor.look(lease, at_once=True)
        state = gateway.parts.control.state
        assert state.groups == {}
        assert state.quarantine("default", None)[1].least == CLOSED


async def test_a_domains_own_traffic_dilutes_its_loss(tmp_path: Path, database_url: str) -> None:
    """What the top tier answers loses nothing: few bad answers among many such leave a domain within its floor."""
    async with watched(tmp_path, database_url) as (gateway, lease):
        store, policy = gateway.parts.store, default(gateway)
        bad = [Check(0.3, domain="law") for _ in range(60)]
        fine = [Check(1.0, domain="math") for _ in range(300)]
        await put_checks(store, bad + fine + [Check(tier=2, domain="law") for _ in range(1500)], policy=policy)
        await gateway.parts.monitor.look(lease, at_once=True)
        assert gateway.parts.control.state.groups == {}
        assert (await floor_of(gateway))["status"] != "broken"


# ---- by itself


def row(place: int, tenant: str, domain: str, loss: float, p_as_good: float, tier: int, inclusion: float) -> CheckedRow:
    made = (f"v{place}", f"r{place}", NOW, NOW, True, tier, inclusion, tenant, domain, "p", "1", "r")
    return CheckedRow(*made, loss, int(loss < 0.5), p_as_good)


def evidence_of(rows: Sequence[CheckedRow]) -> tuple[FloorEvidence, dict[tuple[str, Key], Traffic]]:
    """Rows that stand for as many requests as they say, and the traffic of each group."""
    sums: dict[tuple[str, Key], float] = {}
    for each in rows:
        for name in ("", *groups_of(each.tenant, each.domain)):
            key = (name, ("p", "1", "r", each.tier))
            sums[key] = sums.get(key, 0.0) + 1.0 / each.inclusion
    found = {key: Traffic(math.ceil(num)) for key, num in sums.items()}
    return FloorEvidence(rows, {key: each for (name, key), each in found.items() if not name}, {}, None), found


@st.composite
def checked_rows(draw: st.DrawFn) -> list[CheckedRow]:
    """Some tenants and domains, each with a loss of its own."""
    losses = {name: draw(st.sampled_from((0.0, 0.02, 0.3, 0.9))) for name in ("a", "b", "c", "", "math", "law")}
    dice = random.Random(draw(st.integers(0, 2**32)))
    found = []
    for place in range(draw(st.integers(0, 400))):
        tenant, domain = dice.choice("abc"), dice.choice(("", "math", "law"))
        loss = float(dice.random() < max(losses[tenant], losses[domain]))
        found.append(
            row(
                place,
                tenant,
                domain,
                loss,
                dice.choice((0.5, 0.92, 0.99)),
                dice.choice((1, 2)),
                dice.choice((1.0, 0.5)),
            )
        )
    return found


def mean_loss(rows: Sequence[CheckedRow], evidence: FloorEvidence) -> float:
    """Of what a tier would still answer, over all."""
    lost = sum(each.loss / each.inclusion for each in rows if evidence.keeps(each))
    return lost / sum(1.0 / each.inclusion for each in rows)


@given(rows=checked_rows(), asks=st.sampled_from((0.95, CLOSED)))
@settings(max_examples=60)
def test_only_what_explains_the_doubt_is_singled_out(rows: list[CheckedRow], asks: float) -> None:
    evidence, traffic = evidence_of(rows)
    groups = groups_to_judge(rows, SCOPE)
    before = {"tenant:a": {1: Quarantine(asks, "", NOW.isoformat())}}
    found = single_out(SCOPE, groups, evidence, traffic, before, NOW.isoformat())
    evidence = FloorEvidence(rows, evidence.traffic, {}, None, {"p": {"r": {**before, **found}}})
    for group, asked in found.items():
        mine = [each for each in rows if group in groups_of(each.tenant, each.domain)]
        assert len(mine) >= MIN_CHECKED
        assert sum(each.loss / each.inclusion for each in mine) / sum(1 / each.inclusion for each in mine) > 0.1
        for tier, each in before.get(group, {}).items():
            assert asked[tier].least >= each.least, "what was asked is never lowered"
    moved = [each for each in rows if not evidence.keeps(each)]
    assert all({*before, *found} & set(groups_of(each.tenant, each.domain)) for each in moved), "the rest is as it was"
    if found:
        assert mean_loss(rows, evidence) <= 0.1 + 1e-9


@pytest.mark.slow
def test_sound_tenants_are_rarely_blamed_and_a_bad_one_nearly_always() -> None:
    """Ten tenants whose loss is just what the floor permits, and once one of them at four times that."""
    blamed = {0.1: 0, 0.4: 0}
    dice = random.Random(5)
    for _ in range(60):
        for last in blamed:
            losses = [0.1] * 9 + [last]
            rows = [
                row(n, f"t{n % 10}", "", float(dice.random() < losses[n % 10] * 0.9), 0.95, 1, 0.999)
                for n in range(1000)
            ]
            evidence, traffic = evidence_of(rows)
            found = single_out(SCOPE, groups_to_judge(rows, SCOPE), evidence, traffic, {}, NOW.isoformat())
            blamed[last] += bool(found) if last == 0.1 else "tenant:t9" in found
    assert blamed[0.1] <= 3, blamed
    assert blamed[0.4] >= 54, blamed
