"""Runs a tree's own server as its command line runs it, in a process and a folder of its own.

The command is looked up in the tree's ``pyproject.toml``, so that modules may move as they like.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

START_TIMEOUT_S = 120.0


def command_of(tree: Path) -> list[str]:
    """Return the command line of ``suffice`` as installed from ``tree``."""
    scripts = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["suffice"].partition(":")
    return [sys.executable, "-c", f"import sys; from {module} import {name}; sys.exit({name}())"]


class ServerProcess:
    """A server of ``tree`` with a configuration. Stop it with :meth:`close`."""

    def __init__(self, tree: Path, folder: Path, config: str) -> None:
        folder.mkdir()
        self.port = _free_port()
        self._config = folder / "suffice.toml"
        self._config.write_text(config.replace("PORT", str(self.port)).replace("FOLDER", str(folder)))
        self.tree = tree
        self._environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "PYTHONPATH": str(tree),
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
        }
        self._log = (folder / "log").open("wb")
        self._log_path = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, *arguments: str) -> str:
        """Run another command on the same configuration; return what it prints."""
        command = [*command_of(self.tree), *arguments, "--config", str(self._config)]
        return subprocess.run(
            command, cwd=self.tree, env=self._environ, stdout=subprocess.PIPE, check=True, text=True
        ).stdout

    def start(self) -> None:
        """Start it; it answers later."""
        command = [*command_of(self.tree), "serve", "--config", str(self._config)]
        self._process = subprocess.Popen(
            command, cwd=self.tree, env=self._environ, stdout=self._log, stderr=subprocess.STDOUT
        )

    def wait(self) -> None:
        """Wait until it answers.

        Raises
        ------
        RuntimeError : it ended, or takes longer than any start should
        """
        assert self._process is not None, "started before"
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server does not answer:\n{self._log_path.read_text()}")
            time.sleep(0.05)

    def close(self) -> None:
        """End it as a supervisor does, and wait."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
