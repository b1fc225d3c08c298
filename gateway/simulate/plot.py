"""Quality, cost and tier shares over the weeks, as one picture. Needs matplotlib (extra ``bench``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.simulate.simulation import SimulationInterval

# What an event says -> the colour of its mark.
_MARKS: Mapping[str, str] = {
    "alert drift": "black",
    "alert floor": "black",
    "retrain promoted": "orange",
    "rollout ": "blue",
    "serves": "green",
}


def plot(stretches: Sequence[SimulationInterval], found: Mapping[str, Any], path: Path, *, width: int) -> None:
    """Draw a run. ``width`` is how many stretches a point is the mean of.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    weeks = [each.week for each in stretches[width - 1 :]]
    windows = [stretches[end - width : end] for end in range(width, len(stretches) + 1)]
    figure, (above, middle, below) = plt.subplots(3, 1, figsize=(9, 8), sharex=True)
    above.plot(weeks, [_ratio(w, "num_right", "num_top_right") for w in windows], label="quality, of the top tier's")
    above.axhline(found["floor"], color="grey", linestyle="--", label="floor")
    middle.plot(weeks, [_ratio(w, "spent_usd", "top_usd") for w in windows], label="cost, of all on the top tier")
    middle.axhline(found["cost_chances_known"], color="grey", linestyle=":", label="cost, if every chance were known")
    middle.plot(weeks, [_ratio(w, "checks_usd", "spent_usd") for w in windows], label="checks, of serving cost")
    tiers = sorted({tier for each in stretches for tier in each.tiers})
    shares = [[sum(each.tiers[t] for each in w) / sum(each.num_requests for each in w) for w in windows] for t in tiers]
    below.stackplot(weeks, shares, labels=[f"tier {tier}" for tier in tiers])
    for axis in (above, middle, below):
        axis.axvline(found["changed_at_week"], color="red", linewidth=0.8)
        for each in stretches:
            for said, color in _MARKS.items():
                if any(said in event for event in each.events):
                    axis.axvline(each.week, color=color, linewidth=0.8, linestyle="--")
        axis.legend(loc="lower left", fontsize=8)
    above.set_title(
        f"{found['scenario']}: red, the change; black, alarm; orange, promoted; blue, rollout; green, serves"
    )
    below.set_xlabel("week")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _ratio(window: Sequence[SimulationInterval], part: str, whole: str) -> float:
    total = float(sum(getattr(each, whole) for each in window))
    return float(sum(getattr(each, part) for each in window)) / total if total else 0.0
