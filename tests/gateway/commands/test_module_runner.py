"""Programs of other rooms under a command's name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gateway.commands.module_runner import run_module
from gateway.failure_report import CommandError


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules can be run."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["suffice"])
    return tmp_path


@pytest.mark.parametrize(
    ("name", "source", "status"),
    [
        ("program_with_arguments", "def main(argv): return len(argv)", 2),
        ("program_that_reads_argv", "import sys\ndef main(): return int(sys.argv[1:] == ['-a', 'b']) + 3", 4),
        ("program_without_status", "def main(argv): pass", 0),
    ],
)
def test_a_program_gets_its_arguments_and_its_status_is_the_exit_status(
    programs: Path, name: str, source: str, status: int
) -> None:
    (programs / f"{name}.py").write_text(source)
    with pytest.raises(SystemExit) as ended:
        run_module(name, "suffice bench x", ["-a", "b"])
    assert ended.value.code == status
    assert sys.argv[0] == "suffice bench x"


def test_a_missing_package_is_named_with_what_installs_it(programs: Path) -> None:
    (programs / "program_that_needs.py").write_text("import no_such_package.inner")
    with pytest.raises(CommandError, match=r"needs the package no_such_package; pip install 'suffice\[bench\]'"):
        run_module("program_that_needs", "suffice bench x", [])


def test_a_missing_module_of_ours_is_a_bug_and_no_message() -> None:
    with pytest.raises(ModuleNotFoundError):
        run_module("gateway.no_such_module", "suffice bench x", [])
