"""The ladder bench reports what was served: over HTTP from scripted tiers of known ability, and from plain replies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.builtin.tasks.types import Task
from backends.protocol import GenerateRequest
from backends.testing import EchoBackend, Script
from gateway.app import create_app
from gateway.bench import ladder
from gateway.bench.ladder_client import LadderReply
from gateway.bench.ladder_plot import plot_run
from gateway.bench.ladder_report import LadderRun, summarise
from gateway.config.settings import load_settings
from gateway.outcomes.task_split import HOLDOUT_SPLIT, draw_split

ABILITY = (1, 2, 3, 5)
PRICES = (0.0001, 0.0005, 0.003, 0.01)
SECONDS = (0.001, 0.002, 0.004, 0.012)


def reply(task: Task, tier: int, *, p_right: tuple[float, ...] = ()) -> LadderReply:
    is_right = task.grade <= ABILITY[tier - 1]
    cost, seconds = PRICES[tier - 1], SECONDS[tier - 1]
    return LadderReply(is_right, "", tier, cost, seconds * 1e-5, seconds, p_right, 0.1, "benefit", 0.01, 0.001, 5)


def run_of(num_tasks: int, route: Callable[[Task], int]) -> LadderRun:
    tasks = draw_split(HOLDOUT_SPLIT, 5, num_tasks)
    pinned = [[reply(task, tier) for task in tasks] for tier in range(1, 5)]
    routed = [reply(task, route(task), p_right=(0.5, 0.6, 0.7, 0.9)) for task in tasks]
    return LadderRun.of(tasks, pinned, routed, ["simple", "medium", "complex", "expert"])


def perfect(task: Task) -> int:
    return next(tier for tier in range(1, 5) if task.grade <= ABILITY[tier - 1])


def test_a_perfect_router_meets_the_goals_and_is_its_own_oracle() -> None:
    found = summarise(run_of(400, perfect), seed=0, num_resamples=50)
    assert found["routed"]["accuracy"]["value"] == found["tiers"][3]["accuracy"]["value"] == 1.0
    assert found["goals"]["met_priced"] is True
    assert found["goals"]["met_measured"] is True
    same = found["at_the_same_cost"]
    assert same["oracle"] == pytest.approx(1.0)
    assert same["random_same_shares"] < same["best_fixed_mix"] + 1e-9 < 1.0
    assert same["length_only"] < 1.0
    shares = found["routed"]["shares"]
    assert found["routed"]["cost_usd"] == pytest.approx(float(np.dot(shares, PRICES)))
    measured = float(np.dot(shares, SECONDS)) / SECONDS[3]
    assert found["routed"]["measured_cost_vs_top"]["value"] == pytest.approx(measured)
    parts = found["where_seconds_go"]
    assert sum(part["share_of_seconds"] for part in parts) == pytest.approx(1.0)
    assert [part["share_of_requests"] for part in parts] == pytest.approx(shares)
    for part, seconds in zip(parts, SECONDS, strict=True):
        assert part["compute_s"] == pytest.approx(seconds)
        assert part["compute_s_if_alone"] == pytest.approx(seconds)
        assert part["compute_s_of_all_if_alone"] == pytest.approx(seconds)
        assert part["completion_tokens"] == 5
    assert json.loads(json.dumps(found)) == found


def test_seconds_are_laid_to_the_tiers_that_took_them() -> None:
    run = run_of(60, lambda task: 1 if task.grade == 1 else 4)
    run.seconds[:, 3] = [0.010 * task.grade for task in run.tasks]
    low, high = summarise(run, seed=0, num_resamples=20)["where_seconds_go"]
    assert (low["tier"], high["tier"]) == (1, 4)
    assert high["compute_s_if_alone"] > high["compute_s_of_all_if_alone"]
    assert low["share_of_seconds"] < low["share_of_requests"]


@pytest.mark.parametrize(("tier", "accurate", "cheap"), [(1, False, True), (4, True, False)])
def test_goals_fail_where_they_must(tier: int, accurate: bool, cheap: bool) -> None:
    found = summarise(run_of(200, lambda task: tier), seed=0, num_resamples=20)
    assert found["goals"]["met_priced"] is False
    assert (found["routed"]["accuracy_vs_top"]["value"] >= 0.97) is accurate
    assert (found["routed"]["cost_vs_top"]["value"] <= 0.40) is cheap


def test_what_was_not_measured_is_not_claimed() -> None:
    run = run_of(60, perfect)
    run.measured[3, -1] = np.nan
    found = summarise(run, seed=0, num_resamples=20)
    assert found["routed"]["measured_cost_vs_top"] is None
    assert found["goals"]["met_measured"] is None
    assert found["goals"]["met_priced"] is True


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "curve.png"
    plot_run(run_of(100, perfect), path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
async def test_over_http(
    serve: Callable[[Any], str], sqlite_url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    settings = load_settings(environ={}, overrides={"database.url": sqlite_url, "router.artifact": "none"})
    tasks = {task.prompt: task for task in draw_split(HOLDOUT_SPLIT, 11, 40)}

    def script_of(ability: int, seconds: float) -> Callable[[GenerateRequest], Script]:
        def script(request: GenerateRequest) -> Script:
            assert request.messages is not None
            task = tasks[request.messages[-1].content]
            text = task.answer if task.grade <= ability else "no idea"
            return Script(text=text, token_delay_s=None, compute_s=seconds)

        return script

    backends = {
        tier.model: EchoBackend(tier.model, script_of(*known))
        for tier, known in zip(settings.ladder, zip(ABILITY, SECONDS, strict=True), strict=True)
    }
    url = serve(create_app(settings, backends=backends), lifespan="on")
    status = await asyncio.to_thread(ladder.main, ["--url", url, "--tasks", "40", "--seed", "11", "--json", "--check"])
    found = json.loads(capsys.readouterr().out)
    grades = np.array([task.grade for task in draw_split(HOLDOUT_SPLIT, 11, 40)])
    for row, ability in zip(found["tiers"], ABILITY, strict=True):
        assert row["accuracy"]["value"] == pytest.approx(float(np.mean(grades <= ability)))
    # Without a router all traffic takes the safe choice: as good as the top tier, and as dear, which --check reports.
    assert found["routed"]["shares"] == [0.0, 0.0, 0.0, 1.0]
    assert found["routed"]["cost_vs_top"]["value"] == pytest.approx(1.0)
    assert found["routed"]["share_graded_as_pinned"] == 1.0
    assert found["card"]["seed"] == 11
    assert status == 1


def test_a_wrong_call_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert ladder.main(["--tasks", "3"]) == 2
    assert "at least 20" in capsys.readouterr().err
