"""The numbers that policies need with an adjusted router: thresholds and the price of quality, from the log's checks.

A floor that the log's own checks certify gets its own numbers. Where they are too few for that, the earlier router's
numbers stay as long as they still hold the floor by the best estimate; where they do not, the floor is left without
any, and a policy then asks each tier for the floor itself. Too little evidence costs money, not quality.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gateway.learn.learning_table import LearningTable
from policies.derived_numbers import derive_for_floors
from policies.labelled_traffic import LabelledTraffic, Performance, choose_by_thresholds, choose_by_value, performance
from policies.ladder import Ladder
from policies.pricing import price_usd

Floats = NDArray[np.float64]

MAX_ROWS = 6000


def tier_costs_usd(table: LearningTable, ladder: Ladder) -> Floats:
    """Return each turn's cost at every tier for the same tokens and steps, float64 (n, T)."""
    found = np.empty((len(table), len(ladder)))
    tokens = zip(table.prompt_tokens.tolist(), table.completion_tokens.tolist(), strict=True)
    for row, (num_in, num_out) in enumerate(tokens):
        found[row] = [float(price_usd(tier, num_in, num_out)) for tier in ladder]
    per_request_usd = np.array([float(tier.price_per_request_usd) for tier in ladder])
    found += (table.num_steps[:, None] - 1) * per_request_usd
    return found


def labelled_traffic(table: LearningTable, right: Floats, good: Floats, ladder: Ladder) -> LabelledTraffic:
    """Return a table's weighted rows as traffic graded at every tier, by unbiased stand-ins for what was not seen.

    Parameters
    ----------
    table : rows
    right, good : float64 (n, T), made without these rows' labels
    """
    rows = np.flatnonzero(table.sampling_weight > 0)
    part = table.take(rows)
    quality = part.shifted_outcomes(good[rows])
    return LabelledTraffic(right[rows], good[rows], quality, tier_costs_usd(part, ladder), part.sampling_weight)


def thinned(table: LearningTable, seed: int) -> NDArray[np.int64]:
    """Return at most ``MAX_ROWS`` rows that have a sampling weight, drawn evenly: searching thresholds takes time."""
    rows = np.flatnonzero(table.sampling_weight > 0)
    if len(rows) <= MAX_ROWS:
        return rows
    rng = np.random.default_rng(seed)
    return np.sort(rng.choice(rows, MAX_ROWS, replace=False))


def derive(traffic: LabelledTraffic, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers for every floor, in the form an artifact carries.

    Parameters
    ----------
    traffic : from :func:`labelled_traffic`
    earlier : what the earlier router carried
    """
    known = {round(float(entry["floor"]), 4): entry for entry in earlier.get("floors", ())}
    confidence = float(earlier.get("confidence", 0.95))
    share = float(earlier.get("exploration_share", 0.02))
    derived = derive_for_floors(
        traffic, confidence=confidence, exploration_share=share, max_novelty=earlier.get("max_novelty")
    )
    for entry in derived["floors"]:
        before = known.get(round(float(entry["floor"]), 4), {})
        _inherit(entry, before, traffic, confidence, share)
    return derived


def _inherit(
    entry: dict[str, Any], before: Mapping[str, Any], traffic: LabelledTraffic, confidence: float, share: float
) -> None:
    floor = float(entry["floor"])
    inherited = []
    if "thresholds" not in entry and before.get("thresholds"):
        thresholds = {int(tier): float(level) for tier, level in before["thresholds"].items()}
        if set(thresholds) == set(range(1, traffic.num_tiers)):
            found = performance(traffic, choose_by_thresholds(traffic, thresholds), floor, confidence, share)
            if _still_holds(found):
                entry["thresholds"] = before["thresholds"]
                inherited.append("thresholds")
    if "quality_value_usd" not in entry and before.get("quality_value_usd") is not None:
        chosen = choose_by_value(traffic, float(before["quality_value_usd"]))
        if _still_holds(performance(traffic, chosen, floor, confidence, share)):
            entry["quality_value_usd"] = before["quality_value_usd"]
            inherited.append("quality_value_usd")
    if inherited:
        entry["inherited"] = inherited


def _still_holds(found: Performance) -> bool:
    return found.margin >= 0.0
