"""Agents that work in turns: each turn calls a tool for as many steps as its task says, then answers in text."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from backends.errors import BackendUnavailable
from backends.protocol import GenerateRequest, ToolCall
from backends.testing import Script

TOOLS: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
MARKED = frozenset({"fallback", "unlocked", "escalated", "kill_switch"})


class AgentModel:
    """Plays the models of agents, and fails as often as it is told before its first token.

    Attributes
    ----------
    num_failed : failures that were injected
    """

    def __init__(self, failing_share: float = 0.0, seed: int = 0) -> None:
        self._failing_share = failing_share
        self._rng = random.Random(seed)
        self.num_failed = 0

    def __call__(self, request: GenerateRequest) -> Script:
        if self._rng.random() < self._failing_share:
            self.num_failed += 1
            return Script(fail_before=BackendUnavailable("gone for a moment"))
        messages = request.messages or ()
        last = max(place for place, message in enumerate(messages) if message.role == "user")
        num_done = sum(message.role == "tool" for message in messages[last:])
        if num_done < int(messages[last].content.split()[0]):
            return Script(text="", tool_calls=(ToolCall(f"call_{uuid.uuid4().hex}", "look", "{}"),))
        return Script(text="done", token_delay_s=None)


@dataclass
class StepSeen:
    """One answer as its client saw it."""

    turn: int
    step: int
    tier: int
    reason: str
    affinity: str
    request_id: str


@dataclass
class ChatAgent:
    """A client of ``/v1/chat/completions`` that re-sends its whole history; ``pick`` says whom it asks next."""

    pick: Callable[[], httpx.AsyncClient]
    name: str
    headers: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    messages: list[Any] = field(default_factory=list)
    seen: list[StepSeen] = field(default_factory=list)
    num_turns: int = 0

    async def take_turn(self, num_steps: int) -> None:
        """Let the user ask for something that takes so many calls, and see it through."""
        self.num_turns += 1
        self.messages.append({"role": "user", "content": f"{num_steps} looks, please ({self.name})"})
        step = 0
        while True:
            message = await self.ask(step)
            self.messages.append(message)
            if not (calls := message.get("tool_calls")):
                return
            step += 1
            self.messages += [{"role": "tool", "tool_call_id": call["id"], "content": "found"} for call in calls]

    async def ask(self, step: int) -> Any:
        """Send one step; what came of it is kept in ``seen``."""
        body = {"model": "auto", "messages": self.messages, "tools": TOOLS} | self.extra
        for _ in range(3):
            answer = await self.pick().post("/v1/chat/completions", json=body, headers=self.headers)
            # As agents do: where every tier had failed, the step is asked again.
            if answer.status_code < 500:
                break
        answer.raise_for_status()
        head = answer.headers
        self.seen.append(
            StepSeen(
                self.num_turns,
                step,
                int(head["x-suffice-tier"]),
                head["x-suffice-reason"],
                head["x-suffice-affinity"],
                head["x-suffice-request-id"],
            )
        )
        return answer.json()["choices"][0]["message"]


def switches(seen: list[StepSeen]) -> list[StepSeen]:
    """Return the steps inside a loop whose tier is not that of the step before."""
    return [after for before, after in pairwise(seen) if after.turn == before.turn and after.tier != before.tier]
