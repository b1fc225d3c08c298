"""The cost-quality picture of a run. Needs matplotlib (the extra ``bench``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from classifier.curves import fixed_mix_curve, upper_hull
from gateway.bench.ladder_report import ACCURACY_GOAL, COST_GOAL, LadderRun, curves_of

_STYLE = {
    "router": ("router, all settings", "tab:blue", "-"),
    "length": ("prompt length alone", "tab:orange", "-"),
    "oracle": ("oracle", "tab:green", ":"),
}


def plot_run(run: LadderRun, path: Path) -> None:
    """Draw cost against accuracy, both as shares of the top tier's, into a PNG, SVG or PDF file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    top_cost, top_accuracy = float(run.priced[:, -1].mean()), float(run.right[:, -1].mean())
    figure, axes = pyplot.subplots(figsize=(7, 5), layout="constrained")
    for name, curve in curves_of(run).items():
        label, colour, line = _STYLE[name]
        cost, quality = upper_hull(curve.cost, curve.quality)
        axes.plot(cost / top_cost, quality / top_accuracy, line, color=colour, label=label)
    tiers = fixed_mix_curve(run.right, run.priced)
    cost, quality = upper_hull(tiers.cost, tiers.quality)
    axes.plot(cost / top_cost, quality / top_accuracy, "--", color="grey", label="best fixed mix")
    axes.plot(tiers.cost / top_cost, tiers.quality / top_accuracy, "ks", label="each tier alone")
    for i, name in enumerate(run.names):
        axes.annotate(
            name, (tiers.cost[i] / top_cost, tiers.quality[i] / top_accuracy), (6, -12), textcoords="offset points"
        )
    served = float(np.mean([reply.cost_usd for reply in run.routed])) / top_cost
    axes.plot(served, run.routed_right.mean() / top_accuracy, "r*", markersize=14, label="routed, as served")
    axes.axhline(ACCURACY_GOAL, color="red", linewidth=0.6)
    axes.axvline(COST_GOAL, color="red", linewidth=0.6)
    axes.set_xlabel("cost as a share of the top tier's")
    axes.set_ylabel("accuracy as a share of the top tier's")
    axes.set_title(f"{len(run.tasks)} fresh tasks of the natural mix")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
