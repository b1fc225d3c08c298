"""Adjusts a router that is already serving by what checked answers teach: a shift of its log-odds.

The base router stays as it was fitted; an adjustment moves its P(as good as the top tier) by the sum of up to three
parts: a linear one (a recalibration, in its smallest form), boosted trees, and the answers checked among a prompt's
nearest neighbours, each shrunk towards "no change" where little was checked. So a few hundred checks heal what moved
and leave the rest alone. Serving needs numpy.

A prompt that lies among checked ones is not foreign any more, whatever its words: its novelty shrinks with the number
of checks around it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from classifier.encoder import MAX_STANDARD_SCORE
from classifier.heads import MAX_LOGIT, ForestHead, bounded_logit, sigmoid
from classifier.log_view import LogViews
from classifier.rows import Floats
from classifier.tool_features import TOOL_FEATURES

FAMILIAR_SUPPORT = 3.0
"""Checked neighbours (weighed by nearness) beyond which a prompt counts as less foreign than its words say."""

_PREFIX = "adjust_"
_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Space:
    """Places requests where an adjustment works: standardised features, sketch, tools, base log-odds, novelty.

    Attributes
    ----------
    mean, scale : float32 (num_features,), the base encoder's moments
    reads_tools : tools' features are coordinates too, as they are: the base reads none
    """

    mean: NDArray[np.float32]
    scale: NDArray[np.float32]
    reads_tools: bool = False

    @property
    def num_tool_features(self) -> int:
        return len(TOOL_FEATURES) if self.reads_tools else 0

    def place(self, views: LogViews) -> Floats:
        """Return the coordinates, float64 (n, num_features + num_components + num_tool_features + num_tiers)."""
        parts = [(views.dense - self.mean) * self.scale, views.sketch]
        if self.reads_tools:
            none = np.zeros((len(views), self.num_tool_features), dtype=np.float32)
            parts.append(none if views.tools is None else views.tools)
        near = np.clip(np.hstack(parts), -MAX_STANDARD_SCORE, MAX_STANDARD_SCORE)
        return np.hstack([near.astype(np.float64), bounded_logit(views.good[:, :-1]), views.novelty[:, None]])


@dataclass(frozen=True, slots=True)
class BoostedTrees:
    """Adds up regression trees, each of which moves one tier's log-odds.

    Attributes
    ----------
    trees : the walk; ``value`` float16 (num_nodes, num_tiers - 1)
    """

    trees: ForestHead

    def shift(self, x: Floats) -> Floats:
        """Return the sums of the trees, float64 (n, num_tiers - 1)."""
        return self.trees.sums(x.astype(np.float32))


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Holds checked prompts and how far off the estimate was at each.

    Attributes
    ----------
    points : float32 (m, d), places without base log-odds and novelty
    residual : float32 (m, num_tiers - 1), label less estimate; 0 where unknown
    weight : float32 (m, num_tiers - 1), how much of a check it is; 0 where unknown
    reach : squared distance from which on a check counts nothing
    prior : checks' worth of belief in the estimate itself; infinite where neighbours only tell the familiar
    """

    points: NDArray[np.float32]
    residual: NDArray[np.float32]
    weight: NDArray[np.float32]
    reach: float
    prior: float
    _square: NDArray[np.float32] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_square", np.einsum("ij,ij->i", self.points, self.points))

    def nearness(self, x: Floats) -> NDArray[np.float32]:
        """Return float32 (n, m): 1 at a point, falling with the squared distance to 0; what is far counts nothing."""
        places = x[:, : self.points.shape[1]].astype(np.float32)
        square = np.einsum("ij,ij->i", places, places)[:, None] + self._square - 2 * (places @ self.points.T)
        near: NDArray[np.float32] = np.clip(1 - square / np.float32(self.reach), 0, 1)
        return near

    def pull(self, near: NDArray[np.float32]) -> Floats:
        """Return how far the checks around move a probability, float64 (n, num_tiers - 1), within -1..1."""
        support = near @ self.weight
        moved = near @ (self.weight * self.residual)
        found: Floats = (moved / (self.prior + support)).astype(np.float64)
        return found

    def support(self, near: NDArray[np.float32]) -> Floats:
        """Return checked prompts around, each counted once and by its nearness, float64 (n,)."""
        found: Floats = (near @ (self.weight > 0).any(axis=1).astype(np.float32)).astype(np.float64)
        return found


@dataclass(frozen=True, slots=True)
class Adjustment:
    """Shifts a base router's estimates by all parts together.

    Attributes
    ----------
    space : the coordinates
    linear : float64 (d + 1, num_tiers - 1), the last row is the constant
    boosted, neighbours : further parts, None where there are none
    """

    space: Space
    linear: Floats
    boosted: BoostedTrees | None = None
    neighbours: Neighbours | None = None

    def __call__(self, views: LogViews) -> tuple[Floats, Floats, Floats]:
        """Return adjusted P(right), P(as good as the top tier), float64 (n, num_tiers) each, and novelty, float64 (n,).

        A tier's P(right) moves with its P(as good): what is known of the top tier is not learnt from comparisons with
        it. Both stay possible together: an answer is as good as the top tier's where it is right, and only otherwise
        where the top tier is wrong.
        """
        good, novelty = np.ones_like(views.good), views.novelty.copy()
        for start in range(0, len(views), _BLOCK):
            rows = np.arange(start, min(start + _BLOCK, len(views)))
            # A request that is served is a block by itself, and needs no copy.
            block = views if len(rows) == len(views) else views.take(rows)
            good[rows, :-1], novelty[rows] = self._block(block)
        moved = bounded_logit(good[:, :-1]) - bounded_logit(views.good[:, :-1])
        right = views.right.copy()
        shifted = sigmoid(bounded_logit(views.right[:, :-1]) + moved)
        top_wrong = 1.0 - views.right[:, -1:]
        right[:, :-1] = np.clip(shifted, np.maximum(good[:, :-1] - top_wrong, 0.0), good[:, :-1])
        return right, good, novelty

    def _block(self, views: LogViews) -> tuple[Floats, Floats]:
        x = self.space.place(views)
        logits = bounded_logit(views.good[:, :-1]) + x @ self.linear[:-1] + self.linear[-1]
        if self.boosted is not None:
            logits = logits + self.boosted.shift(x)
        good = sigmoid(np.clip(logits, -MAX_LOGIT, MAX_LOGIT))
        if self.neighbours is None:
            return good, views.novelty
        near = self.neighbours.nearness(x)
        pulled = np.clip(good + self.neighbours.pull(near), 0.0, 1.0)
        good = sigmoid(bounded_logit(pulled))
        support = np.maximum(self.neighbours.support(near), FAMILIAR_SUPPORT)
        return good, views.novelty * (FAMILIAR_SUPPORT / support)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return what an artifact keeps of it."""
        found: dict[str, NDArray[Any]] = {f"{_PREFIX}linear": self.linear}
        if self.boosted is not None:
            trees = self.boosted.trees
            found |= {
                f"{_PREFIX}tree_roots": trees.roots.astype(np.int32),
                f"{_PREFIX}tree_child": trees.child.astype(np.int32),
                f"{_PREFIX}tree_feature": trees.feature.astype(np.int32),
                f"{_PREFIX}tree_threshold": trees.threshold,
                f"{_PREFIX}tree_value": trees.value,
                f"{_PREFIX}tree_depth": np.array([trees.depth], dtype=np.int32),
            }
        if self.neighbours is not None:
            found |= {
                f"{_PREFIX}points": self.neighbours.points.astype(np.float16),
                f"{_PREFIX}residual": self.neighbours.residual.astype(np.float16),
                f"{_PREFIX}weight": self.neighbours.weight.astype(np.float16),
                f"{_PREFIX}kernel": np.array([self.neighbours.reach, self.neighbours.prior]),
            }
        return found

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, NDArray[Any]], space: Space, num_components: int, num_outputs: int
    ) -> Adjustment | None:
        """Read what :meth:`arrays` kept; None where an artifact has no adjustment.

        Raises
        ------
        KeyError, ValueError
            Arrays are missing or do not fit together.
        """
        linear = arrays.get(f"{_PREFIX}linear")
        if linear is None:
            return None
        width = linear.shape[0] - 1
        num_near = len(space.mean) + num_components + space.num_tool_features
        if linear.ndim != 2 or linear.shape[1] != num_outputs or width != num_near + num_outputs + 1:
            raise ValueError(f"{_PREFIX}linear has shape {linear.shape}")
        boosted = _boosted(arrays, width, num_outputs) if f"{_PREFIX}tree_roots" in arrays else None
        near_width = width - num_outputs - 1
        neighbours = _neighbours(arrays, near_width, num_outputs) if f"{_PREFIX}points" in arrays else None
        return cls(space, linear.astype(np.float64), boosted, neighbours)


def _boosted(arrays: Mapping[str, NDArray[Any]], width: int, num_outputs: int) -> BoostedTrees:
    a = {name: arrays[f"{_PREFIX}tree_{name}"] for name in ("roots", "child", "feature", "threshold", "value", "depth")}
    trees = ForestHead(
        a["roots"].astype(np.intp),
        a["child"].astype(np.intp),
        a["feature"].astype(np.intp),
        a["threshold"].astype(np.float32),
        a["value"],
        int(a["depth"][0]),
    )
    trees.check(width, num_outputs)
    return BoostedTrees(trees)


def _neighbours(arrays: Mapping[str, NDArray[Any]], width: int, num_outputs: int) -> Neighbours:
    points, residual, weight = (arrays[f"{_PREFIX}{name}"] for name in ("points", "residual", "weight"))
    reach, prior = arrays[f"{_PREFIX}kernel"].tolist()
    if points.shape[1] != width or residual.shape != (len(points), num_outputs) or weight.shape != residual.shape:
        raise ValueError("the adjustment's points do not fit together")
    if not reach > 0 or not prior > 0:
        raise ValueError("the adjustment's kernel is not positive")
    return Neighbours(points.astype(np.float32), residual.astype(np.float32), weight.astype(np.float32), reach, prior)
