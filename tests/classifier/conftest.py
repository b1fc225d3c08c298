"""One router fitted on a simulated ladder, shared by the tests that only read it."""

from __future__ import annotations

import pytest

from classifier.options import FitOptions
from classifier.router import ArtifactRouter
from classifier.table import TrainingTable
from classifier.training import FittedRouter, fit_router
from tests.classifier.simulated_ladder import draw, table_of

SMALL = FitOptions(linear_c=(1.0,), num_trees=32, max_leaves=128)


@pytest.fixture(scope="session")
def table() -> TrainingTable:
    """1,200 train-split tasks answered by the simulated ladder."""
    return table_of(*draw(1200, seed=1))


@pytest.fixture(scope="session")
def fitted(table: TrainingTable) -> FittedRouter:
    return fit_router(table, seed=0, options=SMALL)


@pytest.fixture(scope="session")
def router(fitted: FittedRouter) -> ArtifactRouter:
    return ArtifactRouter(fitted.artifact)
