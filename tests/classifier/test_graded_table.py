"""Graded prompts are read as the folder has them, priced where nobody measured, and refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from classifier.errors import TrainingError
from classifier.graded_table import read_graded, read_prices
from tests.classifier.graded_folder import folder_of

PAIR = ("weak", "strong")


def write(folder: Path, prompts: list[dict[str, Any]], scores: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    parquet.write_table(arrow.Table.from_pylist(prompts), folder / "prompts.parquet")
    parquet.write_table(arrow.Table.from_pylist(scores), folder / "scores.parquet")
    return folder


def prompt(name: str, **columns: Any) -> dict[str, Any]:
    return {"prompt_id": name, "benchmark": "b", "prompt": "what " * 8} | columns


def graded(name: str, model: str, score: float | None, **columns: Any) -> dict[str, Any]:
    return {"prompt_id": name, "model": model, "score": score} | columns


def test_only_prompts_that_every_model_answered_are_read(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "a",
        [prompt("one"), prompt("two"), prompt("three"), prompt("four", benchmark="other")],
        [
            *(graded(name, model, 0.5) for name in ("one", "four") for model in PAIR),
            graded("two", "weak", 1.0),
            graded("three", "weak", 1.0),
            graded("three", "strong", None),
        ],
    )
    assert read_graded(folder, PAIR).prompt_ids == ("one", "four")
    assert read_graded(folder, PAIR, ["other"]).prompt_ids == ("four",)
    assert read_graded(folder, ["weak"]).prompt_ids == ("one", "two", "three", "four")


def test_models_keep_the_order_they_are_asked_in(tmp_path: Path) -> None:
    rows = [graded("one", "weak", 0.0), graded("one", "strong", 1.0), graded("one", "middle", 0.5)]
    folder = write(tmp_path / "a", [prompt("one")], rows)
    assert read_graded(folder, ["weak", "middle", "strong"]).scores.tolist() == [[0.0, 0.5, 1.0]]
    assert read_graded(folder, ["strong", "weak"]).scores.tolist() == [[1.0, 0.0]]


def test_a_cost_is_measured_or_estimated_or_reckoned_or_unknown(tmp_path: Path) -> None:
    names = ("measured", "estimated", "priced", "unknown length")
    known: list[dict[str, Any]] = [
        {"cost_usd": 1.0, "cost_usd_est": 2.0, "out_chars": 40},
        {"cost_usd": None, "cost_usd_est": 2.0, "out_chars": 40},
        {"cost_usd": None, "cost_usd_est": None, "out_chars": 40},
        {"cost_usd": None, "cost_usd_est": None, "out_chars": None},
    ]
    rows = [graded(name, model, 1.0, **each) for name, each in zip(names, known, strict=True) for model in PAIR]
    folder = write(tmp_path / "a", [prompt(name) for name in names], rows)
    found = read_graded(folder, PAIR, prices={"weak": (1.0, 2.0)}).costs_usd
    # 40 characters are 10 tokens, in and out.
    assert found[:, 0] == pytest.approx([1.0, 2.0, 30e-6, 10e-6])
    assert np.isnan(found[2:, 1]).all()


def test_prices_that_are_given_go_before_the_folders(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", [prompt("one")], [graded("one", model, 1.0) for model in PAIR])
    assert read_prices(folder) == {}
    prices = {model: {"usd_per_mtok_in": 1.0, "usd_per_mtok_out": 1.0} for model in PAIR}
    (folder / "model_prices.json").write_text(json.dumps(prices))
    assert read_graded(folder, PAIR).costs_usd.tolist() == [[10e-6, 10e-6]]
    assert read_graded(folder, PAIR, prices={"weak": (3.0, 0.0)}).costs_usd.tolist() == [[30e-6, 10e-6]]


@pytest.mark.parametrize(
    "written", ["", "{", "[]", '{"weak": 1.0}', '{"weak": {"usd_per_mtok_in": "dear", "usd_per_mtok_out": 1}}']
)
def test_prices_of_another_form_are_refused(tmp_path: Path, written: str) -> None:
    (tmp_path / "model_prices.json").write_text(written)
    with pytest.raises(TrainingError, match=r"model_prices\.json"):
        read_prices(tmp_path)


def test_without_groups_and_folds_each_prompt_stands_alone(tmp_path: Path) -> None:
    rows = [graded(name, model, 1.0) for name in ("one", "two") for model in PAIR]
    plain = read_graded(write(tmp_path / "a", [prompt("one"), prompt("two")], rows), PAIR)
    assert plain.folds.tolist() == [-1, -1]
    assert len(set(plain.groups.tolist())) == 2
    twins = [prompt(name, group_id="twins", fold=3) for name in ("one", "two")]
    grouped = read_graded(write(tmp_path / "b", twins, rows), PAIR)
    assert grouped.folds.tolist() == [3, 3]
    assert len(set(grouped.groups.tolist())) == 1


def test_what_shares_a_group_or_a_prompt_is_left_out(tmp_path: Path) -> None:
    table = read_graded(folder_of(tmp_path / "a", 6), PAIR)
    half = table.take(np.arange(120))
    assert table.without_overlap(half).prompt_ids == table.prompt_ids[120:]
    assert len(half.without_overlap(table)) == 0
    rows = [graded(name, model, 1.0) for name in "abcd" for model in PAIR]
    groups = {"a": "twins", "b": "twins", "c": "other", "d": "last"}
    mixed = read_graded(write(tmp_path / "b", [prompt(n, group_id=g) for n, g in groups.items()], rows), PAIR)
    assert mixed.without_overlap(mixed.take([0])).prompt_ids == ("c", "d")


def test_it_is_fitted_on_as_it_was_read(tmp_path: Path) -> None:
    table = read_graded(folder_of(tmp_path / "a", 6, num_prompts=40), PAIR)
    fitted_on = table.training_table()
    assert [request.text for request in fitted_on.requests] == list(table.prompts)
    assert (fitted_on.scores == table.scores).all()
    assert (fitted_on.groups == table.groups).all()
    assert fitted_on.window == "made: 40 graded prompts"


def test_unusable_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"prompts\.parquet"):
        read_graded(tmp_path, PAIR)
    folder = folder_of(tmp_path / "a", 7, num_prompts=5)
    with pytest.raises(TrainingError, match="unheard-of"):
        read_graded(folder, ["weak", "unheard-of"])
    with pytest.raises(TrainingError, match="absent"):
        read_graded(folder, PAIR, ["absent"])
    (folder / "scores.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(TrainingError, match=r"scores\.parquet"):
        read_graded(folder, PAIR)
    narrow = write(tmp_path / "b", [{"prompt_id": "one", "prompt": "?"}], [graded("one", "weak", 1.0)])
    with pytest.raises(TrainingError, match="lacks the columns benchmark"):
        read_graded(narrow, PAIR)
