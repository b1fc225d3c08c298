"""Says what a log row keeps of a prediction, and reads predictions back out of log rows.

A row holds no text unless retention says so, but it must be enough to learn from: the dense features by name, the
prompt's place in the training subspace (the *sketch*, the few numbers that the forest reads in place of the n-grams),
and the estimates before any adjustment. A sketch means something only together with the projection that made it, so
rows are read for one base router at a time.

It does not protect the wording completely: who holds the router can tell from a sketch what a prompt is about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from classifier.features import feature_names
from classifier.rows import Floats, Rows
from classifier.tool_features import TOOL_FEATURES

SKETCH_DECIMALS = 3
_SKETCH = "sketch_"
_BASE_RIGHT = "base_right_tier_"
_BASE_GOOD = "base_good_tier_"
_BASE_NOVELTY = "base_novelty"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogViews(Rows):
    """Holds predictions of one base router before adjustment, one row a request.

    Attributes
    ----------
    dense : float32 (n, num_features), as read off the text
    sketch : float32 (n, num_components)
    right, good : float64 (n, num_tiers), calibrated P(right) and P(as good as the top tier)
    novelty : float64 (n,)
    tools : float32 (n, num_tool_features), what requests say of tools, 0 for one without any; None where none has any
    """

    dense: NDArray[np.float32]
    sketch: NDArray[np.float32]
    right: Floats
    good: Floats
    novelty: Floats
    tools: NDArray[np.float32] | None = None

    @classmethod
    def empty(cls, num_tiers: int, num_components: int, *, reads_tools: bool = False) -> LogViews:
        """Make a table without rows, of the right widths."""
        return cls(
            dense=np.empty((0, len(feature_names(num_tiers, reads_tools=reads_tools))), dtype=np.float32),
            sketch=np.empty((0, num_components), dtype=np.float32),
            right=np.empty((0, num_tiers)),
            good=np.empty((0, num_tiers)),
            novelty=np.empty(0),
        )


def sketch_names(num_components: int) -> tuple[str, ...]:
    """Return names under which a sketch stands among a row's features."""
    return tuple(f"{_SKETCH}{component}" for component in range(num_components))


def tool_entries(values: Sequence[float]) -> dict[str, float]:
    """Return features that keep what a request says of tools: those that are not 0, for most requests none."""
    return {name: value for name, value in zip(TOOL_FEATURES, values, strict=True) if value}


def tool_values(features: Mapping[str, float]) -> tuple[float, ...]:
    """Return what :func:`tool_entries` kept, in the order of ``TOOL_FEATURES``; none for a request without tools."""
    found = tuple([float(features.get(name, 0.0)) for name in TOOL_FEATURES])
    return found if any(found) else ()


def tool_matrix(rows: Sequence[Sequence[float]]) -> NDArray[np.float32] | None:
    """Return tools' features of some requests, of which those without tools have none; None where none has any."""
    if not any(rows):
        return None
    none = (0.0,) * len(TOOL_FEATURES)
    return np.array([row or none for row in rows], dtype=np.float32)


def base_entries(right: Sequence[float], good: Sequence[float], novelty: float) -> dict[str, float]:
    """Return features that keep the estimates before an adjustment, for rows whose own estimates are adjusted ones."""
    found = {f"{_BASE_RIGHT}{tier}": p for tier, p in enumerate(right, start=1)}
    found |= {f"{_BASE_GOOD}{tier}": p for tier, p in enumerate(good, start=1)}
    found[_BASE_NOVELTY] = novelty
    return found


class ViewReader:
    """Reads rows of one base router.

    Parameters
    ----------
    num_tiers, num_components : widths
    reads_tools : the router reads tools' features, of which a row keeps those that are not 0
    """

    def __init__(self, num_tiers: int, num_components: int, *, reads_tools: bool = False) -> None:
        self._num_tiers = num_tiers
        self._reads_tools = reads_tools
        self._names = feature_names(num_tiers)
        self._sketch = sketch_names(num_components)
        self._right = tuple(f"{_BASE_RIGHT}{tier}" for tier in range(1, num_tiers + 1))
        self._good = tuple(f"{_BASE_GOOD}{tier}" for tier in range(1, num_tiers + 1))

    def read(
        self, features: Mapping[str, float], sufficiency: Sequence[Sequence[float]], novelty: float | None
    ) -> NDArray[np.float64] | None:
        """Read one row, float64 (num_features + num_components + 2 * num_tiers + 1,); None where it lacks something.

        Parameters
        ----------
        features : the row's own
        sufficiency : (tier, P(right), P(as good)) per tier, used where the features hold no estimates of the base
        novelty : likewise
        """
        try:
            values = [features[name] for name in self._names]
            if self._reads_tools:
                values += [features.get(name, 0.0) for name in TOOL_FEATURES]
            values += [features[name] for name in self._sketch]
            if _BASE_NOVELTY in features:
                values += [features[name] for name in (*self._right, *self._good)]
                values.append(features[_BASE_NOVELTY])
            else:
                by_tier = {int(tier): (right, good) for tier, right, good in sufficiency}
                tiers = range(1, self._num_tiers + 1)
                values += [by_tier[tier][0] for tier in tiers] + [by_tier[tier][1] for tier in tiers]
                values.append(0.0 if novelty is None else novelty)
        except (KeyError, TypeError, ValueError):
            return None
        row = np.array(values, dtype=np.float64)
        return row if np.isfinite(row).all() else None

    def stack(self, rows: Sequence[NDArray[np.float64]]) -> LogViews:
        """Stack rows that :meth:`read` made."""
        if not rows:
            return LogViews.empty(self._num_tiers, len(self._sketch), reads_tools=self._reads_tools)
        matrix = np.stack(rows)
        num_dense = len(self._names) + (len(TOOL_FEATURES) if self._reads_tools else 0)
        ends = np.cumsum([num_dense, len(self._sketch), self._num_tiers, self._num_tiers])
        dense, sketch, right, good, novelty = np.split(matrix, ends, axis=1)
        return LogViews(
            dense=dense.astype(np.float32),
            sketch=sketch.astype(np.float32),
            right=right,
            good=good,
            novelty=novelty[:, 0],
        )
