"""Escalation over the built-in ladder: a doubted answer, read by a higher tier, becomes that tier's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from gateway.bench.ladder_client import ask_all
from gateway.config.settings import load_settings
from gateway.models.loader import make_backends
from gateway.outcomes.task_split import HOLDOUT_SPLIT, draw_split
from tests.gateway.harness import Gateway, running

# Everything begins at the lowest tier, which never is sure enough; so does the next, where two steps are permitted.
POLICIES = """
[verification]
enabled = false

[policy]
mode = "floor"
exploration_share = 0.0
thresholds = { simple = 0.0, medium = 0.0, complex = 0.0 }

[policies.one.escalation]
mode = "next"
least_confidence = { simple = 1.0, medium = 1.0 }

[policies.two.escalation]
mode = "next"
least_confidence = { simple = 1.0, medium = 1.0 }
max_escalations = 2

[policies.thinking.escalation]
mode = "top"
least_confidence = { simple = 1.0 }
"""

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    directory: Path = tmp_path_factory.mktemp("builtin")
    config = directory / "suffice.toml"
    config.write_text(POLICIES)
    settings = load_settings(config, environ={"HOME": str(directory)})
    async with running(settings, make_backends(settings)) as up:
        yield up


@pytest.mark.parametrize(
    ("policy", "tier", "doubted", "count"),
    [("one", 2, (1,), 120), ("two", 3, (1, 2), 60), ("thinking", 4, (1,), 6)],
)
async def test_escalated_answers_are_the_higher_tiers_own(
    gateway: Gateway, policy: str, tier: int, doubted: tuple[int, ...], count: int
) -> None:
    tasks = draw_split(HOLDOUT_SPLIT, 11, count)
    escalated, own = await asyncio.gather(
        ask_all(gateway.url, policy, tasks, concurrency=8, max_tokens=400),
        ask_all(gateway.url, f"tier-{tier}", tasks, concurrency=8, max_tokens=400),
    )
    assert [reply.text for reply in escalated] == [reply.text for reply in own]
    assert {reply.doubted for reply in escalated} == {doubted}
    assert {reply.tier for reply in escalated} == {tier}
    ladder = gateway.parts.catalog.ladder
    price = sum(ladder[each - 1].price_per_request_usd for each in (*doubted, tier))
    assert {reply.cost_usd for reply in escalated} == {float(price)}


async def test_predictions_are_checked_not_written(gateway: Gateway) -> None:
    """The same answer, with its right prediction, in fewer steps of the engine, and counted."""
    backend = gateway.backends["builtin-3"]
    prompt = "Sort these numbers from smallest to largest: 52, 18, 97, 33, 71, 6, 44."
    greedy = {"model": "tier-3", "temperature": 0}
    steps = []
    answers: list[httpx.Response] = []
    for prediction in (None, None, "right"):
        before = backend.engine.stats().num_steps
        body = {} if prediction is None else {"prediction": {"type": "content", "content": _text(answers[0])}}
        answers.append(await gateway.chat(prompt, **greedy, **body))
        steps.append(backend.engine.stats().num_steps - before)
    assert len({_text(answer) for answer in answers}) == 1
    details = answers[-1].json()["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0
    assert details["rejected_prediction_tokens"] == 0
    assert steps[2] < steps[1]


def _text(answer: httpx.Response) -> str:
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text
