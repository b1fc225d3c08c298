"""``suffice evaluate`` on folders in the public schema: beats chance where there is something to learn, and says so."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from classifier.errors import TrainingError
from classifier.graded_table import read_graded
from classifier.types import RouterRequest
from gateway import cli
from gateway.commands.evaluate_floor import NUM_STEPS, QualityGrid, floor_report, guard_report
from tests.classifier.graded_folder import folder_of


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["suffice", "evaluate", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0), capsys.readouterr().out


def found_by(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> dict[str, Any]:
    status, out = run(capsys, monkeypatch, *arguments, "--weak", "weak", "--strong", "strong", "--json")
    assert status == 0
    assert out.count("\n") == 1
    found: dict[str, Any] = json.loads(out)
    return found


def test_two_folders_in_one_line_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train, test = folder_of(tmp_path / "a", 1), folder_of(tmp_path / "b", 2)
    found = found_by(capsys, monkeypatch, "--train", train, "--test", test, "--resamples", 20)
    orders = found["rankings"]
    assert found["num_prompts"] == 240
    assert orders["random"]["apgr"] == pytest.approx(0.5)
    assert orders["random"]["apgr"] + 0.1 < orders["router"]["apgr"] <= orders["oracle"]["apgr"]
    low, high = orders["router"]["apgr_interval"]
    assert low <= orders["router"]["apgr"] <= high
    assert orders["router"]["strong_share_95"] <= orders["router"]["strong_share_99"]


@pytest.mark.slow
def test_nothing_to_learn_is_not_made_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = folder_of(tmp_path / "a", 3, learnable=False)
    found = found_by(capsys, monkeypatch, "--train", both, "--test", both, "--resamples", 10)
    assert found["protocol"] == "folds of the data"
    assert 0.35 < found["rankings"]["router"]["apgr"] < 0.65


def test_transfer_leaves_the_benchmark_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known, other = folder_of(tmp_path / "a", 4), folder_of(tmp_path / "b", 5, benchmark="other")
    arguments = ("--train", known, "--test", other, "--benchmark", "other", "--transfer", "--resamples", 10)
    assert found_by(capsys, monkeypatch, *arguments)["protocol"] == "leave one benchmark out"
    status, _ = run(
        capsys,
        monkeypatch,
        *("--train", other, "--test", other, "--benchmark", "other", "--transfer"),
        *("--weak", "weak", "--strong", "strong"),
    )
    assert status == 1  # nothing else to fit on


@pytest.mark.parametrize(
    "arguments",
    [
        ("--floor", 0),
        ("--confidence", 1),
        ("--resamples", 0),
        ("--transfer",),
        ("--ladder", "c", "d"),
        ("stray",),
        ("--price", "a=1"),
        ("--price", "a=1,nan"),
        ("--price", "=1,1"),
        ("--curve", "10"),
        ("--curve", "many"),
    ],
)
def test_wrong_options_exit_with_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[object, ...],
) -> None:
    given = ("--train", tmp_path, "--test", tmp_path, "--weak", "a", "--strong", "b", *arguments)
    assert run(capsys, monkeypatch, *given)[0] == 2


def test_certificates_are_honoured_and_few_rows_certify_nothing() -> None:
    rng = np.random.default_rng(8)
    hardness = rng.random(1500)
    weak = (rng.random(1500) > hardness).astype(np.float64)
    strong = (rng.random(1500) > hardness / 4).astype(np.float64)
    scores, p_right = np.stack([weak, strong], axis=1), np.stack([1 - hardness, 1 - hardness / 4], axis=1)
    report = floor_report(
        QualityGrid.of_order(hardness, scores, p_right),
        lambda step: 1 - step / NUM_STEPS,
        floor=0.9,
        confidence=0.95,
        seed=0,
        num_resamples=100,
    )
    assert report["status"] == "held"
    assert report["cost"] < 1
    for record in ("resamples", "few_labels", "prediction_powered"):
        assert report[record]["share_honoured"] >= 0.93, record  # 95 % is stated; 100 draws vary by 2 %
    assert report["prediction_powered"]["median_cost"] < report["few_labels"]["median_cost"]
    few = QualityGrid.of_order(hardness[:5], scores[:5], p_right[:5])
    assert few.certified_step(np.arange(5), 0.99, 0.99) is None


def test_traffic_that_looks_foreign_goes_up_until_checked() -> None:
    rng = np.random.default_rng(9)
    familiar, foreign = rng.random(500) < 0.05, rng.random(500) < 0.3
    assert not guard_report(familiar, 0.05, 0.95)["is_foreign_traffic"]
    assert guard_report(foreign, 0.05, 0.95)["is_foreign_traffic"]
    # Five of five hundred are many where one in two hundred is usual, but not surely more than twice as many.
    assert not guard_report(np.arange(500) < 5, 0.005, 0.95)["is_foreign_traffic"]
    assert guard_report(np.arange(500) < 12, 0.005, 0.95)["is_foreign_traffic"]


@pytest.mark.slow
def test_a_ladder_in_dollars(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = folder_of(tmp_path / "a", 11, num_prompts=210, middle=True)
    (both / "model_prices.json").write_text(
        json.dumps(
            {
                "weak": {"usd_per_mtok_in": 1.0, "usd_per_mtok_out": 1.0},
                "strong": {"usd_per_mtok_in": 100.0, "usd_per_mtok_out": 100.0},
            }
        )
    )
    arguments = ("--train", both, "--test", both, "--ladder", "weak", "middle", "strong", "--resamples", 10, "--json")
    status, out = run(capsys, monkeypatch, *arguments)
    assert status == 1  # nobody knows what the middle one costs
    status, out = run(capsys, monkeypatch, *arguments, "--price", "middle=10,10", "--floor", 0.9)
    assert status == 0
    found = json.loads(out)
    assert found["ladder"] == ["weak", "middle", "strong"]
    assert found["mean_cost_usd"] == pytest.approx([found["mean_cost_usd"][0] * each for each in (1, 10, 100)])
    ranks = found["rankings"]
    assert ranks["oracle"]["cost_usd_95%"] <= ranks["router"]["cost_usd_95%"] + 1e-12
    assert ranks["router"]["cost_usd_95%"] < 0.8 * ranks["fixed_mix"]["cost_usd_95%"]
    assert found["certificate"]["status"] == "held"


@pytest.mark.slow
def test_a_learning_curve_rises(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = folder_of(tmp_path / "a", 12, num_prompts=240)
    found = found_by(capsys, monkeypatch, "--train", both, "--test", both, "--resamples", 10, "--curve", "60")
    none, few = found["learning_curve"]
    assert (none, few["num_labels"]) == ({"num_labels": 0, "apgr": 0.5}, 60)
    assert few["apgr"] > 0.6
    assert found["rankings"]["router"]["apgr"] > 0.6


def test_a_table_may_have_conversations_with_tools(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a", 6, num_prompts=40)
    rows = parquet.read_table(folder / "prompts.parquet").to_pylist()
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    for place, row in enumerate(rows):
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": row["prompt"]}]
        row |= {"messages": json.dumps(messages), "tools": json.dumps(tools if place % 2 else [])}
    rows[0]["messages"] = rows[0]["tools"] = None
    parquet.write_table(arrow.Table.from_pylist(rows), folder / "prompts.parquet")
    table = read_graded(folder, ("weak", "strong"))
    assert [bool(each.tools) for each in table.requests] == [place % 2 == 1 for place in range(40)]
    assert table.requests[0] == RouterRequest((("user", rows[0]["prompt"]),))
    assert table.requests[2].turns == (("system", "Be brief."), ("user", rows[2]["prompt"]))
    for broken in ("{", "[1]", "{}", '[{"content": "no role"}]'):
        rows[1]["messages"] = broken
        parquet.write_table(arrow.Table.from_pylist(rows), folder / "prompts.parquet")
        with pytest.raises(TrainingError, match="are not a chat"):
            read_graded(folder, ("weak", "strong"))
