"""The gateway over the built-in ladder: real models, the shipped router, nothing faked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any

import openai
import pytest
import pytest_asyncio

from backends.local import LocalBackend
from gateway.config.settings import load_settings
from gateway.models.loader import make_backends
from tests.gateway.harness import Gateway, events, running
from tests.gateway.raw import PATIENCE_S, RawClient, eventually

QUESTION = "What is 12 + 30?"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    directory = tmp_path_factory.mktemp("builtin")
    # Without checks in the background, what is idle stays idle.
    overrides: dict[str, object] = {"policy.exploration_share": 0.0, "verification.enabled": False}
    settings = load_settings(environ={"HOME": str(directory)}, overrides=overrides | {"server.max_queue_s": 600})
    async with running(settings, make_backends(settings)) as up:
        yield up


def engines(gateway: Gateway) -> list[LocalBackend]:
    found = [each for each in gateway.backends.values() if isinstance(each, LocalBackend)]
    assert len(found) == 4
    return found


async def wait_until_idle(gateway: Gateway) -> None:
    """Nothing runs, and no KV block is owned by anyone."""
    for backend in engines(gateway):
        await eventually(lambda backend=backend: backend.load().running + backend.load().waiting == 0)  # type: ignore[misc]
        assert backend.load().kv_free_fraction == 1.0
    await eventually(lambda: gateway.parts.admission.num_running == 0)
    gateway.assert_idle()


async def test_auto_is_decided_by_estimates_and_explained(gateway: Gateway) -> None:
    response = await gateway.chat(QUESTION)
    assert response.status_code == 200, response.text
    assert float(response.headers["x-suffice-confidence"]) > 0
    told = (await gateway.client.get(f"/v1/requests/{response.json()['id']}")).json()
    assert len(told["tiers"]) == 4
    assert all(0 <= tier["p_right"] <= 1 for tier in told["tiers"])
    assert told["compute_s"] > 0
    assert Decimal(told["measured_cost_usd"]) > 0
    await wait_until_idle(gateway)


@pytest.mark.parametrize("tier", [1, 2, 3, 4])
async def test_each_tier_answers_whole_and_streamed_alike(gateway: Gateway, tier: int) -> None:
    greedy = {"model": f"tier-{tier}", "temperature": 0, "max_tokens": 300}
    whole = await gateway.chat(QUESTION, **greedy)
    assert whole.headers["x-suffice-tier"] == str(tier)
    message = whole.json()["choices"][0]["message"]
    streamed = await gateway.chat(QUESTION, **greedy, stream=True, stream_options={"include_usage": True})
    chunks = [json.loads(each) for each in events(streamed.text)[:-1]]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message.get("reasoning_content", "")
    assert ("reasoning_content" in message) == (tier == 4)
    assert whole.json()["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["completion_tokens"] == whole.json()["usage"]["completion_tokens"]
    await wait_until_idle(gateway)


async def test_thinking_may_be_switched_off(gateway: Gateway) -> None:
    answer = await gateway.chat(QUESTION, model="tier-4", reasoning_effort="none", temperature=0)
    assert "reasoning_content" not in answer.json()["choices"][0]["message"]


async def test_a_client_that_leaves_frees_every_block_and_is_billed_exactly(gateway: Gateway) -> None:
    body = {"model": "tier-3", "messages": MESSAGES, "stream": True, "ignore_eos": True, "max_tokens": 200}
    async with RawClient(gateway.url) as client:
        await client.post("/v1/chat/completions", body)
        await client.read_until(b'"content":"')
        client.reset()
    await wait_until_idle(gateway)
    async with asyncio.timeout(PATIENCE_S):
        while (row := (await gateway.rows())[0]).error_code != "client_closed":  # noqa: ASYNC110  the log announces nothing
            await asyncio.sleep(0.01)
    assert row.prompt_tokens > 0
    assert 0 < row.completion_tokens < 200
    assert row.compute_s is not None
    assert row.compute_s > 0


async def test_many_at_once_through_the_openai_package(gateway: Gateway) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0) as client:

        async def ask(place: int) -> str:
            answer = await client.chat.completions.create(
                model=f"tier-{place % 4 + 1}",
                messages=[{"role": "user", "content": f"What is {place} + 5?"}],
                temperature=0,
                logprobs=True,
                top_logprobs=2,
                n=2,
            )
            assert [choice.index for choice in answer.choices] == [0, 1]
            first, second = (choice.message.content for choice in answer.choices)
            assert first == second, "greedy choices agree whatever runs beside them"
            assert answer.choices[0].logprobs is not None
            return first or ""

        answers = await asyncio.gather(*map(ask, range(16)))
        assert all(answers)
    await wait_until_idle(gateway)


async def test_a_prompt_beyond_the_context_is_told_with_the_numbers(gateway: Gateway) -> None:
    response = await gateway.chat("1 + " * 5000, model="tier-1")
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert any(number.isdigit() and int(number) > 5000 for number in error["message"].replace(".", " ").split())
    response = await gateway.chat(QUESTION, max_tokens=100_000)
    assert response.json()["error"]["code"] == "context_length_exceeded"
    await wait_until_idle(gateway)


async def test_readiness_is_a_token_from_each_tier(gateway: Gateway) -> None:
    answer = await gateway.client.get("/readyz")
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["tiers"]) == 4


async def test_embeddings_come_from_the_tiers_own_states(gateway: Gateway) -> None:
    body = {"model": "simple", "input": ["two and two", "a poem"]}
    found = (await gateway.client.post("/v1/embeddings", json=body)).json()
    assert len(found["data"]) == 2
    assert sum(value * value for value in found["data"][0]["embedding"]) == pytest.approx(1, abs=1e-3)
