"""Coding agents from npm finish a task with two tools of their own: read a file, write what was in it into another.

They are too large for every run: ``make agents`` installs and runs them, elsewhere they are named as skipped.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.clients.kit import HERE, check_log, check_matrix, command, need
from tests.clients.scripted_tier import ScriptedTier, Step, scripted

MODULES = Path(os.environ.get("SUFFICE_AGENT_CLIENTS", HERE / "agents" / "node_modules"))
REQUIRED = bool(os.environ.get("SUFFICE_REQUIRE_AGENTS"))
TASK = "Read note.txt and write its secret into a new file done.txt."
PATCH = "*** Begin Patch\n*** Add File: done.txt\n+{}\n*** End Patch\n"

pytestmark = [pytest.mark.clients, pytest.mark.slow]


@dataclass(frozen=True)
class Agent:
    """How one agent is told of the server and set to work.

    Parameters
    ----------
    package, program : on npm, and what it installs
    endpoint : what it is to use
    steps : the calls of the task, by its own tools, in a folder
    words : of the command, after the program
    files : of the folder, which is its home too, given the server's URL
    before : words of a command that comes first, given the URL
    environ : beside its home
    """

    package: str
    program: str
    endpoint: str
    steps: Callable[[Path], Sequence[Step]]
    words: tuple[str, ...]
    files: Callable[[str], dict[str, str]] = lambda _: {}
    before: Callable[[str], tuple[str, ...]] = lambda _: ()
    environ: Mapping[str, str] = field(default_factory=dict)


def _codex(model: str, steps: Sequence[Step]) -> Agent:
    return Agent(
        "@openai/codex",
        "codex",
        "/v1/responses",
        lambda _: steps,
        ("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "--model", model, TASK),
        lambda url: {
            ".codex/config.toml": f'model_provider = "suffice"\n[model_providers.suffice]\nname = "Suffice"\n'
            f'base_url = "{url}/v1"\nwire_api = "responses"\n'
        },
    )


def _opencode_files(url: str) -> dict[str, str]:
    provider: Any = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Suffice",
        "options": {"baseURL": f"{url}/v1", "apiKey": "unused"},
        "models": {"auto": {"name": "auto", "tool_call": True, "limit": {"context": 100_000, "output": 4000}}},
    }
    model = {"model": "suffice/auto", "small_model": "suffice/auto"}
    return {"opencode.json": json.dumps(model | {"autoupdate": False, "provider": {"suffice": provider}})}


AGENTS = {
    # Of a model that it knows it offers a patch as free text; of newer ones one tool that runs JavaScript.
    "Codex CLI": _codex(
        "gpt-5.5",
        (
            Step("exec_command", lambda _: {"cmd": "cat note.txt"}),
            Step("apply_patch", lambda secret: {"input": PATCH.format(secret)}),
        ),
    ),
    "Codex CLI, code mode": _codex(
        "gpt-6-sol",
        (
            Step("functions__exec", lambda _: {"input": 'text(await tools.exec_command({cmd: "cat note.txt"}));'}),
            Step(
                "functions__exec",
                lambda secret: {"input": f"text(await tools.apply_patch({json.dumps(PATCH.format(secret))}));"},
            ),
        ),
    ),
    "OpenCode": Agent(
        "opencode-ai",
        "opencode",
        "/v1/chat/completions",
        lambda folder: (
            Step("read", lambda _: {"filePath": str(folder / "note.txt")}),
            Step("write", lambda secret: {"filePath": str(folder / "done.txt"), "content": secret}),
        ),
        ("run", "--auto", TASK),
        _opencode_files,
    ),
    "Cline CLI": Agent(
        "cline",
        "cline",
        "/v1/chat/completions",
        lambda folder: (
            Step("read_files", lambda _: {"files": [{"path": str(folder / "note.txt")}]}),
            Step("editor", lambda secret: {"path": str(folder / "done.txt"), "new_text": secret}),
        ),
        ("--json", TASK),
        before=lambda url: ("auth", "-p", "openai-compatible", "-k", "unused", "-m", "auto", "-b", f"{url}/v1"),
        # By default a process stays behind.
        environ={"CLINE_SESSION_BACKEND_MODE": "local"},
    ),
}


@pytest.mark.parametrize("client", AGENTS)
async def test_agent(client: str, tmp_path: Path) -> None:
    agent = AGENTS[client]
    program = MODULES / ".bin" / agent.program
    need(f"{client}, which `make agents` installs,", program.exists(), required=REQUIRED)
    folder = tmp_path / "work"
    folder.mkdir()
    secret = f"secret-{secrets.token_hex(6)}"
    (folder / "note.txt").write_text(f"It says {secret}.\n")
    # Nothing of this user's own: keys and settings of other servers would change what is asked.
    environ = {"HOME": str(folder), "PATH": os.environ["PATH"], "TERM": "dumb", **agent.environ}
    async with scripted(tmp_path, ScriptedTier(agent.steps(folder))) as gateway:
        for name, text in agent.files(gateway.url).items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
        if words := agent.before(gateway.url):
            await command(str(program), *words, cwd=folder, environ=environ)
        shown = await command(str(program), *agent.words, cwd=folder, environ=environ)
        assert f"Wrote {secret}." in shown
        assert (folder / "done.txt").read_text().strip() == secret
        done = {agent.endpoint: ["streamed tools"]}
        await check_log(gateway, done)
    version = json.loads((MODULES / agent.package / "package.json").read_text())["version"]
    check_matrix(client, version, done)
