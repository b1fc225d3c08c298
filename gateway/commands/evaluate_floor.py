"""What a sample of graded pairs certifies, and how often the certificate was true."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.intervals import is_mean_shown_below

Floats = NDArray[np.float64]

NUM_STEPS = 40
MAX_SAMPLE = 2000


@dataclass(frozen=True, slots=True)
class Routed:
    """Quality at each strong share of a fixed grid, float64 (NUM_STEPS + 1, n); the first row is all strong."""

    quality: Floats
    strong: Floats

    @classmethod
    def of(cls, order: Floats, weak: Floats, strong: Floats) -> Routed:
        """Rows sent up by descending ``order``; the grid is made from the order alone, before grades are seen."""
        ranks = np.empty(len(order))
        ranks[np.argsort(-order, kind="stable")] = np.arange(len(order)) / len(order)
        shares = np.linspace(1.0, 0.0, NUM_STEPS + 1)
        return cls(np.where(ranks[None, :] < shares[:, None], strong, weak), strong)

    def certified_share(self, rows: NDArray[np.int64], floor: float, confidence: float) -> float | None:
        """Least strong share that a sample shows to hold ``floor`` of the strong model's quality; None: not even one.

        Fixed-sequence testing from the safest setting, each by a bound that needs no more than grades in 0..1.
        """
        found = None
        for step in range(NUM_STEPS + 1):
            loss = floor * self.strong[rows] - self.quality[step, rows]  # in -1 .. floor; held when the mean is <= 0
            values, counts = np.unique((loss + 1.0) / (1.0 + floor), return_counts=True)
            if not is_mean_shown_below(np.clip(values, 0.0, 1.0), counts, 1.0 / (1.0 + floor), confidence):
                break
            found = 1.0 - step / NUM_STEPS
        return found

    def holds(self, share: float, floor: float) -> bool:
        """Whether all rows together hold the floor at a share of the grid."""
        step = round((1.0 - share) * NUM_STEPS)
        return bool(self.quality[step].mean() >= floor * self.strong.mean() - 1e-12)


def floor_report(
    order: Floats, weak: Floats, strong: Floats, *, floor: float, confidence: float, seed: int, num_resamples: int
) -> dict[str, Any]:
    """The certificate on these rows, and its record over samples drawn from them, where the truth is known.

    Each sample stands for verified traffic: drawn with replacement from all rows, which are the population here.
    """
    routed = Routed.of(order, weak, strong)
    num_rows = len(weak)
    share = routed.certified_share(np.arange(num_rows), floor, confidence)
    rng = np.random.default_rng(seed)
    size = min(num_rows, MAX_SAMPLE)
    shares = [routed.certified_share(rng.integers(0, num_rows, size), floor, confidence) for _ in range(num_resamples)]
    honoured = [each is None or routed.holds(each, floor) for each in shares]
    return {
        "floor": floor,
        "confidence": confidence,
        "status": "insufficient" if share is None else "held",
        "strong_share": share,
        "resamples": {
            "count": num_resamples,
            "sample_size": size,
            "share_honoured": float(np.mean(honoured)) if honoured else None,
            "share_insufficient": float(np.mean([each is None for each in shares])) if shares else None,
            "median_strong_share": float(np.median([1.0 if each is None else each for each in shares]))
            if shares
            else None,
        },
    }
