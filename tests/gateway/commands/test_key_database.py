"""``suffice keys`` writes to the running server's database or says that it does not; with real processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.gateway.harness import LADDER_TOML


def keys(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gateway.cli", "keys", *arguments, "--config", "suffice.toml"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=_environment(folder))


def _environment(folder: Path) -> dict[str, str]:
    return os.environ | {"HOME": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}


def _folder(path: Path, port: int) -> Path:
    path.mkdir()
    (path / "suffice.toml").write_text(f'data_dir = "{path / "state"}"\n{LADDER_TOML}\n[server]\nport = {port}\n')
    return path


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[tuple[Path, Path, str]]:
    """A folder whose server runs, another one with the same address in its configuration, and the address."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    here, there = _folder(tmp_path / "here", port), _folder(tmp_path / "there", port)
    command = [sys.executable, "-m", "gateway.cli", "serve", "--config", "suffice.toml"]
    server = subprocess.Popen(command, cwd=here, stderr=subprocess.PIPE, text=True, env=_environment(here))
    assert server.stderr is not None
    try:
        assert any("answering at" in line for line in server.stderr)
        yield here, there, f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()
        server.stderr.close()


@pytest.mark.slow
def test_a_key_is_of_the_running_servers_database_or_is_not_made(folders: tuple[Path, Path, str]) -> None:
    here, there, url = folders
    made = keys(here, "create")
    assert made.returncode == 0, made.stderr
    assert f"was made in sqlite:///{here / 'state' / 'suffice.db'}" in made.stderr
    secret = made.stdout.strip()
    assert httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {secret}"}).status_code == 200
    assert keys(here, "list").stdout.count("sk-suffice-") == 1, "nothing is left of the question"

    for command in (("create",), ("list",), ("revoke", secret), ("rotate", secret)):
        elsewhere = keys(there, *command)
        assert (elsewhere.returncode, elsewhere.stdout) == (1, "")
        assert f"no database of Suffice at sqlite:///{there / 'state' / 'suffice.db'}" in elsewhere.stderr
        assert not (there / "state").exists()
    another = keys(there, "create", "--create")
    assert (another.returncode, another.stdout) == (1, "")
    assert f"The server at {url} uses another database" in another.stderr
    assert "sk-suffice-" not in keys(there, "list").stdout
    offline = keys(there, "create", "--offline")
    assert offline.returncode == 0
    assert "sk-suffice-" in keys(there, "list").stdout

    rotated = keys(here, "rotate", secret)
    assert rotated.returncode == 0, rotated.stderr
    new = rotated.stdout.strip()
    assert httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {new}"}).status_code == 200
    assert keys(here, "revoke", new).returncode == 0
    refused = keys(here, "rotate", new)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "a revoked key stays so" in refused.stderr
