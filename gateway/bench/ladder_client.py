"""Asks a running gateway the same tasks at every tier and routed, over HTTP as any application would."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from backends.builtin.tasks.answer_checker import check
from backends.builtin.tasks.types import Task
from gateway.answering.escalation import DOUBTED
from gateway.bench.child_server import ready_server

_ANSWER_TIMEOUT_S = 300.0

Progress = Callable[[str, int, int], None]
"""Told (model, answers so far, answers wanted)."""


@dataclass(frozen=True, slots=True)
class LadderReply:
    """One answered task.

    Attributes
    ----------
    is_right : whether the answer's final answer is the task's
    text : the visible answer
    tier : number of the tier that answered
    cost_usd : as billed by the price table
    measured_cost_usd, compute_s : by device seconds, None where the backend cannot know
    p_right : the router's estimate per tier, empty where it gave none
    novelty : the router's, None likewise
    decision_reason : why this tier
    total_s, overhead_s : the whole request, and the gateway's own part of it
    completion_tokens : thinking included
    doubted : tiers whose answers were replaced by a higher one's, in order
    """

    is_right: bool
    text: str
    tier: int
    cost_usd: float
    measured_cost_usd: float | None
    compute_s: float | None
    p_right: tuple[float, ...]
    novelty: float | None
    decision_reason: str
    total_s: float
    overhead_s: float
    completion_tokens: int
    doubted: tuple[int, ...] = ()


def own_server(data_dir: Path, config: Path | None) -> AbstractAsyncContextManager[str]:
    """Return a server process of the bench's; gives its URL once it is ready to answer, and stops it at the end."""
    command = [sys.executable, "-P", "-m", "gateway.bench.ladder_server", "--data-dir", str(data_dir)]
    return ready_server(*command, *(["--config", str(config)] if config else []))


async def ask_all(
    url: str,
    model: str,
    tasks: Sequence[Task],
    *,
    concurrency: int,
    max_tokens: int,
    api_key: str | None = None,
    progress: Progress | None = None,
) -> list[LadderReply]:
    """Answers to all tasks by one model name (``auto`` or a tier), in the tasks' order.

    Raises
    ------
    httpx.HTTPStatusError
        The server refused or failed a request.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    replies: list[LadderReply | None] = [None] * len(tasks)
    pending = iter(enumerate(tasks))
    done = 0

    async def work(client: httpx.AsyncClient) -> None:
        nonlocal done
        for place, task in pending:
            replies[place] = await _ask(client, model, task, max_tokens)
            done += 1
            if progress:
                progress(model, done, len(tasks))

    limits = httpx.Limits(max_connections=concurrency)
    async with (
        httpx.AsyncClient(base_url=url, timeout=_ANSWER_TIMEOUT_S, limits=limits, headers=headers) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(min(concurrency, len(tasks))):
            group.create_task(work(client))
    return [reply for reply in replies if reply is not None]


async def _ask(client: httpx.AsyncClient, model: str, task: Task, max_tokens: int) -> LadderReply:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": task.prompt}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "suffice": {"explore": False},
    }
    answer = await client.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    request_id = answer.headers["x-suffice-request-id"]
    explained = await client.get(f"/v1/requests/{request_id}")
    explained.raise_for_status()
    return _reply(task, answer.json(), explained.json())


def _reply(task: Task, answer: dict[str, Any], explained: dict[str, Any]) -> LadderReply:
    text = answer["choices"][0]["message"]["content"] or ""
    decision, timings, measured = explained["decision"], explained["timings"], explained["measured_cost_usd"]
    estimates = [tier["p_right"] for tier in explained["tiers"]]
    return LadderReply(
        is_right=check(task, text),
        text=text,
        tier=decision["final_tier"],
        cost_usd=float(explained["cost_usd"]),
        measured_cost_usd=None if measured is None else float(measured),
        compute_s=explained["compute_s"],
        p_right=() if None in estimates else tuple(estimates),
        novelty=decision["novelty"],
        decision_reason=decision["reason"],
        total_s=timings["total_s"] or 0.0,
        overhead_s=timings["overhead_s"] or 0.0,
        completion_tokens=explained["usage"]["completion_tokens"],
        doubted=tuple(each["tier"] for each in explained["attempts"] if each["error"] == DOUBTED),
    )
