"""A killed server has every answer in its log that a client saw finished; ``gateway.bench.durability`` runs longer."""

from __future__ import annotations

import sys

import pytest

from gateway.bench import durability

ECHO_SERVER = [sys.executable, "-m", "gateway.bench.echo_server", "--token-delay-s", "0.002"]
LYING_SERVER = [sys.executable, "-m", "tests.gateway.lying_server"]


@pytest.mark.slow
async def test_finished_answers_survive_sigkill(database_url: str) -> None:
    tally = await durability.measure(ECHO_SERVER, database_url, kills=2, streams=32, seed=7)
    assert len(tally.finished) > 32
    # The kill came while clients were being served, or it proved nothing.
    assert tally.num_cut >= 32
    assert tally.num_refused == 0
    assert tally.lost == []
    assert tally.wrong == []
    assert durability.check_integrity(database_url) in {"ok", "not applicable"}


async def test_the_bench_notices_a_server_that_answers_before_it_records(sqlite_url: str) -> None:
    tally = await durability.measure(LYING_SERVER, sqlite_url, kills=1, streams=4, seed=7)
    assert len(tally.lost) > 0
    assert len(tally.lost) < len(tally.finished)
