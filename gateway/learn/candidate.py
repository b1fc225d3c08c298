"""A candidate for the serving router's place: fitted on one part of the log, to be judged on another.

Two families compete. An *adjustment* of the base router is learnt from what every row keeps, texts or not, and heals
with some hundred checks. A *refit* starts anew from the texts, where retention kept enough of them. Whichever tells
good answers from bad ones better on the newest part of the training rows is the candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from classifier.adjusting import Adjusted, fit_adjustment
from classifier.artifact import RouterArtifact
from classifier.metrics import log_loss, roc_auc
from classifier.router import ArtifactRouter
from gateway.learn.decision import derive, labelled_traffic, thinned
from gateway.learn.rows import LearningTable
from policies.ladder import Ladder

Floats = NDArray[np.float64]
Step = Callable[[str, float], None]
"""Told the stage and the part of the whole that is done."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A router that does not serve yet.

    Attributes
    ----------
    artifact : with its card inside
    kind : how it was made
    """

    artifact: RouterArtifact
    kind: str


def fit_candidate(
    table: LearningTable, serving: ArtifactRouter, ladder: Ladder, *, seed: int, window: str, step: Step
) -> Candidate:
    """Adjust the serving router's base to the checked answers of a table.

    Parameters
    ----------
    table : training rows, none of those it will be judged on
    serving : the router that serves; its base stays, its own adjustment is replaced
    ladder : for costs
    window : what the rows are, for the card
    step : progress

    Raises
    ------
    TrainingError
        Too few checked answers.
    """
    step("fit", 0.4)
    rows = table.checked()
    found = fit_adjustment(rows, serving.space, seed=seed)
    step("derive thresholds", 0.6)
    base = base_arrays(serving.artifact)
    described = _described(serving, table, found, seed, window)
    plain = RouterArtifact.create({**base, **found.adjustment.arrays()}, described)
    decision = derive(_traffic(plain, table, found, ladder, seed), serving.decision)
    return Candidate(plain.with_metadata(decision=decision), found.kind)


def base_arrays(artifact: RouterArtifact) -> dict[str, NDArray[Any]]:
    """A router's arrays without an adjustment."""
    return {name: array for name, array in artifact.arrays.items() if not name.startswith("adjust_")}


def _traffic(plain: RouterArtifact, table: LearningTable, found: Adjusted, ladder: Ladder, seed: int) -> Any:
    """Graded traffic whose estimates had not seen its labels."""
    right, good, _ = ArtifactRouter(plain).revise(table.views)
    checked = np.flatnonzero(table.is_checked)
    good[checked, :-1] = found.left_out
    kept = thinned(table, seed)
    return labelled_traffic(table.take(kept), right[kept], good[kept], ladder)


def _described(
    serving: ArtifactRouter, table: LearningTable, found: Adjusted, seed: int, window: str
) -> dict[str, Any]:
    rows = table.checked()
    metadata = {name: value for name, value in serving.artifact.metadata.items() if name not in ("decision", "note")}
    metadata["base"] = serving.base_version
    metadata["parent"] = serving.version
    metadata["adjustment"] = {
        "kind": found.kind,
        "window": window,
        "seed": seed,
        "num_rows": len(rows),
        "num_labels": rows.num_labels,
        "num_requests": table.num_requests,
        "num_left_out": table.num_other,
        "log_loss_left_out": {kind: round(loss, 5) for kind, loss in found.losses.items()},
    }
    return metadata


def held_out_metrics(
    table: LearningTable, train: LearningTable, estimates: Mapping[str, Floats]
) -> list[dict[str, Any]]:
    """How well routers tell good answers from bad ones on rows none has seen, beside prompt length and the base rate.

    Parameters
    ----------
    table : the rows to judge on
    train : the rows that prompt length and the base rate are fitted on
    estimates : router's name -> float64 (n, T), P(as good)
    """
    found = []
    for tier in range(table.num_tiers - 1):
        known = np.flatnonzero(~np.isnan(table.labels[:, tier]))
        outcome = table.labels[known, tier]
        entry: dict[str, Any] = {"tier": tier + 1, "num_labels": len(known)}
        guesses = {name: each[known, tier] for name, each in estimates.items()}
        if len(known):
            entry["share_good"] = float(outcome.mean())
            guesses |= _plain_guesses(train, tier, table.lengths[known])
            entry |= {
                name: {"log_loss": log_loss(guess, outcome), "auc": _auc(guess, outcome)}
                for name, guess in guesses.items()
            }
        found.append(entry)
    return found


def _plain_guesses(train: LearningTable, tier: int, lengths: Floats) -> dict[str, Floats]:
    """P(as good) from prompt length alone, by ten bins of the training rows, and the base rate."""
    known = np.flatnonzero(~np.isnan(train.labels[:, tier]))
    if not len(known):
        return {}
    outcome = train.labels[known, tier]
    base = float(outcome.mean())
    edges = np.unique(np.quantile(train.lengths[known], np.linspace(0, 1, 11)[1:-1]))
    bins = np.searchsorted(edges, train.lengths[known])
    sums = np.bincount(bins, weights=outcome, minlength=len(edges) + 1)
    counts = np.bincount(bins, minlength=len(edges) + 1)
    by_length = ((sums + 2 * base) / (counts + 2))[np.searchsorted(edges, lengths)]
    return {"length": by_length, "base_rate": np.full(len(lengths), base)}


def _auc(guess: Floats, outcome: Floats) -> float | None:
    auc = roc_auc(guess, outcome)
    return auc if np.isfinite(auc) else None
