"""A router fitted anew from checked answers and the texts of their prompts, where retention kept them.

It forgets the router that served: a refit knows nothing but the checks, so it needs many, and pays where traffic has
moved so far that an adjustment cannot follow. It is a new base: what the log keeps of earlier requests cannot be read
with it.

A check says how an answer compares with the top tier's; how often that one is right is what the serving router says. An
answer as good as the top tier's is taken to be right when that one is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from classifier.artifact import RouterArtifact
from classifier.embedding import Embedder
from classifier.errors import EmbeddingError, TrainingError
from classifier.metrics import log_loss
from classifier.router import ArtifactRouter
from classifier.table import TrainingTable
from classifier.training import fit_router
from classifier.types import RouterRequest
from gateway.learn.decision_replay import Estimates
from gateway.learn.feature_sources import FeatureSource, Progress, SourceFactory
from gateway.learn.learning_table import LearningTable

_log = logging.getLogger("suffice.learn")

Floats = NDArray[np.float64]
MIN_LABELS = 300
MIN_LABELS_A_TIER = 40
MAX_ROWS = 8_000
"""Checked requests beyond the newest so many teach little more, and fitting takes minutes."""

MIN_JUDGED_SHARE = 0.5
"""Of the checked rows to be judged on, the part whose text must be known."""

_INHERITED = ("confidence",)


@dataclass(frozen=True, slots=True)
class Refit:
    """A router of its own base.

    Attributes
    ----------
    artifact : fitted on all of ``rows``
    rows : int64 (n,), the newest checked rows with a text, back to a moment
    right, good : float64 (n, T), estimates by fits that had not seen the row
    kind : what it reads
    loss : log-loss of the checked answers left out
    embedder : its further source of features, None where it reads the text alone
    """

    artifact: RouterArtifact
    rows: NDArray[np.int64]
    right: Floats
    good: Floats
    kind: str
    loss: float
    embedder: Embedder | None


def can_refit(train: LearningTable, judge: LearningTable) -> bool:
    """Whether enough checked answers have their prompt: some of every tier to learn from, most of those to judge."""
    labels = train.take(fit_rows(train)).labels
    known = (~np.isnan(labels)).sum(axis=0)
    checked = judge.is_checked
    judged = int((checked & judge.has_text).sum())
    enough = int(known.sum()) >= MIN_LABELS and int(known.min()) >= MIN_LABELS_A_TIER
    return enough and judged > 0 and judged >= MIN_JUDGED_SHARE * int(checked.sum())


def fit_rows(table: LearningTable) -> NDArray[np.int64]:
    """Return the newest checked rows with a text."""
    return np.flatnonzero(table.is_checked & table.has_text)[-MAX_ROWS:]


def fit_refits(
    table: LearningTable,
    serving: ArtifactRouter,
    sources: Sequence[SourceFactory],
    *,
    seed: int,
    window: str,
    progress: Progress = lambda done: None,
) -> tuple[list[Refit], list[str]]:
    """One refit from the text alone and one with every source that can be had; and why others cannot.

    Raises
    ------
    TrainingError
        Too few rows.
    """
    found, refused = [fit_refit(table, serving, None, seed=seed, window=window)], []
    rows = table.take(fit_rows(table))
    for source in sources:
        try:
            found.append(fit_refit(table, serving, source(rows, seed, progress), seed=seed, window=window))
        except (EmbeddingError, TrainingError) as error:
            _log.warning("no refit with this source of features: %s", error)
            refused.append(str(error))
    return found, refused


def fit_refit(
    table: LearningTable, serving: ArtifactRouter, opened: FeatureSource | None, *, seed: int, window: str
) -> Refit:
    """Fit a router on the checked rows that have a text.

    Parameters
    ----------
    table : training rows
    serving : says how often the top tier is right, and what the tiers' own confidence is worth
    opened : a further source of features, and the rows it has seen, which are left out; None reads the text alone
    window : what the rows are, for the card

    Raises
    ------
    TrainingError
        Too few rows.
    EmbeddingError
        The source failed.
    """
    embedder, num_seen = (None, 0) if opened is None else (opened.embedder, opened.num_seen)
    rows = fit_rows(table)[num_seen:]
    part = table.take(rows)
    top_right = part.views.right[:, -1:]
    training = TrainingTable.build(
        part.prompts(),
        np.hstack([part.labels * top_right, top_right]),
        groups=part.groups,
        weights=_row_weights(part),
        label_source="checks",
        window=window,
        as_good=part.labels,
    )
    metadata = {**_described(serving), **({"tuning": opened.card} if opened is not None and opened.card else {})}
    fitted = fit_router(training, seed=seed, embedder=embedder, metadata=metadata)
    known = ~np.isnan(part.labels)
    loss = log_loss(fitted.p_as_good[:, :-1][known], part.labels[known])
    kind = "refit" if embedder is None else f"refit with {embedder.source}"
    return Refit(fitted.artifact, rows, fitted.p_right, fitted.p_as_good, kind, loss, embedder)


def predict(artifact: RouterArtifact, requests: Sequence[RouterRequest], embedder: Embedder | None) -> Estimates:
    """Return a router's estimates of prompts."""
    said = ArtifactRouter(artifact, embedder=embedder).predict(requests)
    tiers = [[(each.p_right, each.p_as_good) for each in one.tiers] for one in said]
    both = np.array(tiers, dtype=np.float64).reshape(len(said), artifact.num_tiers, 2)
    return Estimates(both[..., 0], both[..., 1], np.array([one.novelty for one in said]))


def _row_weights(table: LearningTable) -> Floats:
    """Return mean of the weights of a row's labels."""
    known = ~np.isnan(table.labels)
    total = np.where(known, table.checked().tempered_weights(), 0.0).sum(axis=1)
    found: Floats = total / known.sum(axis=1)
    return found


def _described(serving: ArtifactRouter) -> Mapping[str, Any]:
    inherited = {name: serving.artifact.metadata[name] for name in _INHERITED if name in serving.artifact.metadata}
    return {**inherited, "parent": serving.version}
