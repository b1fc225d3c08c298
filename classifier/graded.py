"""Prompts graded for a ladder of models, and what each answer cost, out of a folder.

Costs are what the source measured, or its estimate; where it has neither, they come from prices per million tokens at
four characters a token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from classifier.errors import TrainingError
from classifier.evaluate_pairs import read_columns
from classifier.pair_rows import Floats, Ints
from classifier.score_model import ScoreRows

CHARS_PER_TOKEN = 4
Prices = Mapping[str, tuple[float, float]]
"""Model -> USD per million tokens in and out."""


@dataclass(frozen=True, slots=True)
class GradedTable:
    """Prompts that every model of a ladder answered, cheapest model first.

    Attributes
    ----------
    rows : prompts and grades
    costs_usd : float64 (n, num_models), NaN where unknown
    benchmarks, group_names, prompt_ids : n names
    folds : int64 (n,), -1 where the folder has none
    """

    rows: ScoreRows
    costs_usd: Floats
    benchmarks: tuple[str, ...]
    group_names: tuple[str, ...]
    prompt_ids: tuple[str, ...]
    folds: Ints

    def take(self, rows: Ints) -> GradedTable:
        """Some of the rows."""
        names = (tuple(each[i] for i in rows) for each in (self.benchmarks, self.group_names, self.prompt_ids))
        benchmarks, groups, ids = names
        return GradedTable(self.rows.take(rows), self.costs_usd[rows], benchmarks, groups, ids, self.folds[rows])

    def without_overlap(self, other: GradedTable) -> GradedTable:
        """Rows whose prompt and group do not occur in another table."""
        groups, ids = set(other.group_names), set(other.prompt_ids)
        pairs = zip(self.group_names, self.prompt_ids, strict=True)
        kept = [i for i, (group, name) in enumerate(pairs) if group not in groups and name not in ids]
        return self.take(np.array(kept, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.rows)


def read_graded(
    folder: Path, models: Sequence[str], benchmarks: Sequence[str] = (), prices: Prices | None = None
) -> GradedTable:
    """Prompts of a folder that all models answered, of some benchmarks or of all.

    Raises
    ------
    TrainingError
        The folder cannot be read, or the models share no prompt in it.
    """
    prompts = read_columns(folder / "prompts.parquet")
    wanted, found = set(models), {}
    for row in read_columns(folder / "scores.parquet"):
        if row["model"] in wanted and row["score"] is not None:
            found[row["prompt_id"], row["model"]] = row
    known = [
        row
        for row in prompts
        if (not benchmarks or row["benchmark"] in benchmarks)
        and all((row["prompt_id"], model) in found for model in models)
    ]
    if not known:
        of = f" of {', '.join(benchmarks)}" if benchmarks else ""
        raise TrainingError(f"{folder} has no prompt{of} that all of {', '.join(models)} answered.")
    prices = {**read_prices(folder), **(prices or {})}
    answers = [[found[row["prompt_id"], model] for model in models] for row in known]
    names = tuple(str(row.get("group_id") or row["prompt_id"]) for row in known)
    rows = ScoreRows(
        tuple(str(row["prompt"]) for row in known),
        np.array([[float(each["score"]) for each in of_prompt] for of_prompt in answers]),
        np.unique(names, return_inverse=True)[1].astype(np.int64),
        tuple(f"{row['benchmark']}/{row.get('domain')}" for row in known),
    )
    costs = [
        [
            _cost_usd(answer, len(str(row["prompt"])), prices.get(model))
            for answer, model in zip(each, models, strict=True)
        ]
        for row, each in zip(known, answers, strict=True)
    ]
    return GradedTable(
        rows,
        np.array(costs, dtype=np.float64),
        tuple(str(row["benchmark"]) for row in known),
        names,
        tuple(str(row["prompt_id"]) for row in known),
        np.array([-1 if row.get("fold") is None else row["fold"] for row in known], dtype=np.int64),
    )


def read_prices(folder: Path) -> dict[str, tuple[float, float]]:
    """``model_prices.json`` of a folder, where there is one.

    Raises
    ------
    TrainingError
        It is not of the form ``{"model": {"usd_per_mtok_in": 1.0, "usd_per_mtok_out": 2.0}}``.
    """
    path = folder / "model_prices.json"
    try:
        return {
            str(model): (float(each["usd_per_mtok_in"]), float(each["usd_per_mtok_out"]))
            for model, each in json.loads(path.read_text()).items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrainingError(f"{path} cannot be read as prices ({type(error).__name__}: {error}).") from error


def _cost_usd(answer: Mapping[str, Any], prompt_chars: int, price: tuple[float, float] | None) -> float:
    """NaN where nobody knows."""
    for column in ("cost_usd", "cost_usd_est"):
        if answer.get(column) is not None:
            return float(answer[column])
    if price is None:
        return float("nan")
    # Without a recorded length the answer counts nothing: right for a letter, too cheap for an essay.
    num_in, num_out = prompt_chars / CHARS_PER_TOKEN, (answer.get("out_chars") or 0) / CHARS_PER_TOKEN
    return (num_in * price[0] + num_out * price[1]) / 1e6
