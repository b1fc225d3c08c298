"""Of a history that grows nothing is computed twice, by a real server with its engine in process."""

from __future__ import annotations

import json

import pytest

from gateway.bench.agent_trace import main


@pytest.mark.slow
def test_an_agent_s_history_is_read_from_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--conversations", "2", "--steps", "5"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert found["possible"] > 1500
    assert found["share"] >= 0.99
