"""The command line, run as it is run: real files, a real database, a real server, real signals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import httpx
import pytest

from gateway import cli
from gateway.access.authenticator import hash_key
from tests.gateway.raw import PATIENCE_S

LADDER = """
[[tiers]]
name = "small"
model = "echo-a"
price_per_request_usd = 0.0001
[[tiers]]
name = "large"
model = "echo-b"
price_per_request_usd = 0.01
[models.echo-a]
kind = "echo"
token_delay_s = 0.02
[models.echo-b]
kind = "echo"

[policy]
exploration_share = 0
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment of its own: no one else's settings, its own state directory."""
    for name in [name for name in os.environ if name.startswith("SUFFICE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SUFFICE_DATA_DIR", str(tmp_path / "state"))
    (tmp_path / "suffice.toml").write_text(LADDER)
    monkeypatch.setenv("SUFFICE_CONFIG", str(tmp_path / "suffice.toml"))
    return tmp_path


@pytest.fixture
def run(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process: (exit status, standard output, standard error)."""

    def _run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["suffice", *arguments])
        status = 0
        try:
            cli.main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return _run


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['suffice', '--help']\n"
        "from gateway.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = ('torch', 'numpy', 'sklearn', 'transformers', 'sqlalchemy', 'starlette', 'httpx', 'uvicorn')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "route" in done.stdout


def test_config_show_names_every_source(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUFFICE_DATABASE__URL", "postgresql://me:secret@nowhere/x")
    status, out, _ = run("config", "show", "--json")
    shown = json.loads(out)["settings"]
    assert status == 0
    assert shown["database.url"] == {
        "value": "postgresql://me:***@nowhere/x",
        "source": "environment SUFFICE_DATABASE__URL",
    }
    assert shown["tiers.small.model"]["value"] == "echo-a"
    status, out, _ = run("config", "show")
    assert status == 0
    assert re.search(r"tiers\.large\.price_per_request_usd +0\.01 ", out)
    assert "secret" not in out


def test_config_validate_says_what_is_wrong_and_exits_with_2(run: Run, home: Path) -> None:
    assert run("config", "validate")[0] == 0
    bad = home / "bad.toml"
    bad.write_text(LADDER + "[server]\nprot = 1\n")
    for command in (("config", "validate", str(bad)), ("serve", "-c", str(bad)), ("plan", "-c", str(bad))):
        status, _, err = run(*command)
        assert status == 2
        assert f"server.prot: unknown key; did you mean server.port? ({bad})" in err
    assert run("config", "validate", str(home / "none.toml"))[0] == 2


def test_unknown_options_exit_with_2(run: Run) -> None:
    assert run("up", "--prot", "1")[0] == 2
    assert run("frobnicate")[0] == 2


def test_keys_are_shown_once_and_stored_hashed(run: Run, home: Path) -> None:
    status, out, _ = run("keys", "create", "--create", "--name", "phone", "--tenant", "acme", "--json")
    made = json.loads(out)
    assert status == 0
    assert made["key"].startswith("sk-suffice-")
    with sqlite3.connect(home / "state" / "suffice.db") as database:
        stored = database.execute("select key_hash, tenant from api_keys").fetchall()
        assert stored == [(hash_key(made["key"]), "acme")]
    database.close()
    listed = run("keys", "list")[1]
    assert "phone" in listed
    assert "active" in listed
    assert made["key"] not in listed
    assert run("keys", "revoke", made["id"])[0] == 0
    assert json.loads(run("keys", "list", "--json")[1])[0]["revoked_at"] is not None


def test_revoking_needs_exactly_one_key(run: Run) -> None:
    key = run("keys", "create", "--create", "--offline")[1].strip()
    status, _, err = run("keys", "revoke", "nothing")
    assert status == 1
    assert "names 0 keys" in err
    assert run("keys", "revoke", key)[0] == 0


def test_database_revision(run: Run) -> None:
    assert json.loads(run("db", "current", "--json")[1])["revision"] is None
    assert run("db", "upgrade")[0] == 0
    assert json.loads(run("db", "current", "--json")[1])["is_current"]


def test_unreachable_database_is_one_line_without_the_password(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUFFICE_DATABASE__URL", "postgresql://me:secret@127.0.0.1:1/x")
    for command in (("db", "upgrade"), ("keys", "list"), ("serve", "--port", "0")):
        status, _, err = run(*command)
        assert status == 1
        assert "secret" not in err
        assert "127.0.0.1:1" in err
        assert "Traceback" not in err


def test_plan_of_the_reference_ladder(run: Run) -> None:
    status, out, _ = run("plan", "--reference", "--gpu", "H200", "--json")
    assert status == 0
    assert json.loads(out)["fits"]
    status, _, err = run("plan", "--reference", "--memory-gib", "40")
    assert status == 1
    assert "The ladder does not fit 40 GiB: weights 47.7 GB + reserve 4.3 GB exceed 42.9 GB." in err
    assert "remote" in run("plan")[1]


@pytest.mark.parametrize(
    "options",
    [
        ("--gpu", "b9000"),
        ("--gpu", "h200", "--memory-gib", "1"),
        ("--memory-gib", "-1"),
        ("--gpu", "h200", "--context", "0"),
        ("--gpu", "h200", "--shares", "1,x"),
        ("--gpu", "h200", "--shares", "1"),
    ],
)
def test_useless_plan_options_exit_with_2(run: Run, options: tuple[str, ...]) -> None:
    status, _, err = run("plan", "--reference", *options)
    assert status == 2
    assert err.startswith("suffice: --")


def test_route_without_a_router_plays_safe(run: Run) -> None:
    status, out, _ = run("route", "What is 2 + 2?", "--json")
    shown = json.loads(out)
    assert status == 0
    assert (shown["tier"], shown["reason"]) == (2, "no_estimate")
    assert sum(each["propensity"] for each in shown["tiers"]) == pytest.approx(1.0)
    assert run("route", "What is 2 + 2?", "--max-tier", "1")[1].count("only_allowed") == 1


def test_route_refuses_what_cannot_be(run: Run) -> None:
    assert run("route", " ")[0] == 2
    assert run("route", "x", "--policy", "none")[0] == 2
    status, _, err = run("route", "x", "--min-tier", "2", "--max-tier", "1")
    assert (status, err) == (1, "suffice: min_tier 2 is above max_tier 1.\n")


@pytest.fixture
def server(home: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``suffice up`` as a process of its own, and its address."""
    command = [sys.executable, "-m", "gateway.cli", "up", "--port", "0"]
    environ = os.environ | {"PYTHONUNBUFFERED": "1", "SUFFICE_SERVER__LAME_DUCK_S": "0"}
    log = home / "server.log"
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environ)
    assert process.stdout is not None
    try:
        text = "".join(_until(process.stdout, "To talk to it"))
        found = re.search(r"answers at (http://\S+)/v1", text)
        assert found is not None, log.read_text()
        process.welcome = text  # type: ignore[attr-defined]
        yield process, found[1]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        # Shown by pytest beside a failure.
        sys.stderr.write(log.read_text())


def _until(lines: Iterable[str], start: str) -> Iterator[str]:
    for line in lines:
        yield line
        if line.startswith(start):
            return


def test_pasted_request_is_answered_and_a_signal_ends_in_order(
    server: tuple[subprocess.Popen[str], str], home: Path
) -> None:
    process, _ = server
    curl = next(line for line in process.welcome.splitlines() if line.startswith("curl"))  # type: ignore[attr-defined]
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    done = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, check=True)
    assert "200 OK" in done.stdout
    assert "x-suffice-tier: 2" in done.stdout
    assert "What is 17 + 25?" in done.stdout
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=PATIENCE_S) == 0
    with sqlite3.connect(home / "state" / "suffice.db") as database:
        assert database.execute("select count(*) from requests").fetchone() == (1,)
    database.close()


def test_a_signal_lets_a_running_answer_finish(server: tuple[subprocess.Popen[str], str], home: Path) -> None:
    process, address = server
    words = " ".join(f"word{number}" for number in range(50))
    body = {"model": "small", "messages": [{"role": "user", "content": words}], "stream": True}
    seen = ""
    with httpx.stream("POST", f"{address}/v1/chat/completions", json=body, timeout=30) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    if choice["delta"].get("content") and not seen:
                        process.send_signal(signal.SIGTERM)
                    seen += choice["delta"].get("content") or ""
    assert line == "" or line == "data: [DONE]"
    assert seen == words
    assert process.wait(timeout=PATIENCE_S) == 0
    with sqlite3.connect(home / "state" / "suffice.db") as database:
        assert database.execute("select finish_reason from requests").fetchall() == [("stop",)]
    database.close()


def test_chat_shows_the_answer_its_tier_and_its_cost(server: tuple[subprocess.Popen[str], str], run: Run) -> None:
    _, address = server
    command = [sys.executable, "-m", "gateway.cli", "chat", "--url", address, "--model", "small"]
    done = subprocess.run(
        command, input="good morning\n/reset\nonce more\n", capture_output=True, text=True, check=True
    )
    assert "good morning\ntier 1 small (echo-a): pinned, $0.0001" in done.stdout
    assert "once more\ntier 1 small" in done.stdout
    refused = subprocess.run([*command[:-1], "none"], input="hello\n", capture_output=True, text=True, check=True)
    assert "none" in refused.stderr


def test_chat_says_when_nothing_answers(run: Run) -> None:
    status, _, err = run("chat", "--url", "http://127.0.0.1:1")
    assert status == 1
    assert "Nothing answers at http://127.0.0.1:1" in err


def test_taken_port_is_refused_before_anything_loads(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, _, err = run("serve", "--port", str(port))
    assert status == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in err


def test_open_to_others_without_keys_is_refused(home: Path) -> None:
    command = [sys.executable, "-m", "gateway.cli", "serve", "--port", "0", "--host", "0.0.0.0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        messages = []
        for line in process.stderr:
            messages.append(json.loads(line)["message"])
            if messages[-1].startswith("answering at "):
                break
        assert any("no API key exists" in message for message in messages)
        address = messages[-1].removeprefix("answering at ")
        assert httpx.get(f"{address}/v1/models").status_code == 401
        made = subprocess.run([sys.executable, "-m", "gateway.cli", "keys", "create"], capture_output=True, text=True)
        headers = {"authorization": f"Bearer {made.stdout.strip()}"}
        assert httpx.get(f"{address}/v1/models", headers=headers).status_code == 200
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
