"""The drift views: one budget of false alarms for all, denser strata weigh no more, states that survive JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from gateway.control.drift_watch import DriftRule, DriftWatch, watch_drift, weigh
from gateway.control.tenant_watch import TenantWatches, watch_tenants
from gateway.store.monitoring import CheckedRow, Decided
from policies.anomaly import AlertRule
from policies.judge_correction import GoldCounts

NOW = datetime.now(UTC)
RULE = DriftRule()


def row(name: str, loss: float, inclusion: float = 0.05, tenant: str = "t", domain: str = "") -> CheckedRow:
    verdict = int(loss < 0.5)
    return CheckedRow(name, name, NOW, NOW, True, 1, inclusion, tenant, domain, "default", "v", "r", loss, verdict, 0.9)


def stream(rng: random.Random, num: int, rate: float, seed: object) -> Iterator[CheckedRow]:
    """Checked answers of many tenants and subjects, one in ``1 / rate`` of them not good enough."""
    for n in range(num):
        loss = float(rng.random() < rate)
        yield row(f"{seed}-{n}", loss, tenant=f"t{rng.randrange(8)}", domain=f"d{rng.randrange(4)}")


@pytest.mark.slow
def test_many_views_together_keep_the_stated_false_alarms() -> None:
    """Thirteen views, two thousand answers, fifty histories: 2.5 alarms are stated, seven would be a surprise."""
    num_alarmed = 0
    for seed in range(50):
        _, alarmed = watch_drift(DriftWatch(), list(stream(random.Random(seed), 2000, 0.1, seed)), RULE, {}, None)
        num_alarmed += bool(alarmed)
    assert num_alarmed <= 6


def test_a_rise_is_found() -> None:
    delays = []
    for seed in range(40):
        rng = random.Random(seed)
        watch, _ = watch_drift(DriftWatch(), list(stream(rng, 300, 0.08, f"{seed}a")), RULE, {}, None)
        watch, _ = watch_drift(watch, list(stream(rng, 600, 0.25, f"{seed}b")), RULE, {}, None)
        state = watch.views["policy:default@r"].state
        delays.append((state.alarmed_at or 900) - 300)
    assert sorted(delays)[20] < 150


def test_states_survive_json_and_order() -> None:
    """PostgreSQL gives the keys of an object back in another order; nothing may rest on it."""
    rows = list(stream(random.Random(3), 400, 0.12, "x"))
    whole, _ = watch_drift(DriftWatch(), rows, RULE, {}, None)
    half, _ = watch_drift(DriftWatch(), rows[:200], RULE, {}, None)
    stored = json.loads(json.dumps(half.as_dict(), sort_keys=True))
    parted, _ = watch_drift(DriftWatch.from_dict(stored), rows[200:], RULE, {}, None)
    assert parted == whole


def test_tenants_survive_json_and_order() -> None:
    rng = random.Random(5)
    decided = [Decided(str(n), f"t{rng.randrange(30)}", 1 + (rng.random() < 0.2)) for n in range(3000)]
    rule = AlertRule(50)
    whole, _ = watch_tenants(TenantWatches(), decided, rule, 2)
    half, _ = watch_tenants(TenantWatches(), decided[:1500], rule, 2)
    stored = json.loads(json.dumps(half.as_dict(), sort_keys=True))
    parted, _ = watch_tenants(TenantWatches.from_dict(stored), decided[1500:], rule, 2)
    assert parted == whole


def mixed(rng: random.Random, num: int, rates: dict[float, float]) -> Iterator[CheckedRow]:
    """``num`` requests of strata of equal size, inclusion -> rate of faults; those that were drawn."""
    for n in range(num):
        inclusion = rng.choice(tuple(rates))
        if rng.random() < inclusion:
            yield row(str(n), float(rng.random() < rates[inclusion]), inclusion)


def test_a_stratum_weighs_as_much_as_it_has_traffic() -> None:
    """Answers drawn at 0.4 and at 0.05 from equal traffic have the same weight together."""
    total = {0.4: 0.0, 0.05: 0.0}
    seen: tuple[float, ...] = ()
    for each in mixed(random.Random(1), 40_000, dict.fromkeys(total, 0.1)):
        weight, seen = weigh(each.inclusion, seen)
        total[each.inclusion] += weight
    assert total[0.4] == pytest.approx(total[0.05], rel=0.15)


def test_a_bad_stratum_that_is_drawn_often_is_no_drift() -> None:
    """At 20 % and 0 % the traffic is at 10 %, which is in order, though most of what was checked is of the former."""
    num_alarmed = 0
    for seed in range(40):
        rows = list(mixed(random.Random(seed), 4000, {0.4: 0.2, 0.05: 0.0}))
        assert sum(each.loss for each in rows) / len(rows) > 0.14
        num_alarmed += bool(watch_drift(DriftWatch(), rows, RULE, {}, None)[1])
    assert num_alarmed <= 5


def test_a_well_known_grader_is_read_by_its_verdicts_and_a_little_known_one_is_not() -> None:
    known, _ = watch_drift(DriftWatch(), [row("a", 0.0)], RULE, {}, GoldCounts(950, 1000, 10, 1000))
    view = known.views["policy:default@r"]
    assert view.reads == "verdict"
    assert view.design.in_order > RULE.in_order
    unknown, _ = watch_drift(DriftWatch(), [row("a", 0.0)], RULE, {}, GoldCounts(9, 12, 2, 15))
    assert unknown.views["policy:default@r"].reads == "p_good"


def test_what_the_floor_permits_is_in_order() -> None:
    watch, _ = watch_drift(DriftWatch(), [row("a", 0.0)], RULE, {"default": 0.3}, None)
    assert watch.views["policy:default@r"].design.in_order == 0.3
