"""Settings of the small world on either database."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.config.settings import Settings
from tests.gateway.harness import make_settings
from tests.gateway.learn.world import base_artifact


@pytest.fixture
def world_settings(tmp_path: Path, database_url: str) -> Callable[..., Settings]:
    """Settings with the world's router, on this test's database."""

    def make(**overrides: Any) -> Settings:
        artifact = base_artifact().save(tmp_path / "base.npz")
        given: dict[str, Any] = {
            "router__artifact": str(artifact),
            "database__url": database_url,
            "data_dir": str(tmp_path),
            "policy__quality_floor": 0.9,
            "policy__exploration_share": 0.1,
            "learning__min_effective_rows": 50,
            "learning__min_labels": 100,
        }
        return make_settings(tmp_path, **(given | overrides))

    return make
