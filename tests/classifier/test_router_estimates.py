"""Rows are judged by routers that never saw their group, in the order of the table, on a scale that folds share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from classifier.errors import TrainingError
from classifier.graded_table import GradedTable, read_graded
from classifier.novelty import novelty_bound
from classifier.router import ArtifactRouter
from classifier.router_estimates import RouterEstimates, ask_across_folds, ask_router, cross_estimate, estimate
from classifier.table import TrainingTable
from tests.classifier.graded_folder import folder_of
from tests.classifier.simulated_ladder import draw, request_of

MODELS = ("weak", "strong")


def estimates(p_right: np.ndarray, router_ids: np.ndarray) -> RouterEstimates:
    count = len(p_right)
    return RouterEstimates(
        p_right=p_right,
        p_as_good=np.ones(p_right.shape),
        is_foreign=np.zeros(count, dtype=np.bool_),
        familiar_share=np.full(count, 0.005),
        router_ids=router_ids,
    )


@pytest.fixture
def graded(tmp_path: Path) -> GradedTable:
    return read_graded(folder_of(tmp_path / "made", 3, num_prompts=60), MODELS)


@pytest.mark.slow
def test_every_fold_is_asked_of_a_router_without_its_groups(router: ArtifactRouter, graded: GradedTable) -> None:
    """Also where the folds split a group: its rows in other folds are then not fitted on."""
    groups = np.arange(60) // 2
    table, folds = replace(graded.training_table(), groups=groups), np.arange(60) % 3
    fitted_on: list[TrainingTable] = []

    def fit(part: TrainingTable) -> ArtifactRouter:
        fitted_on.append(part)
        return router

    # Too small to fit on would be refused by the table itself.
    table = TrainingTable.join([table, replace(table, groups=groups + 30)])
    folds = np.concatenate([folds, folds])
    found, last = ask_across_folds(table, folds, fit)
    assert last is router
    assert found.router_ids.tolist() == folds.tolist()
    for number, part in enumerate(fitted_on):
        assert not set(part.groups.tolist()) & set(table.groups[folds == number].tolist())
    alone = ask_router(router, table.requests)
    assert found.p_right == pytest.approx(alone.p_right)  # in the table's order, whatever the order of the folds


def test_the_bound_is_that_of_the_routers_own_window(router: ArtifactRouter) -> None:
    requests = [request_of(task.prompt) for task in draw(20, seed=3)[0]]
    requests.append(request_of("Quelle heure est-il à Ouagadougou, s'il vous plaît ?"))
    found = ask_router(router, requests)
    bound = novelty_bound(router.artifact.metadata["training"]["num_rows"])
    assert found.is_foreign.tolist() == [said.novelty > bound for said in router.predict(requests)]
    assert found.is_foreign[-1]
    assert found.familiar_share == pytest.approx(1 - bound)


@given(
    hnp.arrays(np.float64, st.tuples(st.integers(2, 20), st.just(3)), elements=st.floats(0, 1, width=16)),
    st.floats(0.1, 0.9),
    st.floats(-0.2, 0.2),
)
@settings(max_examples=50)
def test_a_router_of_another_scale_gives_the_same_gains(p_right: np.ndarray, slope: float, shift: float) -> None:
    count = len(p_right)
    both = estimates(np.concatenate([p_right, slope * p_right]), np.repeat([0, 1], count))
    both.p_right[count:, -1] += shift
    gains = both.gains(1)
    assert gains[:count] == pytest.approx(gains[count:], abs=1e-6)
    # Within a router the order is that of its own estimates, as far as they differ at all.
    own = p_right[:, -1] - p_right[:, 1]
    assert (np.diff(gains[:count][np.argsort(own, kind="stable")]) >= -1e-9).all()


def test_a_router_that_tells_nothing_apart_gives_no_order() -> None:
    assert estimates(np.full((4, 2), 0.7), np.array([0, 0, 1, 1])).gains(0).tolist() == [0.0] * 4


def test_without_folds_the_same_folder_cannot_be_judged(graded: GradedTable) -> None:
    for folds in (np.full(60, -1), np.zeros(60, dtype=np.int64)):
        with pytest.raises(TrainingError, match="fold numbers"):
            cross_estimate(replace(graded, folds=folds), seed=0)


def test_too_few_rows_apart_from_the_test_set_are_refused(graded: GradedTable) -> None:
    with pytest.raises(TrainingError, match="10 training prompts share no group"):
        estimate(graded, graded.take(np.arange(50)), seed=0)
