"""Runs tests on a private copy of the tree into which one fault after another is put.

Every run is a fork of this process, which has loaded the libraries (and none of our modules for a run): that is most of
what a short run costs.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mutants.mutations import Mutation

LIBRARIES = (
    "alembic",
    "asyncpg",
    "httpx",
    "hypothesis",
    "msgspec",
    "numpy",
    "orjson",
    "redis.asyncio",
    "sqlalchemy.ext.asyncio",
)
_OURS = ("gateway", "classifier", "backends", "engine", "policies", "migrations", "tests")
_MARKS = "not slow and not gpu and not clients"
_LEAST_LIMIT_S = 120.0  # a short set of tests on a busy machine
_NO_TESTS = 5  # pytest's status when all are deselected


class BaselineFailed(Exception):
    """The tests fail on the tree as it is, twice: they can tell nothing about its mutants."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """``killed_by`` is the test that failed, or ``timeout``; empty if the mutant survived every set."""

    mutation: Mutation
    killed_by: str
    seconds: float


@contextmanager
def copied_tree(root: Path) -> Iterator[Path]:
    """Yield a copy of what git knows or would add; installed packages are not copied."""
    list_files = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(list_files, cwd=root, check=True, capture_output=True).stdout.decode()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder)
        for name in filter(None, listed.split("\0")):
            if (root / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, copy / name)
        yield copy


class Trials:
    """Judges mutants of one copied tree, one at a time."""

    def __init__(self, copy: Path, *, libraries: Sequence[str] = LIBRARIES) -> None:
        self._copy = copy
        self._limits_s: dict[tuple[str, ...], float] = {}
        for library in libraries:
            importlib.import_module(library)

    def judge(self, mutation: Mutation, test_sets: Sequence[tuple[str, ...]]) -> Verdict:
        """Ask the sets in turn until one kills it.

        Raises
        ------
        BaselineFailed
            A set fails twice without the mutant.
        """
        file = self._copy / mutation.path
        source = file.read_text()
        began_s = time.monotonic()
        killed_by = ""
        for tests in test_sets:
            limit_s = self._limit_s(tests)
            try:
                _write(file, mutation.apply(source))
                killed_by = self._failure(tests, limit_s)
            finally:
                _write(file, source)
            if killed_by:
                break
        return Verdict(mutation, killed_by, time.monotonic() - began_s)

    def _limit_s(self, tests: tuple[str, ...]) -> float:
        """Run a set on the tree as it is, twice where it fails at first; a mutant gets five times as long."""
        if tests not in self._limits_s:
            began_s = time.monotonic()
            failure = self._failure(tests, limit_s=3600.0) and self._failure(tests, limit_s=3600.0)
            if failure:
                raise BaselineFailed(f"{failure} fails twice without a mutant.")
            self._limits_s[tests] = max(_LEAST_LIMIT_S, 5 * (time.monotonic() - began_s))
        return self._limits_s[tests]

    def _failure(self, tests: tuple[str, ...], limit_s: float) -> str:
        """Return the test that failed first, ``timeout``, or nothing."""
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            process = os.fork()
            if process == 0:
                _run_tests(self._copy, tests, output.fileno())
            status = _status_within(process, limit_s)
            if status is None:
                return "timeout"
            if status in (0, _NO_TESTS):
                return ""
            output.seek(0)
            lines = output.read().splitlines()
        summary = next((at for at, line in enumerate(lines) if "short test summary" in line), len(lines))
        failed = [line for line in lines[summary:] if line.startswith(("FAILED ", "ERROR "))]
        return failed[0].split()[1] if failed else f"pytest ended with status {status}: {' | '.join(lines[-3:])}"


def _run_tests(copy: Path, tests: Sequence[str], output: int) -> None:
    """Become a run of pytest in the copy; does not return."""
    status = 70
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background would inherit its deafness
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = (
            os.fdopen(1, "w"),
            os.fdopen(2, "w"),
        )  # not what a surrounding pytest put in their place
        os.chdir(copy)
        for name in [name for name in sys.modules if name.split(".")[0] in _OURS]:
            del sys.modules[name]
        root = Path(__file__).resolve().parents[2]
        sys.path[:] = [str(copy), *(path for path in sys.path if path and Path(path).resolve() != root)]
        os.environ["PYTHONPATH"] = str(copy)
        options = ["-q", "-x", "-rfE", "--hypothesis-profile=mutants", "-p", "no:cacheprovider", "-m", _MARKS]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # libraries loaded before pytest could see them
        status = int(pytest.main([*options, *tests]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _status_within(process: int, limit_s: float) -> int | None:
    """Wait for a run; past the limit let pytest clear up (databases, servers), then end what is left of it."""
    for signal_number, wait_s in ((None, limit_s), (signal.SIGINT, 20.0), (signal.SIGKILL, 20.0)):
        if signal_number is not None:
            with suppress(ProcessLookupError):
                os.killpg(process, signal_number)
        until_s = time.monotonic() + wait_s
        while time.monotonic() < until_s:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status) if signal_number is None else None
            time.sleep(0.02)
    return None


def _write(file: Path, text: str) -> None:
    """Write a source file without its bytecode, which Python tells old only by the second and the length."""
    file.write_text(text)
    for old in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        old.unlink()
