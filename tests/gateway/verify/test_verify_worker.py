"""``suffice verify-worker``: a process of its own that empties the servers' queue."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path

from gateway.store.store import Store
from gateway.store.tables import verifications
from tests.gateway.harness import LADDER_TOML
from tests.gateway.verify.jobs import draw_jobs
from tests.gateway.verify.test_worker import read, until_done

ROOT = Path(__file__).parents[3]


async def start(tmp_path: Path, url: str, *more: str, enabled: str = "true") -> asyncio.subprocess.Process:
    file = tmp_path / "suffice.toml"
    file.write_text(LADDER_TOML.replace("enabled = false", f"enabled = {enabled}\nallowance_usd = 100"))
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway.cli", "verify-worker", "--config", str(file), *more),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "SUFFICE_DATABASE__URL": url},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_once_empties_the_queue_and_says_how(tmp_path: Path, store: Store, database_url: str) -> None:
    await draw_jobs(store, 3, created_at=datetime.now(UTC))
    worker = await start(tmp_path, database_url, "--once")
    out, errors = await worker.communicate()
    assert worker.returncode == 0, errors
    assert json.loads(out) == {"done": 3}
    assert {row["status"] for row in await read(store, verifications)} == {"done"}


async def test_it_works_until_a_signal(tmp_path: Path, store: Store, database_url: str) -> None:
    worker = await start(tmp_path, database_url)
    await draw_jobs(store, 2, created_at=datetime.now(UTC))
    await until_done(store, 2, timeout_s=60)
    worker.send_signal(signal.SIGTERM)
    out, errors = await worker.communicate()
    assert worker.returncode == 0, errors
    assert json.loads(out) == {"done": 2}


async def test_nothing_to_do_is_said(tmp_path: Path, sqlite_url: str) -> None:
    worker = await start(tmp_path, sqlite_url, enabled="false")
    _, errors = await worker.communicate()
    assert worker.returncode != 0
    assert b"verification.enabled is false" in errors
