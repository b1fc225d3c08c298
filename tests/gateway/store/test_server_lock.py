"""One server a SQLite file, whatever became of the one before (security review L12); other processes work beside it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.config.store_section import StoreConfig
from gateway.store.errors import DatabaseInUse
from gateway.store.store import Store
from tests.gateway.control.processes import ROOT, gateway_process
from tests.gateway.harness import LADDER_TOML


def written(tmp_path: Path) -> Path:
    config = tmp_path / "one.toml"
    ladder = LADDER_TOML.replace("enabled = false", "enabled = true")
    config.write_text(f'data_dir = "{tmp_path}"\n{ladder}\n[database]\nurl = "sqlite:///{tmp_path / "one.db"}"\n')
    return config


async def command(*words: str | Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("SUFFICE_")}
    line = [sys.executable, "-m", "gateway.cli", *map(str, words)]
    return await asyncio.to_thread(
        subprocess.run, line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow
async def test_a_second_server_is_refused_until_the_first_is_gone(tmp_path: Path, free_port: int) -> None:
    config = written(tmp_path)
    async with gateway_process(config, free_port, tmp_path / "a.log") as first:
        second = await command("serve", "--config", config, "--port", "0")
        assert second.returncode == 1
        assert f"one.db is served by another server (process {first.process.pid})" in second.stderr
        assert "Traceback" not in second.stderr
        assert (await first.chat()).status_code == 200

        # What is no server works beside it.
        for words in ("keys list", "db current", "db prune --texts-days 1", "verify-worker --once"):
            done = await command(*words.split(), "--config", config)
            assert done.returncode == 0, done.stderr

        # Killed, it leaves no lock behind.
        first.kill()
        await first.process.wait()
        async with gateway_process(config, free_port, tmp_path / "b.log") as next_one:
            assert (await next_one.chat()).status_code == 200


async def test_a_child_that_outlives_its_server_does_not_keep_the_lock(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'one.db'}"
    store = await Store(StoreConfig(url=url)).open(as_server=True)
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE, close_fds=False
    )
    try:
        await store.close()
        await (await Store(StoreConfig(url=url)).open(as_server=True)).close()
    finally:
        await child.communicate(b"\n")


async def test_a_link_to_the_file_is_the_same_database(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "one.db")
    store = await Store(StoreConfig(url=f"sqlite:///{tmp_path / 'one.db'}")).open(as_server=True)
    other = Store(StoreConfig(url=f"sqlite:///{tmp_path / 'link.db'}"))
    with pytest.raises(DatabaseInUse):
        await other.open(as_server=True)
    await other.close()
    await store.close()


@pytest.mark.db
async def test_several_servers_may_share_one_postgres(postgres_url: str) -> None:
    stores = [await Store(StoreConfig(url=postgres_url)).open(as_server=True) for _ in range(2)]
    for each in stores:
        await each.close()
