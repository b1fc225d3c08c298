"""Agents that work in turns: each turn calls a tool for as many steps as its task says, then answers in text."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import httpx

from backends.errors import BackendUnavailable
from backends.protocol import GenerateRequest, ToolCall
from backends.testing import Script

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


class Dialect(Protocol):
    """What agents of one protocol send and read."""

    path: str

    def body(self, history: list[Any]) -> dict[str, Any]:
        """The request of a step."""

    def read(self, answer: Any) -> tuple[list[Any], list[str]]:
        """What of an answer belongs into the history, and the ids of its calls."""

    def results(self, call_ids: list[str]) -> list[Any]:
        """What the tools found, for the history."""

    def session(self, name: str) -> dict[str, Any]:
        """How a body names its conversation."""


class Chat:
    """OpenAI's ``/v1/chat/completions``."""

    path = "/v1/chat/completions"

    def body(self, history: list[Any]) -> dict[str, Any]:
        tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
        return {"messages": history, "tools": [tool]}

    def read(self, answer: Any) -> tuple[list[Any], list[str]]:
        message = answer["choices"][0]["message"]
        return [message], [call["id"] for call in message.get("tool_calls") or ()]

    def results(self, call_ids: list[str]) -> list[Any]:
        return [{"role": "tool", "tool_call_id": each, "content": "found"} for each in call_ids]

    def session(self, name: str) -> dict[str, Any]:
        return {"prompt_cache_key": name}


class Messages:
    """Anthropic's ``/v1/messages``."""

    path = "/v1/messages"

    def body(self, history: list[Any]) -> dict[str, Any]:
        tool = {"name": "look", "input_schema": {"type": "object"}}
        return {"messages": history, "tools": [tool], "max_tokens": 500}

    def read(self, answer: Any) -> tuple[list[Any], list[str]]:
        blocks = answer["content"]
        turn = {"role": "assistant", "content": blocks}
        return [turn], [block["id"] for block in blocks if block["type"] == "tool_use"]

    def results(self, call_ids: list[str]) -> list[Any]:
        found = [{"type": "tool_result", "tool_use_id": each, "content": "found"} for each in call_ids]
        return [{"role": "user", "content": found}]

    def session(self, name: str) -> dict[str, Any]:
        return {"metadata": {"user_id": f"user_u_account__session_{name}"}}


class Responses:
    """OpenAI's ``/v1/responses``, with nothing kept at the server."""

    path = "/v1/responses"

    def body(self, history: list[Any]) -> dict[str, Any]:
        tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
        return {"input": history, "tools": [tool], "store": False}

    def read(self, answer: Any) -> tuple[list[Any], list[str]]:
        items = answer["output"]
        return items, [item["call_id"] for item in items if item["type"] == "function_call"]

    def results(self, call_ids: list[str]) -> list[Any]:
        return [{"type": "function_call_output", "call_id": each, "output": "found"} for each in call_ids]

    def session(self, name: str) -> dict[str, Any]:
        return {"prompt_cache_key": name}


DIALECTS: tuple[Dialect, ...] = (Chat(), Messages(), Responses())


@dataclass
class Agent:
    """A client that re-sends its whole history; ``pick`` says whom it asks next."""

    pick: Callable[[], httpx.AsyncClient]
    name: str
    dialect: Dialect = DIALECTS[0]
    headers: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    history: list[Any] = field(default_factory=list)
    seen: list[StepSeen] = field(default_factory=list)
    num_turns: int = 0

    async def take_turn(self, num_steps: int) -> None:
        """Let the user ask for something that takes so many calls, and see it through."""
        self.num_turns += 1
        self.history.append({"role": "user", "content": f"{num_steps} looks, please ({self.name})"})
        step = 0
        while await self.go_on(step):
            step += 1

    async def go_on(self, step: int) -> bool:
        """Take one step, and let its calls find something; False if there are none."""
        said, call_ids = self.dialect.read(await self.ask(step))
        self.history += said + self.dialect.results(call_ids) if call_ids else said
        return bool(call_ids)

    async def ask(self, step: int) -> Any:
        """Send one step and return its answer; what was seen of it is kept in ``seen``."""
        body = {"model": "auto"} | self.dialect.body(self.history) | self.extra
        for _ in range(3):
            answer = await self.pick().post(self.dialect.path, json=body, headers=self.headers)
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
        return answer.json()


def switches(seen: list[StepSeen]) -> list[StepSeen]:
    """Return the steps inside a loop whose tier is not that of the step before."""
    return [after for before, after in pairwise(seen) if after.turn == before.turn and after.tier != before.tier]
