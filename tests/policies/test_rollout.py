"""Stages only rise on what the plan asks for, harm ends them, and a key never changes sides while a share rises."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.drift_test import DriftDesign
from policies.rollout import Rollout, RolloutPlan, RolloutStage, is_behind, record, roll_back, share, takes_new

PLAN = RolloutPlan(DriftDesign(0.1, (0.2,)), min_stage_s=100.0, min_shadow_decisions=10, min_checked=20)
SOUND = (0.0,) * 20


def test_a_sound_router_passes_every_stage() -> None:
    state = Rollout.start("r2", PLAN, 0.0)
    assert share(PLAN, state) == 0.0
    shares = []
    state = record(PLAN, state, num_decisions=10, now_s=100.0)
    for hour in range(2, 6):
        shares.append(share(PLAN, state))
        state = record(PLAN, state, losses=SOUND, now_s=100.0 * hour)
    assert shares == [0.1, 0.5, 1.0, 1.0]
    assert state.stage is RolloutStage.COMPLETE
    assert record(PLAN, state, losses=(1.0,) * 500, now_s=1e6) == state


@pytest.mark.parametrize(
    ("decisions", "now_s"),
    [(9, 1000.0), (10, 99.0)],
)
def test_shadow_waits_for_time_and_decisions(decisions: int, now_s: float) -> None:
    state = record(PLAN, Rollout.start("r2", PLAN, 0.0), num_decisions=decisions, now_s=now_s)
    assert state.stage is RolloutStage.SHADOW


def test_a_stage_waits_for_time_and_checks() -> None:
    first = record(PLAN, Rollout.start("r2", PLAN, 0.0), num_decisions=10, now_s=100.0)
    assert record(PLAN, first, losses=SOUND[:-1], now_s=1e4).step == 0
    assert record(PLAN, first, losses=SOUND, now_s=199.0).step == 0
    assert record(PLAN, first, losses=SOUND, now_s=200.0).step == 1


def test_light_answers_count_for_what_they_are_worth() -> None:
    first = record(PLAN, Rollout.start("r2", PLAN, 0.0), num_decisions=10, now_s=100.0)
    light = record(PLAN, first, losses=SOUND, weights=(0.1,) * 20, now_s=101.0)
    assert light.effective_checked == pytest.approx(20.0)
    uneven = record(PLAN, first, losses=SOUND, weights=(0.1,) * 19 + (1.0,), now_s=300.0)
    assert uneven.num_checked == 20
    assert uneven.effective_checked == pytest.approx(2.9**2 / 1.19)
    assert uneven.step == 0
    assert record(PLAN, light, now_s=300.0).step == 1


def test_no_stage_goes_on_for_ever_without_evidence() -> None:
    plan = replace(PLAN, max_stage_s=86_400.0)
    shadow = Rollout.start("r2", plan, 0.0)
    first = record(plan, shadow, num_decisions=10, now_s=100.0)
    waiting = record(plan, first, losses=SOUND[:-1], now_s=86_499.0)
    assert waiting.stage is RolloutStage.PARTIAL
    ended = record(plan, waiting, now_s=86_500.0)
    assert (ended.stage, share(plan, ended)) == (RolloutStage.ROLLED_BACK, 0.0)
    assert ended.reason == "Checks worth 19 answers after 1 d; 20 are needed."
    assert record(plan, waiting, losses=SOUND[:1], now_s=86_500.0).step == 1


def test_a_shadow_stage_does_not_go_on_for_ever_either() -> None:
    """A router nobody sends requests to would stay in shadow for good (security review, suspected)."""
    plan = replace(PLAN, max_stage_s=1000.0)
    state = Rollout.start("r2", plan, 0.0)
    assert record(plan, state, num_decisions=9, now_s=999.0).stage is RolloutStage.SHADOW
    ended = record(plan, state, num_decisions=9, now_s=1000.0)
    assert ended.stage is RolloutStage.ROLLED_BACK
    assert "9 shadow decisions" in ended.reason
    assert record(plan, state, num_decisions=10, now_s=1000.0).step == 0, "what has its evidence moves on"


def test_a_stage_without_half_its_evidence_at_half_its_time_is_behind() -> None:
    plan = replace(PLAN, max_stage_s=1000.0)
    shadow = Rollout.start("r2", plan, 0.0)
    first = record(plan, shadow, num_decisions=10, now_s=100.0)
    few, half = (record(plan, first, losses=SOUND[:num], now_s=101.0) for num in (9, 10))
    assert not is_behind(plan, few, 599.0)
    assert is_behind(plan, few, 600.0)
    assert not is_behind(plan, half, 600.0)
    assert not is_behind(plan, shadow, 600.0)


def test_harm_rolls_back_at_once_and_for_good() -> None:
    first = record(PLAN, Rollout.start("r2", PLAN, 0.0), num_decisions=10, now_s=100.0)
    ended = record(PLAN, first, losses=(1.0,) * 15, now_s=101.0)
    assert ended.stage is RolloutStage.ROLLED_BACK
    assert share(PLAN, ended) == 0.0
    assert "checked answers" in ended.reason
    assert record(PLAN, ended, losses=SOUND, now_s=1e6) == ended


def test_evidence_of_harm_adds_up_across_stages() -> None:
    rng = np.random.default_rng(1)
    state = record(PLAN, Rollout.start("r2", PLAN, 0.0), num_decisions=10, now_s=100.0)
    entered = set()
    for hour in range(2, 200):
        losses = tuple((rng.random(10) < 0.3).astype(float).tolist())
        state = record(PLAN, state, losses=losses, now_s=100.0 + hour)  # too soon for any stage to pass
        entered.add(state.step)
        if state.is_final:
            break
    assert state.stage is RolloutStage.ROLLED_BACK
    assert entered == {0, -1}


def test_an_operator_can_end_it() -> None:
    state = roll_back(Rollout.start("r2", PLAN, 0.0), "asked for", 5.0)
    assert (state.stage, state.reason, state.entered_s) == (RolloutStage.ROLLED_BACK, "asked for", 5.0)


@given(st.text(), st.floats(0, 1), st.floats(0, 1))
def test_a_rising_share_keeps_its_keys(key: str, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert takes_new("r2", key, low) <= takes_new("r2", key, high)
    assert not takes_new("r2", key, 0.0)
    assert takes_new("r2", key, 1.0)


def test_shares_are_met_and_versions_draw_different_keys() -> None:
    keys = [f"session-{number}" for number in range(4000)]
    first = [takes_new("r2", key, 0.1) for key in keys]
    second = [takes_new("r3", key, 0.1) for key in keys]
    assert np.mean(first) == pytest.approx(0.1, abs=0.02)
    assert np.mean(np.logical_and(first, second)) == pytest.approx(0.01, abs=0.01)


@pytest.mark.parametrize("shares", [(), (0.5,), (0.5, 0.1, 1.0), (0.0, 1.0), (0.5, 0.5, 1.0), (0.1, 1.1)])
def test_plans_out_of_order_are_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="shares"):
        RolloutPlan(PLAN.guard, shares=shares)


@pytest.mark.parametrize("name", ["min_stage_s", "min_shadow_decisions", "min_checked"])
def test_a_stage_may_ask_for_nothing_and_not_for_less(name: str) -> None:
    assert getattr(replace(PLAN, **{name: 0}), name) == 0
    with pytest.raises(ValueError, match=name):
        replace(PLAN, **{name: -1})


def test_a_stage_may_end_when_it_could_pass_and_not_before() -> None:
    assert replace(PLAN, max_stage_s=PLAN.min_stage_s).max_stage_s == PLAN.min_stage_s
    with pytest.raises(ValueError, match="max_stage_s"):
        replace(PLAN, max_stage_s=PLAN.min_stage_s - 0.001)
