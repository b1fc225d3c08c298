"""A candidate for the serving router's place: fitted on one part of the log, to be judged on another.

Two families compete. An *adjustment* of the base router is learnt from what every row keeps, texts or not, and heals
with some hundred checks. A *refit* starts anew from the texts, where retention kept enough of them, once for every
source of features there is. Whichever tells good answers from bad ones better on checked answers that its fits had not
seen is the candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from classifier.adjustment_fitter import FittedAdjustment, fit_adjustment
from classifier.artifact import RouterArtifact
from classifier.embedding import Embedder
from classifier.metrics import log_loss, roc_auc
from classifier.router import ADJUSTS_BY_TOOLS, ArtifactRouter
from gateway.learn.decision_replay import Estimates
from gateway.learn.feature_sources import SourceFactory
from gateway.learn.learning_table import LearningTable
from gateway.learn.refit import Refit, can_refit, fit_refits, predict
from gateway.learn.threshold_derivation import derive, labelled_traffic, thinned
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
    reads_text : its estimates of logged requests need their prompts
    embedder : what else it reads of them
    """

    artifact: RouterArtifact
    kind: str
    reads_text: bool = False
    embedder: Embedder | None = None

    def judged_rows(self, table: LearningTable) -> LearningTable:
        """Return the rows that it can be judged on."""
        return table.take(np.flatnonzero(table.has_text)) if self.reads_text else table

    def estimates(self, table: LearningTable) -> Estimates:
        """Return its estimates of :meth:`judged_rows`."""
        if self.reads_text:
            return predict(self.artifact, table.prompts(), self.embedder)
        return Estimates(*ArtifactRouter(self.artifact).revise(table.views))


def fit_candidate(
    table: LearningTable,
    judge: LearningTable,
    serving: ArtifactRouter,
    ladder: Ladder,
    *,
    sources: Sequence[SourceFactory] = (),
    seed: int,
    window: str,
    step: Step,
) -> Candidate:
    """Fit adjustments of the serving router's base, and refits where texts allow; give the best.

    Parameters
    ----------
    table : training rows, none of those it will be judged on
    judge : the rows it will be judged on; only whether their texts are known is looked at
    serving : the router that serves; its base stays, its own adjustment is replaced
    ladder : for costs
    sources : of further features for refits; one that cannot be had is left out, and the card says why
    window : what the rows are, for the card
    step : progress

    Raises
    ------
    TrainingError
        Too few checked answers.
    """
    step("fit", 0.4)
    by_tools = table.views.tools is not None and not serving.reads_tools
    adjusted = fit_adjustment(table.checked(), replace(serving.space, reads_tools=by_tools), seed=seed)
    described, refits = _summary(table, adjusted, seed, window), list[Refit]()
    if can_refit(table, judge):
        step("refit", 0.45)
        refits, refused = fit_refits(
            table,
            serving,
            sources,
            seed=seed,
            window=window,
            progress=lambda done: step("fine-tune the encoder", 0.5 + 0.1 * done),
        )
        described["log_loss_left_out"] |= {each.kind: round(each.loss, 5) for each in refits}
        described["sources_left_out"] = refused
    compared = _compared(table, adjusted, refits)
    described["log_loss_compared"] = {kind: round(loss, 5) for kind, loss in compared.items()}
    described["kind"] = best = min(compared, key=compared.__getitem__)
    step("derive thresholds", 0.6)
    for refit in refits:
        if refit.kind == best:
            return _refit_candidate(table, serving, refit, ladder, described, seed)
    return _adjusted_candidate(table, serving, adjusted, ladder, described, seed)


def _compared(table: LearningTable, adjusted: FittedAdjustment, refits: Sequence[Refit]) -> dict[str, float]:
    """Log-loss of the adjustment and of every refit, on the checked answers that all of them had left out.

    Refits' rows go back to a moment each, so those of the one that goes back least are in all. Of equal losses the
    adjustment's is the first.
    """
    checked = np.flatnonzero(table.is_checked)
    rows = min((each.rows for each in refits), key=len, default=checked)
    labels = table.labels[rows]
    known = ~np.isnan(labels)
    guesses = {adjusted.kind: adjusted.left_out[np.searchsorted(checked, rows)]}
    guesses |= {each.kind: each.good[np.searchsorted(each.rows, rows), :-1] for each in refits}
    return {kind: log_loss(guess[known], labels[known]) for kind, guess in guesses.items()}


def _adjusted_candidate(
    table: LearningTable,
    serving: ArtifactRouter,
    adjusted: FittedAdjustment,
    ladder: Ladder,
    described: Mapping[str, Any],
    seed: int,
) -> Candidate:
    kept = {name: value for name, value in serving.artifact.metadata.items() if name not in _REPLACED}
    metadata = {**kept, "base": serving.base_version, "parent": serving.version, "adjustment": described}
    if adjusted.adjustment.space.reads_tools:
        metadata[ADJUSTS_BY_TOOLS] = True
    plain = RouterArtifact.create({**base_arrays(serving.artifact), **adjusted.adjustment.arrays()}, metadata)
    right, good, _ = ArtifactRouter(plain).revise(table.views)
    good[np.flatnonzero(table.is_checked), :-1] = adjusted.left_out
    rows = thinned(table, seed)
    decision = _decision(table.take(rows), right[rows], good[rows], serving, ladder)
    return Candidate(plain.with_metadata(decision=decision), adjusted.kind)


def _refit_candidate(
    table: LearningTable,
    serving: ArtifactRouter,
    refit: Refit,
    ladder: Ladder,
    described: Mapping[str, Any],
    seed: int,
) -> Candidate:
    # From the oldest row that was fitted on: of a stretch of time, all checked rows count or none.
    rows = np.flatnonzero(table.has_text & (np.arange(len(table)) >= refit.rows[0]))
    rows = rows[thinned(table.take(rows), seed)]
    part, is_fitted = table.take(rows), table.is_checked[rows]
    right, good = (np.empty((len(rows), table.num_tiers)) for _ in range(2))
    fitted = np.searchsorted(refit.rows, rows[is_fitted])
    right[is_fitted], good[is_fitted] = refit.right[fitted], refit.good[fitted]
    others = np.flatnonzero(~is_fitted)
    said = predict(refit.artifact, part.take(others).prompts(), refit.embedder)
    right[others], good[others] = said.right, said.good
    decision = _decision(part, right, good, serving, ladder)
    artifact = refit.artifact.with_metadata(decision=decision, refit=dict(described))
    return Candidate(artifact, refit.kind, reads_text=True, embedder=refit.embedder)


def _decision(
    table: LearningTable, right: Floats, good: Floats, serving: ArtifactRouter, ladder: Ladder
) -> dict[str, Any]:
    """Derive the numbers that policies need, from graded traffic whose estimates had not seen its labels."""
    return derive(labelled_traffic(table, right, good, ladder), serving.decision)


# With the decision goes the caution it was made with, and the drift that was the reason for it.
_REPLACED = ("decision", "prices", "caution", "drift_at", "note", ADJUSTS_BY_TOOLS)


def base_arrays(artifact: RouterArtifact) -> dict[str, NDArray[Any]]:
    """Return a router's arrays without an adjustment."""
    return {name: array for name, array in artifact.arrays.items() if not name.startswith("adjust_")}


def _summary(table: LearningTable, adjusted: FittedAdjustment, seed: int, window: str) -> dict[str, Any]:
    rows = table.checked()
    return {
        "window": window,
        "seed": seed,
        "num_rows": len(rows),
        "num_labels": rows.num_labels,
        "num_requests": table.num_requests,
        "num_left_out": table.num_other,
        "num_unread": table.num_unread,
        "log_loss_left_out": {kind: round(loss, 5) for kind, loss in adjusted.losses.items()},
    }


def held_out_metrics(
    table: LearningTable, train: LearningTable, estimates: Mapping[str, Floats]
) -> list[dict[str, Any]]:
    """Measure how well routers tell good answers from bad on unseen rows, beside prompt length and the base rate.

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
