"""Libraries that nobody here wrote do a task with two tools, stream and fill forms, over a real server."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.clients.kit import HERE, ROOT, check_report, command, need, renew
from tests.clients.scripted_tier import ScriptedTier, scripted

# Client -> its script, and the environment that `make` installs it in; None for that of the tests.
PYTHON = {
    "OpenAI Agents SDK": ("openai_agents", "openai3"),
    "LangChain": ("langchain_client", "openai3"),
    "Pydantic-AI": ("pydantic_ai_client", "openai3"),
    "Instructor": ("instructor_client", "openai2"),
    "LiteLLM": ("litellm_client", "openai2"),
    "LlamaIndex": ("llama_index_client", "openai2"),
    "openai (Python), older": ("openai_sdk", "openai2"),
    "openai (Python)": ("openai_sdk", None),
    "anthropic (Python)": ("anthropic_sdk", None),
}

NPM = {
    "openai (npm)": "openai_tools",
    "@anthropic-ai/sdk (npm)": "anthropic_tools",
    "AI SDK (npm)": "ai_sdk_client",
}

pytestmark = pytest.mark.clients


@pytest.mark.parametrize("client", [name for name in PYTHON if PYTHON[name][1] is None])
async def test_python_package(client: str, tmp_path: Path) -> None:
    async with scripted(tmp_path, ScriptedTier()) as gateway:
        script = HERE / "python" / f"{PYTHON[client][0]}.py"
        await check_report(gateway, client, await command(sys.executable, str(script), gateway.url))


@pytest.mark.slow
@pytest.mark.parametrize("client", [name for name in PYTHON if PYTHON[name][1] is not None])
async def test_python_framework(client: str, tmp_path: Path) -> None:
    script, environment = PYTHON[client]
    python = ROOT / ".venv" / f"clients-{environment}" / "bin" / "python"
    need(client, python.exists())
    async with scripted(tmp_path, ScriptedTier()) as gateway:
        printed = await command(str(python), str(HERE / "python" / f"{script}.py"), gateway.url)
        await check_report(gateway, client, printed)


@pytest.mark.parametrize("client", NPM)
async def test_npm_package(client: str, tmp_path: Path) -> None:
    node = shutil.which("node")
    need(client, node is not None and (HERE / "node_modules" / "ai").is_dir())
    assert node is not None
    async with scripted(tmp_path, ScriptedTier()) as gateway:
        await check_report(gateway, client, await command(node, f"{NPM[client]}.mjs", gateway.url))


def test_the_page_shows_what_was_seen() -> None:
    page = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    assert renew(page) == page, "run: python -m tests.clients.kit docs/clients.md"
