"""What a failed command prints, and the status it exits with."""

from __future__ import annotations

import pytest

from gateway.config.errors import SettingsError, SettingsProblem
from gateway.failure_report import CommandError, exit_status_of
from gateway.store.errors import StoreError
from policies.errors import PolicyError


@pytest.mark.parametrize(
    ("error", "status", "printed"),
    [
        (CommandError("no such key"), 1, "suffice: no such key\n"),
        (CommandError("--scope is 'x'", status=2), 2, "suffice: --scope is 'x'\n"),
        (PolicyError("no tier is left"), 1, "suffice: no tier is left\n"),
        (StoreError("the disk is full"), 1, "suffice: the disk is full\n"),
        (
            SettingsError([SettingsProblem("server.port", "is 'x'", "a.toml"), SettingsProblem("", "no file", "b")]),
            2,
            "suffice: the configuration cannot be used:\n  server.port: is 'x' (a.toml)\n  no file (b)\n",
        ),
        (ValueError("a bug"), None, ""),
    ],
)
def test_our_errors_are_lines_and_others_are_left(
    error: Exception, status: int | None, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status_of(error) == status
    assert capsys.readouterr().err == printed
