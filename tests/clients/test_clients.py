"""Real clients against the running server: the openai packages for Python and npm, and curl."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from backends.testing import EchoBackend, Script
from tests.clients.kit import HERE, command, need
from tests.gateway.harness import LADDER_TOML, Gateway, make_settings, running
from tests.gateway.raw import eventually

MESSAGES: Any = [{"role": "user", "content": "one two three"}]
# The two that misbehave stand below, so that "auto", which knows nothing of them, goes to the top.
TOML = (
    """
[[tiers]]
name = "slow"
model = "slow-model"

[[tiers]]
name = "broken"
model = "broken-model"

[models.slow-model]
kind = "echo"

[models.broken-model]
kind = "echo"
"""
    + LADDER_TOML
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    backends = {
        "small": EchoBackend("small"),
        "large": EchoBackend("large"),
        "slow-model": EchoBackend("slow-model", Script(text="word " * 2000, token_delay_s=0.01)),
        "broken-model": EchoBackend("broken-model", Script(text="a b c d", fail_after=2)),
    }
    async with running(make_settings(tmp_path_factory.mktemp("clients"), TOML), backends) as up:
        yield up


def python_client(gateway: Gateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0)


async def test_the_python_package_gets_whole_answers(gateway: Gateway) -> None:
    async with python_client(gateway) as client:
        raw = await client.chat.completions.with_raw_response.create(model="auto", messages=MESSAGES)
        answer = raw.parse()
        assert answer.choices[0].message.content == "one two three"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3
        assert raw.headers["x-suffice-request-id"] == raw.headers["x-request-id"]
        assert raw.headers["x-request-id"] in answer.id
        several = await client.chat.completions.create(model="auto", messages=MESSAGES, n=3, seed=1)
        assert [choice.index for choice in several.choices] == [0, 1, 2]
        scored = await client.chat.completions.create(model="auto", messages=MESSAGES, logprobs=True, top_logprobs=2)
        content = scored.choices[0].logprobs
        assert content is not None
        assert content.content is not None
        assert "".join(entry.token for entry in content.content) == "one two three"
        assert len(content.content[0].top_logprobs) == 2


async def test_the_python_package_streams(gateway: Gateway) -> None:
    async with python_client(gateway) as client:
        stream = await client.chat.completions.create(
            model="auto", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == "one two three"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 3
        assert (chunks[-1].model_extra or {})["suffice"]["tier_name"] == "expert"
        assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


async def test_the_synchronous_python_package_works(gateway: Gateway) -> None:
    def ask() -> tuple[str, str]:
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0) as client:
            whole = client.chat.completions.create(model="simple", messages=MESSAGES)
            stream = client.chat.completions.create(model="simple", messages=MESSAGES, stream=True)
            return whole.choices[0].message.content or "", "".join(c.choices[0].delta.content or "" for c in stream)

    assert await asyncio.to_thread(ask) == ("one two three", "one two three")


async def test_the_python_package_reads_errors(gateway: Gateway) -> None:
    async with python_client(gateway) as client:
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="gpt-9", messages=MESSAGES)
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="auto", messages=MESSAGES, temperature=9)
        assert bad.value.param == "temperature"
        stream = await client.chat.completions.create(model="broken", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError) as broken:
            async for _ in stream:
                pass
        assert broken.value.code == "answer_failed"


async def test_the_python_package_lists_models_completes_and_embeds(gateway: Gateway) -> None:
    async with python_client(gateway) as client:
        names = [model.id async for model in client.models.list()]
        assert {"auto", "simple", "expert", "tier-4", "small", "large", "default", "careful"} <= set(names)
        assert (await client.models.retrieve("tier-4")).id == "tier-4"
        completion = await client.completions.create(model="simple", prompt=["a b", "c"], max_tokens=9, echo=True)
        assert [choice.text for choice in completion.choices] == ["a ba b", "cc"]
        embedded = await client.embeddings.create(model="small", input=["x", "yy zz"])
        assert [len(each.embedding) for each in embedded.data] == [16, 16]


async def test_a_stream_the_python_package_drops_is_cancelled(gateway: Gateway) -> None:
    slow = gateway.backends["slow-model"]
    cancelled = slow.num_cancelled
    async with python_client(gateway) as client:
        stream = await client.chat.completions.create(model="slow", messages=MESSAGES, stream=True)
        async for _ in stream:
            break
        await stream.close()
    await eventually(lambda: slow.num_running == 0)
    assert slow.num_cancelled == cancelled + 1


@pytest.mark.clients
async def test_the_npm_package(gateway: Gateway) -> None:
    node = shutil.which("node")
    need("the openai npm package", node is not None and (HERE / "node_modules" / "openai").is_dir())
    assert node is not None
    seen = json.loads(await command(node, "openai_client.mjs", gateway.url))
    assert seen["whole"] == seen["streamed"] == seen["helper"] == "one two three"
    assert seen["finish"] == "stop"
    assert seen["completion_tokens"] == 3
    assert seen["completion"] == "a b"
    assert seen["norms"] == pytest.approx([1.0, 1.0], abs=1e-5)
    assert {"auto", "simple", "tier-1"} <= set(seen["models"])
    assert seen["unknown_model"] == ["NotFoundError", 404, "model_not_found", "model"]
    assert seen["bad_value"] == ["BadRequestError", 400, "invalid_value", "temperature"]
    assert seen["broken"] == "answer_failed"
    await eventually(lambda: gateway.backends["slow-model"].num_running == 0)


@pytest.mark.clients
async def test_curl(gateway: Gateway) -> None:
    curl = shutil.which("curl")
    need("curl", curl is not None)
    assert curl is not None
    url = f"{gateway.url}/v1/chat/completions"
    body = json.dumps({"model": "auto", "messages": MESSAGES})
    # As people type it: no content type, and the response's headers shown.
    shown = await command(curl, "-s", "-i", url, "-d", body)
    assert shown.startswith("HTTP/1.1 200 OK")
    assert "x-suffice-tier: " in shown
    assert json.loads(shown.partition("\r\n\r\n")[2])["choices"][0]["message"]["content"] == "one two three"
    streamed = await command(
        curl, "-sN", url, "-d", json.dumps({"model": "simple", "stream": True, "messages": MESSAGES})
    )
    assert streamed.endswith("data: [DONE]\n\n")
    refused = await command(curl, "-s", "-o", "/dev/null", "-w", "%{http_code}", url, "--data-binary", "@/dev/null")
    assert refused == "400"
