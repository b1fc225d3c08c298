"""Tables read into declared classes: every problem at once, each with its path and its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from decimal import Decimal
from typing import Any

import pytest

from backends.config import option
from backends.errors import InvalidConfig
from gateway.config.errors import SettingsError, SettingsProblem
from gateway.config.raw_config import Leaf, Table, merge, tree
from gateway.config.table_reader import ConfigReader


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    share: float = option(0.5, "A share.", at_least=0, at_most=1)
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if "bad" in self.names:
            raise InvalidConfig("names", self.names, "no bad one")


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    count: int = option(MISSING, "A count.", at_least=1)
    price: Decimal | None = None
    part: Part = Part()
    table: Mapping[str, Any] = field(default_factory=dict)


def table(written: Mapping[str, Any], source: str = "a.toml") -> Table:
    read = tree(written, source)
    assert isinstance(read, dict)
    return read


def problems(written: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    reader = ConfigReader()
    assert reader.read(Whole, table(written), "whole") is None
    with pytest.raises(SettingsError) as caught:
        reader.finish()
    assert caught.value.problems == tuple(reader.problems)
    return [(each.path, each.message, each.source) for each in reader.problems]


def test_values_and_sources_are_kept_by_path() -> None:
    reader = ConfigReader()
    above: Table = {"price": Leaf("0.10", "environment X", is_text=True), "part": {"share": Leaf(1, "command line")}}
    written = merge([table({"count": 2, "price": 1}), above])
    assert reader.read(Whole, written, "whole") == Whole(count=2, price=Decimal("0.10"), part=Part(share=1.0))
    reader.finish()
    assert reader.values == {
        "whole.count": 2,
        "whole.price": Decimal("0.10"),
        "whole.part.share": 1.0,
        "whole.part.names": (),
        "whole.table": {},
    }
    assert reader.sources == {
        "whole.count": "a.toml",
        "whole.price": "environment X",
        "whole.part.share": "command line",
        "whole.part.names": "default",
        "whole.table": "default",
    }


def test_a_base_stands_where_nothing_is_written() -> None:
    reader = ConfigReader()
    base = Whole(count=7, part=Part(share=0.25))
    read = reader.read(Whole, table({"price": 1}), "", base=base, base_source="as in [base]")
    assert read == Whole(count=7, price=Decimal(1), part=Part(share=0.25))
    assert (reader.sources["count"], reader.sources["price"]) == ("as in [base]", "a.toml")


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ({}, ("whole.count", "missing; expected a whole number", "no value given")),
        ({"count": "x"}, ("whole.count", "is 'x'; expected a whole number", "a.toml")),
        ({"count": Decimal("1.50")}, ("whole.count", "is 1.50; expected a whole number", "a.toml")),
        ({"count": 0}, ("whole.count", "is 0; expected at least 1", "a.toml")),
        ({"count": 1, "cuont": 1}, ("whole.cuont", "unknown key; did you mean whole.count?", "a.toml")),
        (
            {"count": 1, "zzz": {}},
            ("whole.zzz", "unknown key; known here: count, part, price, table", "an empty table"),
        ),
        ({"count": 1, "part": 3}, ("whole.part", "is 3; expected a table", "a.toml")),
        ({"count": 1, "part": {"share": 2}}, ("whole.part.share", "is 2; expected at least 0 and at most 1", "a.toml")),
        ({"count": 1, "part": {"names": ["bad"]}}, ("whole.part.names", "is ('bad',); expected no bad one", "a.toml")),
        ({"count": 1, "price": {"a": 1}}, ("whole.price", "is {'a': 1}; expected a finite amount", "a.toml")),
        ({"count": 1, "table": 1}, ("whole.table", "is 1; expected a table", "a.toml")),
    ],
)
def test_a_problem_names_path_value_and_source(written: Mapping[str, Any], problem: tuple[str, str, str]) -> None:
    assert problems(written) == [problem]


def test_all_problems_come_at_once_in_the_order_declared() -> None:
    found = problems({"price": "x", "nope": 1, "part": {"share": -1, "names": "bad"}})
    assert [path for path, _, _ in found] == [
        "whole.nope",
        "whole.count",
        "whole.price",
        "whole.part.share",
        "whole.part.names",
    ]


def test_named_tables_refuse_what_is_no_table() -> None:
    reader = ConfigReader()
    assert list(reader.named_tables(table({"a": {"x": 1}, "b": 2}), "models")) == [("a", {"x": Leaf(1, "a.toml")})]
    assert list(reader.named_tables(Leaf(3, "b.toml"), "models")) == []
    assert list(reader.named_tables(None, "models")) == []
    assert reader.problems == [
        SettingsProblem("models.b", "is 2; expected a table", "a.toml"),
        SettingsProblem("models", "is 3; expected a table", "b.toml"),
    ]
