"""Things to break: a PostgreSQL cluster of a test's own, and a disk of a few megabytes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest


class PrivatePostgres:
    """A cluster of this test's own, which may be stopped, frozen and filled."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"postgresql://postgres:hunter2@127.0.0.1:{port}/postgres"
        self._binaries = _binaries()
        # PostgreSQL refuses to run as root.
        self._prefix = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
        # Not under pytest's own folder: the cluster's user must be able to reach it.
        self._folder = Path(tempfile.mkdtemp(prefix="suffice-test-postgres-"))
        self._data = self._folder / "data"
        if self._prefix:
            self._folder.chmod(0o755)
            shutil.chown(self._folder, "postgres")
        self._run("initdb", "--auth=trust", "--username=postgres", "--no-sync", "-D", str(self._data))

    def _run(self, program: str, *arguments: str) -> None:
        command = [*self._prefix, str(self._binaries / program), *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", timeout=60)

    def start(self) -> None:
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c shared_buffers=16MB"
        self._run("pg_ctl", "-D", str(self._data), "-w", "-o", options, "-l", str(self._data / "log"), "start")

    def stop(self, mode: str = "immediate") -> None:
        self._run("pg_ctl", "-D", str(self._data), "-w", "-m", mode, "stop")

    def freeze(self) -> list[int]:
        """Stop every process of the cluster without ending it; returns them for ``thaw``."""
        postmaster = int((self._data / "postmaster.pid").read_text().splitlines()[0])
        children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
        pids = [postmaster, *map(int, children)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        return pids

    def thaw(self, pids: list[int]) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    def remove(self) -> None:
        if (self._data / "postmaster.pid").exists():
            self.stop()
        shutil.rmtree(self._folder)


def _binaries() -> Path:
    """Where ``initdb`` is: Debian keeps it off the path. Raises FileNotFoundError where it is not installed."""
    found = shutil.which("initdb")
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not found and not places:
        raise FileNotFoundError("initdb is not installed")
    return Path(found).parent if found else places[-1]


class TinyDisk:
    """A file system of a few megabytes, as a folder. Needs root."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="suffice-test-disk-"))

    def resize(self, megabytes: int) -> Path:
        """Mount it, or give it another size with what is in it."""
        remount = "remount," if self.path.is_mount() else ""
        options = f"{remount}size={megabytes}m,mode=755"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"cannot mount a small disk: {done.stderr.strip()}")
        return self.path

    def remove(self) -> None:
        if self.path.is_mount():
            subprocess.run(["umount", "--lazy", str(self.path)], check=True)
        self.path.rmdir()
