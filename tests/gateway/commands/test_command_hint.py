"""Hints work when they are pasted: the program's own path, its configuration, its port."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.commands.command_hint import hint, program
from gateway.config.settings import load_settings
from tests.gateway.harness import LADDER_TOML


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where somebody sits, with the program in an environment below that is not on the path."""
    made = tmp_path / "env" / "bin" / "suffice"
    made.parent.mkdir(parents=True)
    made.write_text("#!/bin/sh\n")
    made.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(made), "up"])
    monkeypatch.setenv("PATH", "/usr/bin")
    return tmp_path


def test_the_program_is_named_as_the_shell_finds_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert program() == ["env/bin/suffice"]
    monkeypatch.setenv("PATH", f"{folder}/env/bin")
    assert program() == ["suffice"]
    (folder / "other").mkdir()
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.chdir(folder / "other")
    assert program() == [str(folder / "env" / "bin" / "suffice")]
    monkeypatch.setattr(sys, "argv", [str(folder / "gateway" / "cli.py")])
    assert program()[1:] == ["-m", "gateway.cli"]
    assert os.access(program()[0], os.X_OK)


def test_the_server_is_reached_where_it_is(folder: Path) -> None:
    file = folder / "my ladder.toml"
    file.write_text(LADDER_TOML + "[server]\nport = 9000\n")
    environ = {"HOME": str(folder)}
    plain, address = load_settings(None, environ=environ), "http://127.0.0.1:8000"
    assert hint("chat", settings=plain, address=address) == "env/bin/suffice chat"
    told = load_settings(None, environ=environ, overrides={"server.port": 8123})
    assert hint("chat", settings=told, address="http://x:8123") == "env/bin/suffice chat --url http://x:8123"
    assert hint("keys", "create", settings=told) == "env/bin/suffice keys create"
    filed = load_settings(file, environ=environ)
    typed = hint("keys", "create", settings=filed)
    assert shlex.split(typed) == ["env/bin/suffice", "keys", "create", "--config", "my ladder.toml"]
    free = replace(plain, server=replace(plain.server, port=0))
    assert "--url http://x:4" in hint("chat", settings=free, address="http://x:4")
