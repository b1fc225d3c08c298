"""Holds checked answers as a router's adjustment is fitted on them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from classifier.errors import TrainingError
from classifier.log_view import LogViews
from classifier.rows import Floats, Ints, Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRows(Rows):
    """Holds requests of which at least one answer below the top tier was checked, oldest first.

    Attributes
    ----------
    views : the base router's predictions
    labels : float64 (n, num_tiers - 1), P(the tier's answer is as good as the top tier's) as the graders saw it, a
        soft label from 0 to 1; NaN where not checked
    weights : float64 (n, num_tiers - 1), inverse of the chance of the check, above 0 where there is a label
    groups : int64 (n,), rows of one group are near-duplicates, never on both sides of a split

    Raises
    ------
    TrainingError
        Shapes disagree, or a label or weight is out of range.
    """

    views: LogViews
    labels: Floats
    weights: Floats
    groups: Ints

    def __post_init__(self) -> None:
        n = len(self.views)
        shape = (n, self.views.good.shape[1] - 1)
        if self.labels.shape != shape or self.weights.shape != shape or self.groups.shape != (n,):
            raise TrainingError(
                f"labels has shape {self.labels.shape}, weights {self.weights.shape}; expected {shape}."
            )
        known = ~np.isnan(self.labels)
        if known.any() and not (self.labels[known].min() >= 0 and self.labels[known].max() <= 1):
            raise TrainingError("labels must lie between 0 and 1.")
        if not (np.isfinite(self.weights[known]).all() and (self.weights[known] > 0).all()):
            raise TrainingError("weights must be finite numbers above 0 where there is a label.")

    @property
    def num_labels(self) -> int:
        """Count checked answers, several of one request counted each."""
        return int((~np.isnan(self.labels)).sum())

    def tempered_weights(self, largest: float = 10.0) -> Floats:
        """Return weights of mean 1 per tier, none above ``largest``: in a fit one rare check must not be all."""
        known = ~np.isnan(self.labels)
        found = np.where(known, self.weights, 0.0)
        for tier in range(found.shape[1]):
            column, mask = found[:, tier], known[:, tier]
            if mask.any():
                column[mask] = np.minimum(column[mask] / np.median(column[mask]), largest)
                column[mask] /= column[mask].mean()
        return found
