"""The measures on a tree small enough to be counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.measures import House
from tests.house.review_table import naming_tests

FILES = {
    "gateway/__init__.py": '"""Docs."""\n',
    "gateway/edge.py": "from gateway.rows import table\n\n\nclass Row:\n    pass\n",
    "gateway/alone.py": "import gateway.edge\n",
    "gateway/rows/__init__.py": "",
    "gateway/rows/table.py": "def load():\n    from gateway.shapes.box import Box\n\n    return Box\n",
    "gateway/shapes/box.py": (
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from gateway.alone import x\n"
        "from gateway import edge\n\n\nclass Row:\n    pass\n"
    ),
    "backends/one.py": '"""Docs.\n\nMore."""\n\n# Why.\nx = 1  # noqa: A\n',
    "tests/backends/test_one.py": "y = 2\nz = 3\n",
    "README.md": "one two\n",
    "docs/deep/page.md": "three\n",
}


@pytest.fixture
def house(tmp_path: Path) -> House:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return House(tmp_path)


def test_a_deferred_import_closes_a_circle_and_one_for_types_does_not(house: House) -> None:
    assert house.circles() == [["edge", "rows", "shapes"]]
    assert house.circles(without=("rows",)) == []


def test_what_is_counted(house: House) -> None:
    assert house.lobby() == ["__init__", "alone", "edge"]
    assert house.shared_class_names() == {"Row": ["gateway/edge.py", "gateway/shapes/box.py"]}
    assert house.num_words() == 3
    assert house.tests_to_code("backends") == 2
    assert house.comments_per_100("backends") == 200


def test_every_finding_of_the_reviews_is_named_by_a_test() -> None:
    assert [name for name, tests in naming_tests().items() if not tests] == []
