"""``suffice admin`` against a running server: tables for people, JSON for programs, refusals in the server's words."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from gateway.cli import app
from gateway.failure_report import exit_status_of
from tests.gateway.admin.kit import add_key
from tests.gateway.admin.test_documented_errors import operations
from tests.gateway.harness import LADDER_TOML, make_settings, running


async def run(url: str, *arguments: str, key: str = "", sent: bytes = b"") -> tuple[int, str, str]:
    """One command line, read in this process; (status, output, complaint)."""
    environ = {"SUFFICE_ADMIN_KEY": key, "COLUMNS": "200"}
    command = ["admin", *arguments, "--url", url]
    done = await asyncio.to_thread(CliRunner().invoke, app, command, input=sent, env=environ)
    if done.exception is None or isinstance(done.exception, SystemExit):
        return done.exit_code, done.stdout, done.stderr
    with redirect_stderr(io.StringIO()) as said:
        status = exit_status_of(done.exception)
    assert status is not None, done.exception
    return status, done.stdout, done.stderr + said.getvalue()


def test_there_is_a_command_for_every_operation() -> None:
    group = get_command(app).commands["admin"]  # type: ignore[attr-defined]
    assert list(group.commands) == [*(each.name.replace("_", "-") for each in operations()), "kill-switch"]


async def test_a_policy_is_saved_tried_and_brought_back_by_commands(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path, log__level="warning")) as gateway:
        await gateway.chat("hi")
        status, said, _ = await run(gateway.url, "list-policies")
        assert status == 0
        assert "careful" in said
        policy = tmp_path / "policy.toml"
        policy.write_text("quality_floor = 0.5\nallowed_tiers = [1]\n")
        status, said, wrong = await run(gateway.url, "put-policy", "default", str(policy), "--note", "n", "--json")
        assert (status, json.loads(said)["body"]["quality_floor"]) == (0, 0.5), wrong
        policy.write_text("quality_flor = 0.5\n")
        status, _, wrong = await run(gateway.url, "put-policy", "default", str(policy))
        assert status == 2
        assert "did you mean quality_floor?" in wrong
        status, said, _ = await run(gateway.url, "put-policy", "fresh", "-", "--json", sent=b"{}")
        assert (status, json.loads(said)["is_active"]) == (0, True)
        policy.write_text("quality_floor = 0.9\n")
        status, said, wrong = await run(gateway.url, "try-policy", "--policy", str(policy), "--last", "10")
        assert status == 0, wrong
        assert "num_rows" in said
        status, said, _ = await run(gateway.url, "roll-back-policy", "default", "--json")
        assert (status, json.loads(said)["body"]["quality_floor"]) == (0, 0.95)
        status, _, wrong = await run(gateway.url, "get-policy", "none")
        assert (status, wrong.strip()) == (1, "suffice: There is no policy 'none'.")


@pytest.mark.slow
async def test_the_kill_switch_and_keys_by_commands(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path)) as gateway:
        status, said, _ = await run(gateway.url, "set-kill-switch", "--on", "--reason", "a drill")
        assert (status, "a drill" in said) == (0, True)
        assert (await gateway.chat("hi")).headers["x-suffice-reason"] == "kill_switch"
        status, said, _ = await run(gateway.url, "set-kill-switch", "--no-on", "--json")
        assert json.loads(said)["on"] is False
        for words, on in (("on --reason fire", True), ("off", False), ("on", True), ("", True), ("off", False)):
            status, said, wrong = await run(gateway.url, "kill-switch", *words.split(), "--json")
            assert (status, json.loads(said)["on"]) == (0, on), wrong
        for flags, on in ((["--on"], True), (["--off"], False), (["--on"], True), (["--no-on"], False)):
            status, said, _ = await run(gateway.url, "set-kill-switch", *flags, "--json")
            assert (status, json.loads(said)["on"]) == (0, on)
        status, _, wrong = await run(gateway.url, "kill-switch", "maybe")
        assert (status, "on" in wrong and "off" in wrong) == (2, True)
        limits = ("--requests-per-minute", "7", "--budget-usd-per-day", "1.5")
        status, said, wrong = await run(
            gateway.url, "create-key", "--name", "me", "--scope", "admin", *limits, "--json"
        )
        assert status == 0, wrong
        made = json.loads(said)
        assert made["limits"] == {"requests_per_minute": 7, "budget_usd_per_day": "1.5"}
        status, _, wrong = await run(gateway.url, "list-keys")
        assert (status, "SUFFICE_ADMIN_KEY" in wrong or "admin" in wrong) == (1, True)
        status, said, _ = await run(gateway.url, "list-keys", key=made["key"])
        assert (status, made["prefix"] in said, made["key"] in said) == (0, True, False)
        request_id = (await gateway.chat("hi")).headers["x-suffice-request-id"]
        status, said, _ = await run(gateway.url, "list-requests", key=made["key"])
        assert request_id in said, "ids are not broken over lines"
        status, said, _ = await run(gateway.url, "get-usage", "--group-by", "tier", key=made["key"])
        assert (status, "saved_usd" in said) == (0, True)
        for command in ("list-tiers", "list-thresholds", "get-control", "list-requests", "list-alerts", "report-floor"):
            status, said, wrong = await run(gateway.url, command, key=made["key"])
            assert (status, wrong) == (0, ""), command
            assert said
        user, _ = await add_key(gateway)
        status, _, wrong = await run(gateway.url, "list-keys", key=user["authorization"].removeprefix("Bearer "))
        assert status == 1
        assert "scope" in wrong


def test_nobody_there(free_port: int) -> None:
    """As a shell runs it."""
    command = [sys.executable, "-m", "gateway.cli", "admin", "list-tiers", "--url", f"http://127.0.0.1:{free_port}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "Nothing answers" in done.stderr


@pytest.mark.parametrize("command", ["put-policy default", "validate-policy default", "upload-router"])
async def test_a_file_that_is_not_there(free_port: int, command: str) -> None:
    status, _, wrong = await run(f"http://127.0.0.1:{free_port}", *command.split(), "/nowhere/policy.json")
    assert status == 2
    assert "/nowhere/policy.json cannot be read" in wrong


def test_the_document_is_printed_without_a_server(tmp_path: Path) -> None:
    file = tmp_path / "suffice.toml"
    file.write_text(LADDER_TOML)
    command = [sys.executable, "-m", "gateway.cli", "openapi", "--config", str(file)]
    done = subprocess.run(command, capture_output=True, timeout=120, check=True)
    assert json.loads(done.stdout)["paths"]["/admin/v1/tiers"]["get"]["operationId"] == "list_tiers"
    assert not (tmp_path / "suffice.db").exists()
