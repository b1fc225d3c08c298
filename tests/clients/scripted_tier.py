"""Plays a remote tier that solves a task with two tools, by whatever names a client offers them."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backends.protocol import ToolCall
from backends.testing import Script
from tests.backends.provider.behaviours import BEHAVIOURS
from tests.backends.provider.call import ProviderCall
from tests.backends.provider.server import ProviderServer
from tests.backends.remote_kit import make
from tests.gateway.harness import Gateway, make_settings, running

MODEL = "auto"
PLACE = {"city": "Kiel", "people": 248000}
"""What every form asks for."""
SECRET = re.compile(r"secret-\w+")
"""What the first tool finds and the second must be given: it is nowhere in the script."""

_TOML = """
[policies."gpt-5.5"]
allowed_tiers = ["scripted"]

[policies."gpt-6-sol"]
allowed_tiers = ["scripted"]

[[tiers]]
name = "scripted"
model = "scripted-model"

[models.scripted-model]
kind = "echo"

[verification]
enabled = false
"""
_CAPABILITIES = ("generate", "logprobs", "tools", "structured_output", "thinking")


@dataclass(frozen=True)
class Step:
    """One call of a task: a tool by its client's name, and its arguments, made of the secret found so far."""

    tool: str
    arguments: Callable[[str], dict[str, Any]]


NOTES = (
    Step("read_note", lambda _: {"name": "todo"}),
    Step("write_note", lambda secret: {"name": "done", "text": secret}),
)
"""The task of the libraries; agents have their own tools."""


class ScriptedTier(ProviderServer):
    """Calls the tools of ``steps`` in turn, gives each what the one before it found, then says what it did.

    Beside its calls it thinks and speaks.

    Where the form of the answer is laid down, or only one tool may be called, it answers with :data:`PLACE`.
    """

    def __init__(self, steps: Sequence[Step] = NOTES) -> None:
        super().__init__(context_length=200_000, more={"scripted": self._play})
        self._steps = steps

    async def _play(self, call: ProviderCall) -> None:
        call.script = self._script(call.seen.body)
        await BEHAVIOURS["ok"](call)

    def _script(self, body: dict[str, Any]) -> Script:
        names = [tool["function"]["name"] for tool in body.get("tools") or ()]
        chosen = body.get("tool_choice")
        if isinstance(chosen, dict):
            return _calling(0, chosen["function"]["name"], PLACE)
        if (body.get("response_format") or {}).get("type") == "json_schema":
            return Script(text=json.dumps(PLACE))
        results = [_text(message) for message in body["messages"] if message["role"] == "tool"]
        if not names:
            return Script(text="one two three")
        if len(names) == 1 and names[0] != self._steps[0].tool:
            return _calling(0, names[0], PLACE)
        secret = _secret(results)
        # The first tool is called twice at once, so that clients see two calls in one answer.
        if not results:
            script = _calling(0, self._steps[0].tool, self._steps[0].arguments(secret), times=2)
        elif len(results) <= len(self._steps):
            step = self._steps[len(results) - 1]
            script = _calling(len(results), step.tool, step.arguments(secret))
        else:
            return Script(text=f"Wrote {secret}.")
        return replace(script, text="I look.", reasoning="It must be there.")


def _calling(place: int, name: str, arguments: dict[str, Any], times: int = 1) -> Script:
    shown = json.dumps(arguments)
    calls = [ToolCall(f"call_scripted_{place}_{number}", name, shown) for number in range(times)]
    return Script(text="", tool_calls=tuple(calls))


def _secret(results: Sequence[str]) -> str:
    found = SECRET.search("\n".join(results))
    return "nothing" if found is None else found[0]


def _text(message: dict[str, Any]) -> str:
    content = message["content"] or ""
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)


@asynccontextmanager
async def scripted(folder: Path, tier: ScriptedTier) -> AsyncIterator[Gateway]:
    """A gateway whose one tier is this one, remote."""
    with tier:
        backend = make(tier, "scripted", capabilities=_CAPABILITIES, context_length=tier.context_length)
        async with running(make_settings(folder, _TOML), {"scripted-model": backend}) as gateway:
            yield gateway
