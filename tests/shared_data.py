"""Where recorded data lies that tests read and the repository does not hold."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_VARIABLE = "SUFFICE_TEST_DATA"
_BESIDE = Path(__file__).resolve().parents[2] / "shared" / "data"


def shared_data(name: str) -> Path:
    """Return a folder of the data; without it the test is skipped."""
    folder = Path(os.environ.get(_VARIABLE, _BESIDE)) / name
    if not folder.exists():
        pytest.skip(f"no {folder}; {_VARIABLE} names where the data lies")
    return folder
