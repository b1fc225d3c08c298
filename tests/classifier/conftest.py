"""One router fitted on a simulated ladder, shared by the tests that only read it."""

from __future__ import annotations

import pytest

from classifier.options import FitOptions
from classifier.router import ArtifactRouter
from classifier.table import TrainingTable
from classifier.training import Fitted, fit_router
from tests.classifier.simulated import draw, table_of

SMALL = FitOptions(linear_c=(1.0,), num_trees=32, max_leaves=128)


@pytest.fixture(scope="session")
def table() -> TrainingTable:
    """1,200 train-split tasks answered by the simulated ladder."""
    return table_of(*draw(1200, seed=1))


@pytest.fixture(scope="session")
def fitted(table: TrainingTable) -> Fitted:
    return fit_router(table, seed=0, options=SMALL)


@pytest.fixture(scope="session")
def router(fitted: Fitted) -> ArtifactRouter:
    return ArtifactRouter(fitted.artifact)
