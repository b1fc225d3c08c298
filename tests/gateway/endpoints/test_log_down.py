"""A log that cannot take the row: no answer is completed, nothing hangs, and service resumes with the log."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path

import asyncpg
import pytest

from tests.gateway.harness import assert_error, events, make_settings, running
from tests.gateway.raw import PATIENCE_S


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
async def test_a_locked_database_withholds_the_end_of_the_answer(tmp_path: Path, streamed: bool) -> None:
    path = tmp_path / "log.db"
    configured = make_settings(
        tmp_path, database__url=f"sqlite:///{path}", database__busy_timeout_s=0.2, database__write_timeout_s=5.0
    )
    async with running(configured) as gateway:
        assert (await gateway.chat("before")).status_code == 200
        other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        # In a thread: who holds the lock now may need this loop to give it back.
        await asyncio.to_thread(other.execute, "BEGIN EXCLUSIVE")
        response = await gateway.chat("during it", stream=streamed)
        if streamed:
            data = events(response.text)
            assert json.loads(data[-1])["error"]["code"] == "log_unavailable"
            assert '"finish_reason":"' not in response.text
            assert "[DONE]" not in response.text
        else:
            error = assert_error(response, 503, "log_unavailable")
            assert "during it" not in response.text
            assert str(path) not in error["message"]
        gateway.assert_idle()
        other.execute("ROLLBACK")
        other.close()
        assert (await gateway.chat("after")).status_code == 200
        assert len(await gateway.rows()) == 2


@pytest.mark.db
async def test_a_database_that_goes_away_and_comes_back(tmp_path: Path, postgres_url: str) -> None:
    name = postgres_url.rsplit("/", 1)[1]
    admin_url = f"{postgres_url.rsplit('/', 1)[0]}/postgres"
    configured = make_settings(tmp_path, database__url=postgres_url, database__write_timeout_s=5.0)
    async with running(configured) as gateway:
        assert (await gateway.chat("before")).status_code == 200
        admin = await asyncpg.connect(admin_url)
        try:
            await admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
            await admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1", name)
            assert_error(await gateway.chat("during"), 503, "log_unavailable")
            await admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
        finally:
            await admin.close()
        # What is known of a log that is down is a second old at most.
        async with asyncio.timeout(PATIENCE_S):
            while (await gateway.chat("after")).status_code == 503:  # noqa: ASYNC110 - the log tells nobody
                await asyncio.sleep(0.05)
        assert len(await gateway.rows()) == 2
        gateway.assert_idle()
