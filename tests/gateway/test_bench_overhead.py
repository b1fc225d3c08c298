"""The overhead bench runs and reports what it says it reports; how fast is not a test's business."""

from __future__ import annotations

import json

import pytest

from gateway.bench import overhead
from gateway.bench.load import post_bytes


@pytest.mark.slow
def test_the_bench_measures_every_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert overhead.main(["--requests", "40", "--connections", "4", "--rounds", "1", "--no-router", "--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["bench"] == "overhead"
    assert line["card"]["commit"]
    assert set(line["figures"]) == {"starlette", "gateway"}
    for figures in line["figures"].values():
        assert all(value > 0 for name, value in figures.items() if name != "chunk_cpu_us")


def test_a_request_says_how_long_it_is() -> None:
    request = post_bytes("/x", b"{}", {"authorization": "Bearer k"})
    head, _, body = request.partition(b"\r\n\r\n")
    assert body == b"{}"
    assert b"content-length: 2" in head
    assert b"authorization: Bearer k" in head
