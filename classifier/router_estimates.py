"""Asks routers about graded rows they have not seen, exactly as they would be asked while serving.

Every estimate comes from a whole artifact: fitted by :func:`classifier.training.fit_router` with the options of
``suffice bootstrap``, frozen, and asked through :class:`classifier.router.ArtifactRouter`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from classifier.curves import pair_curve
from classifier.errors import TrainingError
from classifier.folds import fold_splits
from classifier.graded_table import GradedTable
from classifier.novelty import novelty_bound
from classifier.router import ArtifactRouter
from classifier.rows import Floats, Ints, Rows
from classifier.table import MIN_ROWS, TrainingTable
from classifier.training import fit_router
from classifier.types import RouterRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterEstimates(Rows):
    """Holds estimates of rows, each by a router that was fitted without the row's group.

    Attributes
    ----------
    p_right, p_as_good : float64 (n, num_tiers)
    is_foreign : bool (n,), novelty above the bound beyond which the router's policies send a prompt to the top
    familiar_share : float64 (n,), share of familiar prompts that the same bound takes for foreign
    router_ids : int64 (n,), which of several routers said it
    """

    p_right: Floats
    p_as_good: Floats
    is_foreign: NDArray[np.bool_]
    familiar_share: Floats
    router_ids: Ints

    def gains(self, tier: int) -> Floats:
        """Return the estimated gain of the top tier's answer over a tier's, comparable across routers, float64 (n,).

        Routers of different folds differ a little in scale; what is judged is the order that one router gives.
        """
        found = self.p_right[:, -1] - self.p_right[:, tier]
        for router in np.unique(self.router_ids):
            rows = self.router_ids == router
            spread = float(found[rows].std())
            # Of equal gains only rounding differs, and is no order.
            found[rows] = (found[rows] - found[rows].mean()) / (spread if spread > 1e-9 else 1.0)
        return found


def ask_router(router: ArtifactRouter, requests: Sequence[RouterRequest], *, router_id: int = 0) -> RouterEstimates:
    """Return what one router says of requests, under the novelty bound that its policies would get."""
    said = router.predict(requests)
    max_novelty = novelty_bound(router.artifact.metadata["training"]["num_rows"])
    return RouterEstimates(
        p_right=np.array([[tier.p_right for tier in each.tiers] for each in said]),
        p_as_good=np.array([[tier.p_as_good for tier in each.tiers] for each in said]),
        is_foreign=np.array([each.novelty > max_novelty for each in said], dtype=np.bool_),
        familiar_share=np.full(len(said), 1.0 - max_novelty),
        router_ids=np.full(len(said), router_id, dtype=np.int64),
    )


def estimate(train: GradedTable, test: GradedTable, *, seed: int) -> RouterEstimates:
    """Fit a router on one table and ask it about another; groups they share are left out of training.

    Raises
    ------
    TrainingError
        Too few rows are left.
    """
    apart = train.without_overlap(test)
    if len(apart) < MIN_ROWS:
        raise TrainingError(f"{len(apart)} training prompts share no group with the test set; {MIN_ROWS} are needed.")
    return ask_router(_fit(apart.training_table(), seed), test.requests)


def _fit(table: TrainingTable, seed: int) -> ArtifactRouter:
    return ArtifactRouter(fit_router(table, seed=seed).artifact)


def ask_across_folds(
    table: TrainingTable, folds: Ints, fit: Callable[[TrainingTable], ArtifactRouter]
) -> tuple[RouterEstimates, ArtifactRouter]:
    """Ask about every fold the router that ``fit`` makes of the others; also return the last of these routers."""
    parts, order = [], []
    for number, (inside, outside) in enumerate(fold_splits(folds, table.groups)):
        router = fit(table.take(inside))
        requests = [table.requests[row] for row in outside]
        parts.append(ask_router(router, requests, router_id=number))
        order.append(outside)
    # Back from the order of the folds to that of the table.
    return RouterEstimates.join(parts).take(np.argsort(np.concatenate(order))), router


def cross_estimate(table: GradedTable, *, seed: int, num_labels: int | None = None) -> RouterEstimates:
    """Estimate every row by a router fitted on the other folds of the data's own group-safe split.

    Parameters
    ----------
    num_labels : fit on so many rows of the other folds, drawn at random; None: on all

    Raises
    ------
    TrainingError
        The rows carry no folds.
    """
    if len(np.unique(table.folds)) < 2 or table.folds.min() < 0:
        raise TrainingError("The prompts carry no fold numbers; give different folders for --train and --test.")
    rng = np.random.default_rng(seed)

    def fit(part: TrainingTable) -> ArtifactRouter:
        some = part if num_labels is None else part.take(np.sort(rng.permutation(len(part))[:num_labels]))
        return _fit(some, seed)

    return ask_across_folds(table.training_table(), table.folds, fit)[0]


def learning_curve(table: GradedTable, sizes: Sequence[int], *, seed: int) -> list[dict[str, Any]]:
    """Return the APGR of routers fitted on so many labels of the other folds.

    A size counts prompts; each is one grade of the weak and one of the strong answer. With none there is nothing to
    route by, which is chance.
    """
    most = min(len(inside) for inside, _ in fold_splits(table.folds, table.groups))
    found: list[dict[str, Any]] = [{"num_labels": 0, "apgr": 0.5}]
    for size in sizes:
        gains = cross_estimate(table, seed=seed, num_labels=size).gains(0)
        apgr = pair_curve(gains, table.scores[:, 0], table.scores[:, -1]).apgr
        found.append({"num_labels": min(size, most), "apgr": apgr})
    return found
