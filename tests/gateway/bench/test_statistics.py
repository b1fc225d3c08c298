"""The statistics bench ends with one line of JSON in which every frequency stands beside what was stated."""

from __future__ import annotations

import json

import pytest

from gateway.bench.statistics import main


def test_every_simulation_keeps_what_it_states(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--runs", "12", "--seed", "3"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["card"]["seed"] == 3
    results = found["results"]
    # Twelve runs: more than four false alarms, or fewer than eight covered, would be one chance in thousands.
    assert results["drift"]["false_alarms_in_a_year"] <= 4 / 12
    certified = results["certificate"]["share_certified"]
    assert certified["perfect_judge, floor_held_well"] >= 8 / 12
    assert max(share for case, share in certified.items() if "just_missed" in case) <= 4 / 12
    assert min(results["offpolicy"]["coverage"].values()) >= 8 / 12
    turns = results["turns"]
    assert turns["share_certified"]["turns, floor_just_missed"] <= 4 / 12
    assert turns["share_certified"]["turns, floor_held_well"] >= 8 / 12
    assert min(share for case, share in turns["coverage"].items() if case.startswith("turns")) >= 8 / 12
    # What it is for: counting requests would not do.
    assert min(share for case, share in turns["coverage"].items() if case.startswith("requests")) < 8 / 12
    assert results["promotion"]["share_promoted"]["worse"] <= 4 / 12
    candidates = results["caution"]["candidates"]
    assert max(each["worse"] for each in candidates.values()) <= 4 / 12
    assert candidates["overrated by 0"]["shipped"] >= 8 / 12


def test_a_run_needs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--runs", "0"])
    assert ended.value.code == 2
    assert "--runs" in capsys.readouterr().err
