"""The overhead bench runs and reports what it says it reports; how fast is not a test's business."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from gateway.bench import overhead
from gateway.bench.cpu_meter import CpuMeter
from gateway.bench.request_load import post_bytes


@pytest.mark.slow
def test_the_bench_measures_every_server(capsys: pytest.CaptureFixture[str]) -> None:
    tree = str(Path(__file__).parents[3])
    options = ["--requests", "40", "--connections", "4", "--rounds", "1", "--no-router", "--beside", tree, "--json"]
    assert overhead.main(options) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["bench"] == "overhead"
    assert line["card"]["commit"]
    parts = line["figures"].pop("parts_us")
    assert set(line["figures"]) == {"starlette", "gateway", "gateway beside"}
    assert parts["estimate"] == 0, "there was no router"
    assert all(parts[name] > 0 for name in ("parse request", "auth", "decide", "generate", "log row", "commit"))
    for figures in line["figures"].values():
        assert all(value > 0 for name, value in figures.items() if name != "chunk_cpu_us")


async def test_a_meter_gives_each_part_its_own_time_and_changes_nothing() -> None:
    meter = CpuMeter()

    async def inner(text: str) -> str:
        await asyncio.sleep(0)
        _work()
        return text

    inner = meter.around("inner", inner)

    async def outer(text: str) -> str:
        return await inner(text) + await inner(text)

    outer = meter.around("outer", outer)
    assert await asyncio.gather(outer("a"), outer("b")) == ["aa", "bb"]
    own_ns = meter.own_ns
    assert own_ns["inner"] > 20 * own_ns["outer"] > 0
    with pytest.raises(ZeroDivisionError):
        meter.around("failing", lambda: 1 / 0)()
    meter.clear()
    assert not meter.own_ns


def _work() -> None:
    until_s = time.thread_time() + 0.02
    while time.thread_time() < until_s:
        pass


def test_a_request_says_how_long_it_is() -> None:
    request = post_bytes("/x", b"{}", {"authorization": "Bearer k"})
    head, _, body = request.partition(b"\r\n\r\n")
    assert body == b"{}"
    assert b"content-length: 2" in head
    assert b"authorization: Bearer k" in head
