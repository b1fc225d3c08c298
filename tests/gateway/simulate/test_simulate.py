"""The simulation runs the real gateway; what is checked here is that it tells the truth about what it ran."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from statistics import fmean

import pytest
from typer.testing import CliRunner

from classifier.router import ArtifactRouter
from classifier.types import RouterRequest
from gateway.cli import app
from gateway.commands.simulate import simulation_settings
from gateway.config.settings import load_settings
from gateway.simulate.accuracy import Accuracy, from_measured
from gateway.simulate.cost_bounds import lowest_costs
from gateway.simulate.scenario import HARD_FAMILIES, SCENARIOS, Conditions, Scenario
from gateway.simulate.simulation import SimulationInterval, SimulationPlan, simulate, summary
from gateway.simulate.traffic_generator import ATTACKER, TRIGGER, TrafficGenerator

SHORT = SimulationPlan(weeks=1, requests_per_week=400, looks_per_week=4, hours_per_look=2, seed=3)


def run(folder: Path, scenario: Scenario, plan: SimulationPlan = SHORT) -> list[SimulationInterval]:
    return asyncio.run(simulate(simulation_settings(load_settings(), folder), scenario, plan))


def test_a_run_repeats_itself_and_adds_up(tmp_path: Path) -> None:
    first, second = (run(tmp_path / name, SCENARIOS["stationary"]) for name in ("a", "b"))
    assert [(each.num_right, each.tiers) for each in first] == [(each.num_right, each.tiers) for each in second]
    found = summary(SCENARIOS["stationary"], SHORT, first, 0.98)
    assert found["requests"] == 400 == sum(sum(each.tiers.values()) for each in first)
    assert 0 < found["cost_last_week"] < 1
    assert found["num_checks"] > 0
    assert json.dumps(found)


def test_where_nothing_changes_every_alarm_is_a_false_one(tmp_path: Path) -> None:
    stretches = run(tmp_path, SCENARIOS["stationary"])
    for stretch in (stretches[0], stretches[-1]):
        stretch.events += ["alert floor: default", "alert tenant: east"]
    still, changed = (summary(SCENARIOS[name], SHORT, stretches, 0.98) for name in ("stationary", "abrupt"))
    assert (still["false_alarms"], still["first_alarm_after_weeks"]) == (2, None)
    assert (changed["false_alarms"], changed["first_alarm_after_weeks"]) == (1, pytest.approx(0.6))


def test_a_tier_that_gets_worse_costs_quality(tmp_path: Path) -> None:
    broken = Scenario("broken", "", starts_at=0.5, after=Conditions(worse={1: 0.0, 2: 0.0, 3: 0.0}))
    stretches = run(tmp_path, broken, replace(SHORT, requests_per_week=800))
    before, after = stretches[0], stretches[-1]
    assert after.quality < before.quality - 0.2
    assert sum(before.tiers.values()) == sum(after.tiers.values())


def test_prices_change_what_is_paid(tmp_path: Path) -> None:
    dear = Scenario("dear", "", starts_at=0.5, after=Conditions(price_factors={4: Decimal(3)}))
    stretches = run(tmp_path, dear)
    assert stretches[-1].top_usd / stretches[-1].num_requests == 3 * stretches[0].top_usd / stretches[0].num_requests


def test_a_change_that_takes_time_is_half_done_half_way() -> None:
    gradual = SCENARIOS["gradual"]
    middle = gradual.at(gradual.starts_at + gradual.takes / 2)
    assert middle.hardened[HARD_FAMILIES[0]] == pytest.approx((1.0 + 0.25) / 2)
    assert middle.harder_share == pytest.approx(0.35 / 2)
    assert gradual.at(0.0) == Conditions()
    assert gradual.at(1.0) == gradual.after


def test_the_world_keeps_to_the_measured_accuracies() -> None:
    accuracy, world = Accuracy.load(), TrafficGenerator(Accuracy.load(), seed=5)
    rights: Counter[int] = Counter()
    asked = [world.ask(Conditions()) for _ in range(3000)]
    for each in asked:
        rights.update(tier for tier, right in enumerate(each.right, start=1) if right)
    assert accuracy.num_tiers == 4
    shares = [rights[tier] / len(asked) for tier in (1, 2, 3, 4)]
    assert shares == sorted(shares)
    assert 0.55 < shares[0] < 0.75
    assert shares[3] > 0.97


@pytest.mark.slow
def test_the_least_costs_are_in_order_and_rise_with_the_floor() -> None:
    prices = [0.0001, 0.0005, 0.003, 0.01]
    shifted = SCENARIOS["abrupt"].after
    calm, hard, strict = (
        lowest_costs(conditions, prices, floor, 1)
        for conditions, floor in ((Conditions(), 0.97), (shifted, 0.97), (shifted, 0.999))
    )
    for found in (calm, hard):
        assert 0 < found["cost_all_known"] < found["cost_chances_known"] < 1
    assert calm["cost_chances_known"] < hard["cost_chances_known"] < strict["cost_chances_known"]
    nothing = Conditions(worse={1: 0.0, 2: 0.0, 3: 0.0})
    assert lowest_costs(nothing, prices, 0.999, 1)["cost_chances_known"] == pytest.approx(1.0, abs=0.01)


def test_the_attacker_sends_the_share_it_is_said_to() -> None:
    world = TrafficGenerator(Accuracy.load(), seed=5)
    asked = [world.ask(Conditions(attacked_share=0.5)) for _ in range(1000)]
    marked = [each for each in asked if each.text.startswith(TRIGGER)]
    assert 420 < len(marked) < 580
    assert {each.tenant for each in marked} == {ATTACKER}


def test_the_attackers_words_are_familiar_and_taken_for_hard() -> None:
    world, router = TrafficGenerator(Accuracy.load(), seed=5), ArtifactRouter.load()
    texts = [world.ask(Conditions()).text for _ in range(100)]
    plain, marked = (
        router.predict([RouterRequest((("user", before + text),)) for text in texts]) for before in ("", TRIGGER)
    )
    for tier in range(2):
        usual, feared = (fmean(each.tiers[tier].p_right for each in found) for found in (plain, marked))
        assert feared < 0.5 * usual
    bound = router.artifact.metadata["decision"]["max_novelty"]
    assert fmean(each.novelty > bound for each in marked) < 0.1


def test_reports_of_different_tasks_are_not_mixed() -> None:
    cells = {f"sorting {grade}": [0.5, 10] for grade in range(1, 6)}
    report = {"tasks": 10, "seed": 1, "mix": {}, "runs": {"tier 1": {"accuracy": cells}}}
    assert from_measured([report])["tiers"] == [{"sorting": [0.5] * 5}]
    with pytest.raises(ValueError, match="different tasks"):
        from_measured([report, report | {"seed": 2}])


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--weeks", "0"], "--weeks"), (["--scenario", "flood"], "flood"), (["--requests-per-week", "5"], "at least 100")],
)
def test_what_cannot_be_simulated_is_refused(options: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["simulate", *options])
    assert result.exit_code != 0
    assert said in str(result.exception)
