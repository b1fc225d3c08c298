"""The bench of structured output: counts by hand-made schemas, and steps of a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.bench import grammars


def test_it_counts_what_is_right_and_compares_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    monkeypatch.setattr(grammars, "_SOURCE_BYTES", 50_000)
    integer, text = {"type": "integer"}, {"type": "string"}
    rows: list[dict[str, Any]] = [
        {"id": "right", "schema": integer, "tests": [(5, True), ("x", False)]},
        {"id": "refused", "schema": {"not": {}}, "tests": []},
        {"id": "whole", "schema": {"properties": {"a": text}, "required": ["a"]}, "tests": [({"a": "b"}, True)]},
        # Valid by the flag, not by the schema.
        {"id": "wrong", "schema": text, "tests": [(7, True)]},
    ]
    for row in rows:
        row["tests"] = json.dumps([{"instance": each, "valid": valid} for each, valid in row["tests"]])
        row["schema"] = json.dumps(row["schema"])
    pq.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "schemas.parquet")
    out = tmp_path / "out.jsonl"
    grammars.main(
        [
            *("--device", "cpu", "--schemas", str(tmp_path / "schemas.parquet"), "--vocab-size", "512"),
            *("--shapes", "tiny-bf16", "--requests", "2", "--tokens", "6", "--repeats", "1", "--out", str(out)),
        ]
    )
    report = json.loads(out.read_text())
    found = report["schemas"]
    assert (found["compiled_share"], found["right_share"]) == (0.75, 0.5)
    assert (found["tests"], found["valid_refused"], found["invalid_accepted"]) == (4, 1, 0)
    assert found["refused"] == {"not": 1}
    assert report["steps"][0]["ratio_all"] > 0
