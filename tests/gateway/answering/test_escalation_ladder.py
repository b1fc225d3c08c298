"""Escalation over the built-in ladder: a doubted answer, read by a higher tier, becomes that tier's own."""

from __future__ import annotations

import sys
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

# Nats. On float paths, where neighbours matter, they moved log-probabilities by at most 0.0015 in 344 tokens of which
# one in 170 was chosen by less than this.
NEAR_TIE = 0.02

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    directory: Path = tmp_path_factory.mktemp("builtin")
    config = directory / "suffice.toml"
    config.write_text(POLICIES)
    settings = load_settings(config, environ={"HOME": str(directory)})
    async with running(settings, make_backends(settings)) as up:
        yield up


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "tier", "doubted", "count", "concurrency"),
    # What a tier thinks has no logprobs, so that no near-tie could be shown there: it is asked without neighbours.
    [("one", 2, (1,), 120, 8), ("two", 3, (1, 2), 60, 8), ("thinking", 4, (1,), 6, 1)],
)
async def test_escalated_answers_are_the_higher_tiers_own(
    gateway: Gateway, policy: str, tier: int, doubted: tuple[int, ...], count: int, concurrency: int
) -> None:
    tasks = draw_split(HOLDOUT_SPLIT, 11, count)
    escalated, own = [
        await ask_all(gateway.url, model, tasks, concurrency=concurrency, max_tokens=400)
        for model in (policy, f"tier-{tier}")
    ]
    for task, first, second in zip(tasks, escalated, own, strict=True):
        if first.text != second.text:
            await assert_near_tie(gateway, f"tier-{tier}", task.prompt, first.text, second.text)
    assert {reply.doubted for reply in escalated} == {doubted}
    assert {reply.tier for reply in escalated} == {tier}
    ladder = gateway.parts.catalog.ladder
    price = sum(ladder[each - 1].price_per_request_usd for each in (*doubted, tier))
    assert {reply.cost_usd for reply in escalated} == {float(price)}


async def assert_near_tie(gateway: Gateway, model: str, prompt: str, *answers: str) -> None:
    """Check that two greedy answers part at a token whose choice is a matter of rounding.

    Processors without 8-bit dot products sum a sequence's numbers in an order that depends on its neighbours in the
    batch, and on how many predicted tokens are checked in one step.
    """
    first, second = answers
    num_common = next((at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), None)
    assert num_common is not None, f"{answers} part at an end, for which no logprobs are given"
    asked = {"temperature": 0, "max_tokens": 400, "logprobs": True, "top_logprobs": 2}
    answer = (await gateway.chat(prompt, model=model, **asked)).json()["choices"][0]
    assert answer["message"]["content"].startswith(first[:num_common]), "a third answer"
    length = 0
    for token in answer["logprobs"]["content"]:
        length += len(token["token"])
        if length > num_common:
            likeliest, next_one = (each["logprob"] for each in token["top_logprobs"])
            assert likeliest - next_one < NEAR_TIE, f"{answers} part where {token} is no near-tie"
            return
    raise AssertionError(f"{answers} part where the answer asked for again ends")


async def test_only_a_near_tie_excuses_a_difference(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = "What is 17 + 25?"
    own = _text(await gateway.chat(prompt, model="tier-2", temperature=0))
    other = own[:-1] + "~"
    with pytest.raises(AssertionError, match="no near-tie"):
        await assert_near_tie(gateway, "tier-2", prompt, other, own)
    with pytest.raises(AssertionError, match="at an end"):
        await assert_near_tie(gateway, "tier-2", prompt, own, own[:-1])
    with pytest.raises(AssertionError, match="a third answer"):
        await assert_near_tie(gateway, "tier-2", prompt, "~~", "~" + own)
    monkeypatch.setattr(sys.modules[__name__], "NEAR_TIE", 100.0)
    await assert_near_tie(gateway, "tier-2", prompt, other, own)


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
