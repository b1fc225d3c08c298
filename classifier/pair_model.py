"""What a pair of models gains from the strong one, request by request: an ensemble fitted on graded pairs.

Each view of :class:`classifier.score_model.Voters` votes with the weight it earned on left-out groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from classifier.errors import TrainingError
from classifier.pair_rows import Floats, PairRows, PromptCounts
from classifier.score_model import FOREIGN_QUANTILE, ScoreRows, Voters, earned, held_out

MIN_ROWS = 30


class PairModel:
    """Estimates of the gain of the strong answer over the weak one.

    Parameters
    ----------
    rows : graded pairs
    counts : of these prompts, and of all that will be estimated
    seed : of the left-out part and the trees

    Attributes
    ----------
    weights : weight of each view's vote
    least_similarity : to the nearest training prompt; what is below it is foreign

    Raises
    ------
    TrainingError
        Fewer than ``MIN_ROWS`` rows or two groups.
    """

    def __init__(self, rows: PairRows, counts: PromptCounts, *, seed: int) -> None:
        if len(rows) < MIN_ROWS or len(np.unique(rows.groups)) < 2:
            raise TrainingError(f"{len(rows)} graded pairs cannot carry a fit; {MIN_ROWS} in two groups are needed.")
        graded = ScoreRows(rows.prompts, np.column_stack([rows.weak, rows.strong]), rows.groups, rows.domains)
        held = held_out(rows.groups, seed)
        first = Voters(graded.take(np.flatnonzero(~held)), counts, seed)
        found, similarity = first.votes(first.encode(graded.take(np.flatnonzero(held)).prompts))
        votes = {name: _gain(vote) for name, vote in found.items()}
        self.least_similarity = float(np.quantile(similarity, FOREIGN_QUANTILE))
        gains = (rows.strong - rows.weak)[held]
        self.weights = {name: earned(vote, gains) for name, vote in votes.items()}
        self._voters = Voters(graded, counts, seed)
        self._scales = {name: float(vote.std()) + 1e-9 for name, vote in votes.items()}

    def gains(self, prompts: Sequence[str]) -> tuple[Floats, Floats]:
        """Estimated gain, and similarity to the nearest training prompt (0..1); float64 (n,) each."""
        found, similarity = self._voters.votes(self._voters.encode(prompts))
        votes = {name: _gain(vote) for name, vote in found.items()}
        total = sum(
            (self.weights[name] * vote / self._scales[name] for name, vote in votes.items()), np.zeros(len(prompts))
        )
        return total, similarity


def _gain(vote: Floats) -> Floats:
    """Strong less weak."""
    gain: Floats = vote[:, 1] - vote[:, 0]
    return gain
