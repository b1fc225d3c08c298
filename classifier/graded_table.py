"""Reads prompts graded for a ladder of models, and what each answer cost, out of a folder.

A folder holds ``prompts.parquet`` (``prompt_id``, ``benchmark``, ``prompt``; ``group_id`` and ``fold`` where there are
any) and ``scores.parquet`` (``prompt_id``, ``model``, ``score``; ``cost_usd``, ``cost_usd_est`` and ``out_chars`` where
there are any). Costs are what the source measured, or its estimate; where it has neither, they come from prices per
million tokens at four characters a token. Reading needs pyarrow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from classifier.errors import TrainingError
from classifier.rows import Floats, Ints, Rows
from classifier.table import TrainingTable
from classifier.tool_features import chat_request
from classifier.types import RouterRequest

CHARS_PER_TOKEN = 4
Prices = Mapping[str, tuple[float, float]]
"""Model -> USD per million tokens in and out."""

_COLUMNS = {
    "prompts.parquet": ("prompt_id", "benchmark", "prompt", "group_id", "fold", "messages", "tools"),
    "scores.parquet": ("prompt_id", "model", "score", "cost_usd", "cost_usd_est", "out_chars"),
}
_NEEDED = frozenset({"prompt_id", "benchmark", "prompt", "model", "score"})


@dataclass(frozen=True, slots=True, kw_only=True)
class GradedTable(Rows):
    """Holds prompts that every model of a ladder answered, cheapest model first.

    Attributes
    ----------
    prompts : n texts
    requests : n requests, as a router is asked about them: one user turn each, or a conversation with its tools
    scores : float64 (n, num_models), 0..1
    costs_usd : float64 (n, num_models), NaN where unknown
    folds : int64 (n,), group-safe; -1 where the folder has none
    benchmarks : n names
    group_names, prompt_ids : n names, to keep what is in a test set out of a training set
    """

    prompts: tuple[str, ...]
    requests: tuple[RouterRequest, ...]
    scores: Floats
    costs_usd: Floats
    folds: Ints
    benchmarks: tuple[str, ...]
    group_names: tuple[str, ...]
    prompt_ids: tuple[str, ...]

    @property
    def groups(self) -> Ints:
        """Return the numbers of the groups, int64 (n,): near-duplicates share one."""
        return np.unique(self.group_names, return_inverse=True)[1].astype(np.int64)

    @property
    def lengths(self) -> Floats:
        """Return the characters of the prompts, float64 (n,)."""
        return np.array([len(prompt) for prompt in self.prompts], dtype=np.float64)

    def training_table(self) -> TrainingTable:
        """Return the table as a router is fitted on it."""
        window = f"{', '.join(sorted(set(self.benchmarks)))}: {len(self)} graded prompts"
        return TrainingTable.build(self.requests, self.scores, groups=self.groups, window=window)

    def require_costs(self, models: Sequence[str]) -> None:
        """Raise :class:`TrainingError` for models, of these in order, with an answer whose cost is not known."""
        costs = zip(models, self.costs_usd.T, strict=True)
        if missing := [model for model, cost in costs if not np.isfinite(cost).all()]:
            raise TrainingError(f"No cost is known for {', '.join(missing)}: give --price MODEL=IN,OUT, USD per Mtok.")

    def without_overlap(self, other: GradedTable) -> GradedTable:
        """Return the rows whose prompt and group do not occur in another table."""
        groups, ids = set(other.group_names), set(other.prompt_ids)
        named = zip(self.group_names, self.prompt_ids, strict=True)
        return self.take(np.array([group not in groups and name not in ids for group, name in named], dtype=np.bool_))


def read_graded(
    folder: Path, models: Sequence[str], benchmarks: Sequence[str] = (), prices: Prices | None = None
) -> GradedTable:
    """Read the prompts of a folder that all models answered, of some benchmarks or of all.

    Raises
    ------
    TrainingError
        The folder cannot be read, or the models share no prompt in it.
    """
    prompts, wanted = _read_columns(folder / "prompts.parquet"), set(models)
    answers = {
        (row["prompt_id"], row["model"]): row
        for row in _read_columns(folder / "scores.parquet")
        if row["model"] in wanted and row["score"] is not None
    }
    known = [
        row
        for row in prompts
        if (not benchmarks or row["benchmark"] in benchmarks)
        and all((row["prompt_id"], model) in answers for model in models)
    ]
    if not known:
        of = f" of {', '.join(benchmarks)}" if benchmarks else ""
        raise TrainingError(f"{folder} has no prompt{of} that all of {', '.join(models)} answered.")
    prices = {**read_prices(folder), **(prices or {})}
    graded = [[answers[row["prompt_id"], model] for model in models] for row in known]
    costs = [
        [_cost_usd(answer, len(str(row["prompt"])), prices.get(answer["model"])) for answer in of_prompt]
        for row, of_prompt in zip(known, graded, strict=True)
    ]
    return GradedTable(
        prompts=tuple(str(row["prompt"]) for row in known),
        requests=tuple(_request(folder, row) for row in known),
        scores=np.array([[float(answer["score"]) for answer in of_prompt] for of_prompt in graded]),
        costs_usd=np.array(costs, dtype=np.float64),
        folds=np.array([-1 if row.get("fold") is None else row["fold"] for row in known], dtype=np.int64),
        benchmarks=tuple(str(row["benchmark"]) for row in known),
        group_names=tuple(str(row.get("group_id") or row["prompt_id"]) for row in known),
        prompt_ids=tuple(str(row["prompt_id"]) for row in known),
    )


def _request(folder: Path, row: Mapping[str, Any]) -> RouterRequest:
    """Return one row's request; ``messages`` and ``tools`` are JSON text, as in a chat completion's body."""
    if row.get("messages") is None:
        return RouterRequest(turns=(("user", str(row["prompt"])),))
    try:
        messages, tools = json.loads(row["messages"]), json.loads(row.get("tools") or "[]")
        if not isinstance(messages, list) or not messages or not isinstance(tools, list):
            raise TypeError("not lists")
        return chat_request(messages, tools)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise TrainingError(f"{folder}: messages or tools of {row['prompt_id']!r} are not a chat ({error}).") from error


def _read_columns(path: Path) -> list[dict[str, Any]]:
    """Read the known columns of one of the two files, those that are there."""
    try:
        import pyarrow.parquet as parquet  # type: ignore[import-untyped]
    except ImportError as error:
        raise TrainingError("Reading parquet files needs pyarrow: pip install pyarrow.") from error
    try:
        file = parquet.ParquetFile(path)
        there = set(file.schema_arrow.names)
        if missing := sorted((set(_COLUMNS[path.name]) & _NEEDED) - there):
            raise TrainingError(f"{path} lacks the columns {', '.join(missing)}.")
        rows: list[dict[str, Any]] = file.read(
            columns=[name for name in _COLUMNS[path.name] if name in there]
        ).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are kinds of both
        raise TrainingError(f"{path} cannot be read as parquet: {error}") from error
    return rows


def read_prices(folder: Path) -> dict[str, tuple[float, float]]:
    """Read ``model_prices.json`` of a folder, where there is one.

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
    """Return what an answer cost; NaN where nobody knows."""
    for column in ("cost_usd", "cost_usd_est"):
        if answer.get(column) is not None:
            return float(answer[column])
    if price is None:
        return float("nan")
    # Without a recorded length the answer counts nothing: right for a letter, too cheap for an essay.
    num_in, num_out = prompt_chars / CHARS_PER_TOKEN, (answer.get("out_chars") or 0) / CHARS_PER_TOKEN
    return (num_in * price[0] + num_out * price[1]) / 1e6
