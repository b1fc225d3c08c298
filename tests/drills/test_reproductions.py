"""The reproductions of the reviews still run: all are there, and some are performed on this checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drills.kit import ROOT
from tests.drills.reproductions.__main__ import order, reproduce, verdict
from tests.drills.reproductions.stage import REPRODUCTIONS, Cluster, Parts
from tests.house.review_table import FINDINGS


def test_every_finding_of_the_reviews_has_a_reproduction() -> None:
    # Prices of embeddings (M16) came as a setting of their own: its test is with the endpoints'.
    assert sorted(REPRODUCTIONS, key=order) == [name for name in FINDINGS if name != "M16"]


def test_one_open_part_leaves_a_finding_open() -> None:
    parts = Parts()
    parts.note(is_open=False, seen="one")
    assert not parts.found().is_open
    parts.note(is_open=True, seen="two")
    parts.note(is_open=False, seen="three")
    assert (parts.found().is_open, parts.found().seen) == (True, "one; two; three")


@pytest.mark.slow
@pytest.mark.parametrize("finding", ["H7", "M13", "S4"])
async def test_a_finding_is_closed(tmp_path: Path, finding: str) -> None:
    """A probe that does not come to its end is not closed."""
    found = await reproduce(REPRODUCTIONS[finding], ROOT, tmp_path, Cluster())
    assert verdict(found) == "closed", found
