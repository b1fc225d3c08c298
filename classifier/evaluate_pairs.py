"""Graded pairs out of a folder, and what routing between them would have bought.

A folder holds ``prompts.parquet`` (``prompt_id``, ``benchmark``, ``domain``, ``prompt``, ``group_id``, ``fold``) and
``scores.parquet`` (``prompt_id``, ``model``, ``score``); further columns are ignored. Reading needs pyarrow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from classifier.curves import pair_curve
from classifier.errors import TrainingError
from classifier.metrics import bootstrap_interval
from classifier.pair_model import MIN_ROWS, PairModel
from classifier.pair_rows import Floats, Ints, PairRows, PromptCounts


@dataclass(frozen=True, slots=True)
class PairTable:
    """Pairs of one weak and one strong model, with where each prompt comes from.

    Attributes
    ----------
    rows : prompts and grades
    benchmarks : n names
    folds : int64 (n,), group-safe; -1 where the folder has none
    group_names, prompt_ids : n names, to keep what is in a test set out of a training set
    """

    rows: PairRows
    benchmarks: tuple[str, ...]
    folds: Ints
    group_names: tuple[str, ...]
    prompt_ids: tuple[str, ...]

    def take(self, rows: Ints) -> PairTable:
        """Some of the rows."""
        return PairTable(
            self.rows.take(rows),
            tuple(self.benchmarks[i] for i in rows),
            self.folds[rows],
            tuple(self.group_names[i] for i in rows),
            tuple(self.prompt_ids[i] for i in rows),
        )

    def without_overlap(self, other: PairTable) -> PairTable:
        """Rows whose prompt and group do not occur in another table."""
        groups, ids = set(other.group_names), set(other.prompt_ids)
        kept = [
            i
            for i, (group, name) in enumerate(zip(self.group_names, self.prompt_ids, strict=True))
            if group not in groups and name not in ids
        ]
        return self.take(np.array(kept, dtype=np.int64))


def read_pairs(folder: Path, weak: str, strong: str, benchmark: str | None = None) -> PairTable:
    """Prompts of a folder that both models answered.

    Raises
    ------
    TrainingError
        The folder is not readable in the schema above, or the two models share no prompt in it.
    """
    prompts, scores = (read_columns(folder / name) for name in _COLUMNS)
    grades: dict[str, dict[str, float]] = {}
    for row in scores:
        if row["model"] in (weak, strong) and row["score"] is not None:
            grades.setdefault(row["prompt_id"], {})[row["model"]] = float(row["score"])
    known = [
        row for row in prompts if len(grades.get(row["prompt_id"], ())) == 2 and benchmark in (None, row["benchmark"])
    ]
    if not known:
        of = f" of the benchmark {benchmark!r}" if benchmark else ""
        raise TrainingError(f"{folder} has no prompt{of} that both {weak!r} and {strong!r} answered.")
    return _table(known, grades, weak, strong)


_COLUMNS = {
    "prompts.parquet": ("prompt_id", "benchmark", "domain", "prompt", "group_id", "fold"),
    "scores.parquet": ("prompt_id", "model", "score", "cost_usd", "cost_usd_est", "out_chars"),
}
_NEEDED = frozenset({"prompt_id", "benchmark", "prompt", "model", "score"})


def read_columns(path: Path) -> list[dict[str, Any]]:
    """The known columns of one of the two files, those that are there.

    Raises
    ------
    TrainingError
        It cannot be read, or lacks a column that is needed.
    """
    columns = _COLUMNS[path.name]
    try:
        import pyarrow.parquet as parquet  # type: ignore[import-untyped]
    except ImportError as error:
        raise TrainingError("Reading parquet files needs pyarrow: pip install pyarrow.") from error
    try:
        file = parquet.ParquetFile(path)
        there = set(file.schema_arrow.names)
        if missing := sorted((set(columns) & _NEEDED) - there):
            raise TrainingError(f"{path} lacks the columns {', '.join(missing)}.")
        rows: list[dict[str, Any]] = file.read(columns=[name for name in columns if name in there]).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are kinds of both
        raise TrainingError(f"{path} cannot be read as parquet: {error}") from error
    return rows


def _table(known: list[dict[str, Any]], grades: dict[str, dict[str, float]], weak: str, strong: str) -> PairTable:
    ids = tuple(str(row["prompt_id"]) for row in known)
    names = tuple(str(row.get("group_id") or row["prompt_id"]) for row in known)
    groups = np.unique(names, return_inverse=True)[1].astype(np.int64)
    rows = PairRows(
        tuple(str(row["prompt"]) for row in known),
        np.array([grades[each][weak] for each in ids]),
        np.array([grades[each][strong] for each in ids]),
        groups,
        # A label may mean different things in two benchmarks.
        tuple(f"{row['benchmark']}/{row.get('domain')}" for row in known),
    )
    folds = np.array([-1 if row.get("fold") is None else row["fold"] for row in known], dtype=np.int64)
    return PairTable(rows, tuple(str(row["benchmark"]) for row in known), folds, names, ids)


@dataclass(frozen=True, slots=True)
class Estimated:
    """Gains estimated for rows a model had not seen, float64 (n,), and which look foreign, bool (n,)."""

    gains: Floats
    is_foreign: np.ndarray
    weights: dict[str, float]


def estimate(train: PairTable, test: PairTable, *, seed: int, counts: PromptCounts | None = None) -> Estimated:
    """Fit on one table, estimate another; groups they share are left out of training.

    ``counts`` are those of both tables' prompts, made here when not given.

    A prompt is foreign when its nearest training prompt is less similar than that of all but 5 % of left-out training
    prompts; the safe choice for it is the strong model.
    """
    apart = train.without_overlap(test)
    if len(apart.rows) < MIN_ROWS:
        raise TrainingError(
            f"{len(apart.rows)} training pairs share no group with the test set; {MIN_ROWS} are needed."
        )
    counts = counts or PromptCounts((*apart.rows.prompts, *test.rows.prompts))
    model = PairModel(apart.rows, counts, seed=seed)
    gains, similarity = model.gains(test.rows.prompts)
    return Estimated(gains, similarity < model.least_similarity, model.weights)


def cross_estimate(table: PairTable, *, seed: int) -> Estimated:
    """Every row estimated by a model fitted on the other folds of the data's own group-safe split.

    Raises
    ------
    TrainingError
        The rows carry no folds.
    """
    if len(np.unique(table.folds)) < 2 or table.folds.min() < 0:
        raise TrainingError("The prompts carry no fold numbers; give different folders for --train and --test.")
    gains, foreign = np.zeros(len(table.rows)), np.zeros(len(table.rows), dtype=np.bool_)
    total: dict[str, float] = {}
    counts = PromptCounts(table.rows.prompts)
    for inside, outside in _fold_rows(table.folds):
        found = estimate(table.take(inside), table.take(outside), seed=seed, counts=counts)
        # Each fold's model has a scale of its own.
        spread = float(found.gains.std()) or 1.0
        gains[outside] = (found.gains - found.gains.mean()) / spread
        foreign[outside] = found.is_foreign
        for name, weight in found.weights.items():
            total[name] = total.get(name, 0.0) + weight / len(np.unique(table.folds))
    return Estimated(gains, foreign, total)


def learning_curve(table: PairTable, sizes: Sequence[int], *, seed: int) -> list[dict[str, Any]]:
    """APGR of routers fitted on so many labels of the other folds, drawn at random by whole groups.

    A size counts prompts; each is one grade of the weak and one of the strong answer. With none there is nothing to
    route by, which is chance.
    """
    found: list[dict[str, Any]] = [{"num_labels": 0, "apgr": 0.5}]
    rng, counts = np.random.default_rng(seed), PromptCounts(table.rows.prompts)
    for size in sizes:
        gains = np.zeros(len(table.rows))
        for inside, outside in _fold_rows(table.folds):
            some = inside[np.sort(rng.permutation(len(inside))[:size])]
            guess = estimate(table.take(some), table.take(outside), seed=seed, counts=counts).gains
            gains[outside] = (guess - guess.mean()) / (float(guess.std()) or 1.0)
        curve = pair_curve(gains, table.rows.weak, table.rows.strong)
        found.append({"num_labels": min(size, len(inside)), "apgr": _number(curve.apgr)})
    return found


def _fold_rows(folds: Ints) -> Iterator[tuple[Ints, Ints]]:
    for fold in np.unique(folds):
        yield np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)


def measure(
    table: PairTable, found: Estimated, *, seed: int, num_resamples: int = 200, costs_usd: Floats | None = None
) -> dict[str, Any]:
    """RouteLLM's figures for the router, prompt length, chance and an oracle, as JSON-able numbers.

    ``strong_share_95`` and ``_99`` are the least shares of strong calls that hold 95 and 99 % of the strong model's
    quality; for chance that is also the best fixed mix without a router. ``cost_usd_95`` and ``_99`` are what a request
    costs there, where every answer's cost is known (``costs_usd``, float64 (n, 2), weak and strong).
    """
    weak, strong = table.rows.weak, table.rows.strong
    lengths = np.array([float(len(prompt)) for prompt in table.rows.prompts])
    rankings = {"router": found.gains, "length": lengths, "oracle": strong - weak, "random": np.zeros(len(weak))}
    # Without a guard's opinion nothing changes; with it, foreign prompts are the first to go up.
    rankings["guarded"] = np.where(found.is_foreign, np.inf, found.gains)
    result: dict[str, Any] = {}
    for name, benefit in rankings.items():
        curve = pair_curve(benefit, weak, strong)
        result[name] = {
            "apgr": _number(curve.apgr),
            "cpt50": curve.share_recovering(0.5),
            "cpt80": curve.share_recovering(0.8),
            "strong_share_95": curve.share_holding(0.95),
            "strong_share_99": curve.share_holding(0.99),
        }
        if costs_usd is not None and np.isfinite(costs_usd).all():
            for level in (95, 99):
                share = result[name][f"strong_share_{level}"]
                result[name][f"cost_usd_{level}"] = _cost_at(benefit, share, costs_usd)
    interval = bootstrap_interval(
        lambda rows: pair_curve(found.gains[rows], weak[rows], strong[rows]).apgr,
        table.rows.groups,
        seed=seed,
        num_resamples=num_resamples,
    )
    result["router"]["apgr_interval"] = [_number(interval.low), _number(interval.high)]
    return {
        "num_prompts": len(weak),
        "weak_quality": float(weak.mean()),
        "strong_quality": float(strong.mean()),
        "share_foreign": float(found.is_foreign.mean()),
        "votes": {name: round(weight, 5) for name, weight in sorted(found.weights.items())},
        "rankings": result,
    }


def _cost_at(benefit: Floats, share: float, costs_usd: Floats) -> float:
    """Mean cost when this share, highest benefit first, goes to the strong model; ties go by lot."""
    order = np.argsort(-benefit, kind="stable")
    extra = (costs_usd[:, 1] - costs_usd[:, 0])[order]
    _, block, sizes = np.unique(-benefit[order], return_inverse=True, return_counts=True)
    even = (np.bincount(block, weights=extra) / sizes)[block]
    return float(costs_usd[:, 0].mean() + even[: round(share * len(order))].sum() / len(order))


def _number(value: float) -> float | None:
    return value if np.isfinite(value) else None
