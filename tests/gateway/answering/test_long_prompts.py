"""Prompts far beyond the context, at the built-in ladder: little work, none of it long on the event loop.

(security review H1 and H2, fault review S1)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from backends.local import LocalBackend
from gateway.config.settings import load_settings
from gateway.models.loader import make_backends
from tests.engine.counted_tokenizer import CountedTokenizer, counted
from tests.gateway.harness import Gateway, assert_error, running

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

MIB = 1 << 20
# Texts of so many characters are encoded on the event loop itself.
INLINE = 2_048
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    directory = tmp_path_factory.mktemp("builtin")
    overrides = {"policy.exploration_share": 0.0, "verification.enabled": False}
    settings = load_settings(environ={"HOME": str(directory)}, overrides=overrides)
    async with running(settings, make_backends(settings)) as up:
        yield up


def counters_of(gateway: Gateway) -> list[CountedTokenizer]:
    prompts = [each._prompts for each in gateway.backends.values() if isinstance(each, LocalBackend)]
    counters = counted(each.tokenizer for each in prompts if each is not None)
    for each in counters:
        each.num_chars = each.most_inline = 0
    return counters


def chat(*contents: str, model: str = "auto", **more: Any) -> dict[str, Any]:
    messages = [{"role": "user" if at % 2 == 0 else "assistant", "content": each} for at, each in enumerate(contents)]
    return {"model": model, "messages": messages, "max_tokens": 1, **more}


LONG = {
    "words": (CHAT, chat("ordinary words of a prompt " * 140_000), "messages"),
    "pinned": (CHAT, chat("ordinary words of a prompt " * 140_000, model="tier-1"), "messages"),
    "one word": (CHAT, chat("1234567890" * 380_000), "messages"),
    "blanks": (CHAT, chat(" " * 3_900_000), "messages"),
    "not ascii": (CHAT, chat("東京" * 600_000), "messages"),
    "control tokens": (CHAT, chat("<|im_end|>" * 380_000), "messages"),
    "an assistant's": (CHAT, chat("hi", "said before " * 300_000, "and?"), "messages"),
    "many messages": (CHAT, chat(*["m" * 1_800] * 2_047), "messages"),
    "short messages": (CHAT, chat(*["m"] * 2_047), "messages"),
    "many answers": (CHAT, chat("ordinary words of a prompt " * 140_000, n=16), "messages"),
    "a prompt": (COMPLETIONS, {"model": "auto", "prompt": "ordinary words " * 250_000}, "messages"),
    "prompts": (COMPLETIONS, {"model": "auto", "prompt": ["ordinary words " * 2_000] * 100}, "messages"),
    "token ids": (COMPLETIONS, {"model": "tier-1", "prompt": [7] * 1_000_000}, "messages"),
    "an input": (EMBEDDINGS, {"model": "simple", "input": "ordinary words " * 250_000}, "input"),
    "inputs": (EMBEDDINGS, {"model": "simple", "input": ["short"] * 400 + ["ordinary words " * 9_000]}, "input"),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", LONG)
async def test_a_prompt_beyond_the_context_costs_little(gateway: Gateway, shape: str) -> None:
    """What is encoded is bounded by the context, whatever the body's size, and the loop encodes short texts alone."""
    path, body, param = LONG[shape]
    counters = counters_of(gateway)
    response = await gateway.client.post(path, json=body)
    error = assert_error(response, 400, "context_length_exceeded", param)
    assert "maximum context length is 1024 tokens" in error["message"]
    most = max(each.max_token_bytes or 0 for each in (b._prompts.tokenizer for b in gateway.backends.values()))  # type: ignore[attr-defined]
    assert sum(each.num_chars for each in counters) <= most * 1024
    assert max(each.most_inline for each in counters) <= INLINE
    gateway.assert_idle()


async def test_other_requests_are_served_while_long_prompts_are_refused(gateway: Gateway) -> None:
    """A flood of them leaves the short requests in between their turns: they do not all come last."""
    ended: list[str] = []

    async def flood() -> None:
        path, body, _ = LONG["words"]
        for _ in range(3):
            assert (await gateway.client.post(path, json=body)).status_code == 400
            ended.append("long")

    async def look() -> None:
        assert (await gateway.client.get("/healthz")).status_code == 200
        ended.append("short")

    long = [asyncio.create_task(flood()) for _ in range(4)]
    while not all(task.done() for task in long):
        await look()
    await asyncio.gather(*long)
    # How many come between is the machine's speed; that some do is not.
    assert "short" in ended[ended.index("long") : len(ended) - 1 - ended[::-1].index("long")]


async def test_long_inputs_that_fit_are_embedded_off_the_loop(gateway: Gateway) -> None:
    counters = counters_of(gateway)
    texts = [f"Sort the numbers 5, 3 and {number}. " * 40 for number in range(16)]
    response = await gateway.client.post(EMBEDDINGS, json={"model": "simple", "input": texts})
    assert response.status_code == 200, response.text
    assert len(response.json()["data"]) == 16
    assert sum(each.num_chars for each in counters) > INLINE
    assert max(each.most_inline for each in counters) == 0
