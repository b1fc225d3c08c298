"""A server killed under load has a job for every answer that a client saw finished, and none twice."""

from __future__ import annotations

import sys

import pytest
from sqlalchemy import func, select

from gateway.bench import durability
from gateway.config.store_section import StoreConfig
from gateway.store.store import Store
from gateway.store.tables import requests, verification_texts, verifications

# Everything is drawn, and nothing is checked meanwhile.
SERVER = [sys.executable, "-m", "tests.gateway.verify.drawing_server", "--token-delay-s", "0.002"]


@pytest.mark.slow
async def test_every_finished_answer_has_its_job_after_sigkill(database_url: str) -> None:
    tally = await durability.measure(SERVER, database_url, kills=2, streams=16, seed=11)
    assert len(tally.finished) > 16
    assert tally.num_cut >= 16
    assert tally.lost == tally.wrong == []
    async with Store(StoreConfig(url=database_url)) as store, store.transaction() as connection:
        drawn = select(requests.c.request_id).where(requests.c.verify_probability == 1.0, requests.c.status_code == 200)
        answered = set((await connection.execute(drawn)).scalars())
        jobs = list((await connection.execute(select(verifications.c.request_id))).scalars())
        num_texts = (await connection.execute(select(func.count()).select_from(verification_texts))).scalar()
    assert {answer.request_id for answer in tally.finished} <= answered
    assert sorted(jobs) == sorted(answered)
    assert num_texts == len(jobs)
