"""Holds what a router is fitted on: requests, and what each tier's answer to them was worth."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from classifier.errors import TrainingError
from classifier.rows import WHOLE, Floats, Ints, Rows
from classifier.text import words
from classifier.types import RouterRequest

MIN_ROWS = 30
"""Below this no calibration means anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTable(Rows):
    """Holds requests and outcomes, one row each.

    Attributes
    ----------
    requests : the n requests, as they are seen at serving time
    scores : float64 (n, num_tiers), quality of each tier's answer from 0 (wrong) to 1 (right); NaN where not observed
    groups : int64 (n,), rows that share a group are near-duplicates and never split between fitting and judging
    weights : float64 (n,), importance of a row; inverse propensities make a log stand for all traffic
    label_source : where scores come from, such as ``reference`` or ``agreement``
    window : what the rows are and when they were seen, for the artifact's card
    typical : bool (n,), rows that novelty is measured against; None for all. Rows added to teach rare things are not
        typical: each is unlike all others, and would make everything foreign look usual
    as_good : float64 (n, num_tiers - 1), P(as good as the top tier) where answers were compared with each other, NaN
        where not; None where two scores decide

    Raises
    ------
    TrainingError
        Shapes disagree, a score is outside 0..1, a weight is not positive, or there are fewer than ``MIN_ROWS`` rows.
    """

    requests: tuple[RouterRequest, ...]
    scores: Floats
    groups: Ints
    weights: Floats
    label_source: str = field(default="reference", metadata=WHOLE)
    window: str = field(default="", metadata=WHOLE)
    typical: NDArray[np.bool_] | None = None
    as_good: Floats | None = None

    def __post_init__(self) -> None:
        n = len(self.requests)
        if n < MIN_ROWS:
            raise TrainingError(f"{n} rows are too few to fit and calibrate a router; give at least {MIN_ROWS}.")
        if self.scores.ndim != 2 or self.scores.shape[0] != n or self.scores.shape[1] < 2:
            raise TrainingError(f"scores has shape {self.scores.shape}; expected ({n}, num_tiers >= 2).")
        typical = np.ones(n, dtype=np.bool_) if self.typical is None else self.typical
        for name, array in (("groups", self.groups), ("weights", self.weights), ("typical", typical)):
            if array.shape != (n,):
                raise TrainingError(f"{name} has shape {array.shape}; expected ({n},).")
        _check_range("scores", self.scores)
        if self.as_good is not None:
            if self.as_good.shape != (n, self.num_tiers - 1):
                raise TrainingError(f"as_good has shape {self.as_good.shape}; expected ({n}, {self.num_tiers - 1}).")
            _check_range("as_good", self.as_good)
        if typical.sum() < MIN_ROWS:
            raise TrainingError(f"{typical.sum()} typical rows are too few to measure novelty against.")
        if not (np.isfinite(self.weights).all() and self.weights.min() > 0):
            raise TrainingError("every weight must be a finite number above 0; leave out rows that shall not count.")

    @property
    def num_tiers(self) -> int:
        """Return the width of ``scores``."""
        return int(self.scores.shape[1])

    @property
    def is_binary(self) -> bool:
        """Tell whether every known score is exactly 0 or 1, and nothing but scores says what is as good."""
        if self.as_good is not None:
            return False
        known = self.scores[~np.isnan(self.scores)]
        return bool(np.isin(known, (0.0, 1.0)).all())

    def targets(self) -> Floats:
        """Return what is estimated, float64 (n, 2 * num_tiers - 1).

        First P(right) of each tier, then P(as good as the top tier) of each tier below the top; NaN where a score that
        it needs is unknown.
        """
        if self.as_good is not None:
            return np.hstack([self.scores, self.as_good])
        top = self.scores[:, -1:]
        below = self.scores[:, :-1]
        as_good = np.where(np.isnan(below) | np.isnan(top), np.nan, (below >= top - 1e-9).astype(np.float64))
        return np.hstack([self.scores, as_good])

    @classmethod
    def build(
        cls,
        requests: Sequence[RouterRequest],
        scores: Floats,
        *,
        groups: Ints | None = None,
        weights: Floats | None = None,
        label_source: str = "reference",
        window: str = "",
        typical: NDArray[np.bool_] | None = None,
        as_good: Floats | None = None,
    ) -> TrainingTable:
        """Build a table with the usual groups (same wording) and equal weights where none are given."""
        return cls(
            requests=tuple(requests),
            scores=np.asarray(scores, dtype=np.float64),
            groups=group_by_wording(requests) if groups is None else np.asarray(groups, dtype=np.int64),
            weights=np.ones(len(requests)) if weights is None else np.asarray(weights, dtype=np.float64),
            label_source=label_source,
            window=window,
            typical=typical,
            as_good=as_good,
        )


def _check_range(name: str, values: Floats) -> None:
    known = values[~np.isnan(values)]
    if len(known) == 0 or known.min() < 0 or known.max() > 1:
        raise TrainingError(f"{name} must be known for some rows and lie between 0 and 1.")


def group_by_wording(requests: Sequence[RouterRequest]) -> Ints:
    """Group requests, int64 (n,): those of the same words in order, case and spacing folded, share a number."""
    keys = [" ".join(w.lower() for w in words(request.text)) for request in requests]
    return np.array([zlib.crc32(key.encode("utf-8", "surrogatepass")) for key in keys], dtype=np.int64)
