"""A child process is told JSON, says how it ended, and never outlives whoever waits for it."""

from __future__ import annotations

import ast
import asyncio
import os
from pathlib import Path

import psutil
import pytest

from gateway.child_process import run_apart
from tests.gateway.raw import PATIENCE_S

LINGERS = """
import os, sys, time
open(sys.argv[0] + ".pid", "w").write(str(os.getpid()))
time.sleep(600)
"""
FAILS = """
import sys
print("x" * 5000 + "the reason", file=sys.stderr)
sys.exit(3)
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "lingers.py").write_text(LINGERS)
    (tmp_path / "fails.py").write_text(FAILS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


async def child_of(modules: Path) -> int:
    told = modules / "lingers.py.pid"
    for _ in range(int(PATIENCE_S / 0.02)):
        if told.exists() and (pid := told.read_text()):
            return int(pid)
        await asyncio.sleep(0.02)
    raise AssertionError("the child never began")


async def test_what_is_told_arrives_and_what_is_answered_comes_back() -> None:
    ended = await run_apart("json.tool", {"a": [1, "é"]}, timeout_s=30)
    assert ended.status == 0
    assert ended.output.split() == [b"{", b'"a":', b"[", b"1,", b'"\\u00e9"', b"]", b"}"]


async def test_a_failure_has_its_status_and_its_last_words() -> None:
    ended = await run_apart("fails", {}, timeout_s=30)
    assert ended.status == 3
    assert ended.said.endswith("xthe reason\n")
    assert len(ended.said) <= 500


async def test_out_of_time_it_is_gone() -> None:
    with pytest.raises(TimeoutError):
        await run_apart("lingers", {}, timeout_s=0.5)
    # Whether it had come to its first line or not: on a busy machine Python itself takes longer to start.
    assert [each for each in psutil.Process().children() if "lingers" in each.cmdline()] == []


async def test_cancelled_it_is_gone(modules: Path) -> None:
    waiting = asyncio.create_task(run_apart("lingers", {}, timeout_s=600))
    pid = await child_of(modules)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_child_imports_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever can write there could run code in the server's name (security review M14)."""
    folder = tmp_path / "anybodys"
    folder.mkdir()
    (folder / "json.py").write_text("raise SystemExit(77)")
    (folder / "planted.py").write_text("raise SystemExit(77)")
    monkeypatch.chdir(folder)
    assert (await run_apart("json.tool", {"a": 1}, timeout_s=30)).status == 0
    assert "No module named planted" in (await run_apart("planted", {}, timeout_s=30)).said


def test_every_python_that_is_started_is_told_so() -> None:
    root, found = Path(__file__).parents[2], []
    for package in ("backends", "classifier", "engine", "gateway", "policies"):
        for path in (root / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                parts = getattr(node, "elts", None) or getattr(node, "args", None)
                written = [ast.unparse(each) for each in parts] if isinstance(parts, list) else []
                # Alone it is no command: a path that is shown.
                if "sys.executable" in written[:-1]:
                    found.append(path.name)
                    after = written[written.index("sys.executable") + 1]
                    assert after == "'-P'", f"{path}: {written}"
    assert len(found) >= 8
