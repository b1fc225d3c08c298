"""``/v1/messages/count_tokens`` over real HTTP: what an answer would read, and nothing is answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import pytest

from backends.config import RemoteModelConfig
from backends.protocol import Backend, Capability
from backends.remote.openai_backend import OpenAIBackend
from backends.testing import EchoBackend, Script
from gateway.config.settings import load_settings
from tests.backends.provider.server import ProviderServer
from tests.gateway.access.test_limits_http import limited
from tests.gateway.admin.kit import administered
from tests.gateway.endpoints.test_messages import HI, TOOLS, client_of
from tests.gateway.harness import assert_error, make_settings, running

PATH = "/v1/messages/count_tokens"
ASKED = {"model": "auto", "messages": HI}


READ: Any = {
    "name": "Read",
    "description": "Read a file.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
}
LOOP: Any = [
    {"role": "user", "content": "What is in a.txt?"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a"}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "one line"}]},
]


@pytest.mark.slow
async def test_the_built_in_ladder_counts_what_an_answer_reads(tmp_path: Path) -> None:
    settings = load_settings(environ={"HOME": str(tmp_path)}, overrides={"verification.enabled": False})
    asked: list[dict[str, Any]] = [
        {"messages": HI},
        {"messages": HI, "system": "Say little.", "thinking": {"type": "disabled"}},
        {"messages": LOOP, "tools": [READ]},
        {"messages": LOOP, "tools": [READ], "tool_choice": {"type": "none"}},
    ]
    async with running(settings, {}) as gateway, client_of(gateway) as client:
        for each in asked:
            counts = []
            for model in ("simple", "expert"):
                usage = (await client.messages.create(**each, model=model, max_tokens=1)).usage
                counts.append(usage.input_tokens + (usage.cache_read_input_tokens or 0))
                assert await counted(client, **each, model=model) == (counts[-1], "exact")
            most, kind = await counted(client, **each, model="claude-sonnet-4-5")
            assert (most >= max(counts), kind) == (True, "exact")
        assert len(await gateway.rows()) == 2 * len(asked)
        # Beyond every context it says how much it is at least, and does not read it all.
        long: Any = [{"role": "user", "content": "word " * 400_000}]
        least, kind = await counted(client, model="auto", messages=long)
        assert (least > 400_000, kind) == (True, "estimate")


async def counted(client: anthropic.AsyncAnthropic, **asked: Any) -> tuple[int, str]:
    found = await client.messages.with_raw_response.count_tokens(**asked)
    assert found.headers["request-id"] == found.headers["x-suffice-request-id"]
    return (await found.parse()).input_tokens, found.headers["x-suffice-count"]


async def test_nothing_is_asked_and_nothing_logged(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path)) as gateway, client_of(gateway) as client:
        assert await counted(client, model="auto", messages=HI, system="a b c") == (5, "exact")
        for backend in gateway.backends.values():
            assert backend.requests == []
        assert await gateway.rows() == []
        gateway.assert_idle()
        answered = await gateway.client.post(PATH, json=ASKED | {"max_tokens": 9, "stream": True})
        assert answered.json() == {"input_tokens": 2}


class Wordy(EchoBackend):
    """Makes ten tokens of each."""

    async def count_tokens(self, request: Any, *, limit: int | None = None) -> int | None:
        return 10 * (await super().count_tokens(request, limit=limit) or 0)


async def test_the_most_of_the_permitted_models_counts(tmp_path: Path) -> None:
    backends: dict[str, Backend] = {"small": EchoBackend("small"), "large": Wordy("large")}
    async with administered(tmp_path, backends=backends) as admin:
        made = await admin("POST", "/keys", json={"permissions": {"allowed_tiers": ["simple"]}})
        key = {"authorization": f"Bearer {made.json()['key']}"}
        post = admin.gateway.client.post
        for model, headers, most in (("auto", {}, 20), ("simple", {}, 2), ("careful", {}, 20), ("auto", key, 2)):
            answered = await post(PATH, json=ASKED | {"model": model}, headers=headers)
            assert answered.json() == {"input_tokens": most}
        assert_error(
            await post(PATH, json=ASKED | {"model": "careful"}, headers=key),
            403,
            "tier_not_permitted",
            "suffice.policy",
        )


@pytest.mark.parametrize(("more", "most", "kind"), [((), 210, "estimate"), (("tokenize",), 201, "exact")])
async def test_a_server_that_cannot_count_is_estimated_for(
    tmp_path: Path, more: tuple[Capability, ...], most: int, kind: str
) -> None:
    with ProviderServer(Script(text="never")) as server:
        config = RemoteModelConfig(urls=(server.url(),), model="m", capabilities=("generate", "tools", *more))
        backends: dict[str, Backend] = {"small": EchoBackend("small"), "large": OpenAIBackend("large", config)}
        async with running(make_settings(tmp_path), backends) as gateway, client_of(gateway) as client:
            words: Any = [{"role": "user", "content": "one two " * 100}]
            assert await counted(client, model="expert", messages=words, tools=TOOLS) == (most, kind)
            told = [seen.body for seen in server.requests if seen.path == "/tokenize"]
            assert [each["tools"][0]["function"]["name"] for each in told] == ["now"] * len(more)
            assert len(server.requests) == len(told)


async def test_it_counts_as_a_request_of_its_key(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path)) as gateway:
        key = await limited(gateway, requests_per_minute=2)
        first = await gateway.client.post(PATH, json=ASKED, headers=key)
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert_error(
            await gateway.client.post(PATH, json=ASKED | {"model": "none"}, headers=key),
            404,
            "model_not_found",
            "model",
        )
        assert_error(await gateway.client.post(PATH, json=ASKED, headers=key), 429, "rate_limit_exceeded")


async def test_errors_are_those_of_the_package(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path)) as gateway, client_of(gateway) as client:
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.count_tokens(model="nobody", messages=HI)
        with pytest.raises(anthropic.BadRequestError, match="messages"):
            await client.messages.count_tokens(model="auto", messages=[])
        assert_error(await gateway.client.post(PATH, content=b"{"), 400, "invalid_json")
