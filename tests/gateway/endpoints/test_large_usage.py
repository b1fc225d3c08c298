"""What a server says it used, however absurd, keeps no answer from its caller and no row from the log."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.models.loader import make_backends
from gateway.store.key_sums import KeySums
from tests.gateway.harness import make_settings, running
from tests.gateway.records import make_record

LADDER = """
[[tiers]]
name = "far"
model = "far"
price_per_output_token_usd = 0.00001

[models.far]
model = "far"
urls = ["{url}/v1"]

[verification]
enabled = false
"""


def upstream(num_tokens: int) -> Starlette:
    """An OpenAI-style server that claims to have used so many tokens for whatever it is asked."""

    async def answer(request: Request) -> Response:
        usage = {"prompt_tokens": num_tokens, "completion_tokens": num_tokens}
        choice = {"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}
        delta = {"index": 0, "delta": {"content": "yes"}, "finish_reason": "stop"}
        if not (await request.json()).get("stream"):
            return JSONResponse({"id": "1", "object": "chat.completion", "choices": [choice], "usage": usage})
        chunks = [{"id": "1", "choices": [delta]}, {"id": "1", "choices": [], "usage": usage}]
        body = "".join(f"data: {json.dumps(each)}\n\n" for each in chunks) + "data: [DONE]\n\n"
        return Response(body, media_type="text/event-stream")

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "far", "object": "model"}]})

    return Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"]), Route("/v1/models", models)])


@pytest.mark.parametrize("num_tokens", [2**31 - 1, 2**31, 2**45, 2**62])
@pytest.mark.parametrize("n", [1, 3])
async def test_an_answer_is_delivered_and_its_row_kept(
    tmp_path: Path, database_url: str, serve: Callable[[Any], str], num_tokens: int, n: int
) -> None:
    """More than 32 bits was 500 ``log_rejected``, without a row (security review L8)."""
    toml = LADDER.format(url=serve(upstream(num_tokens)))
    settings = make_settings(tmp_path, toml, database__url=database_url)
    async with running(settings, make_backends(settings)) as gateway:
        response = await gateway.chat("hello", n=n, suffice={"session_id": "one"})
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["message"]["content"] == "yes"
        row = await gateway.row()
        assert 0 < row.prompt_tokens < 2**31
        assert 0 < row.completion_tokens < 2**31
        assert row.cost_usd > 0
        # Its key's sums can be read too: two numbers of 32 bits must not be added as such.
        most = make_record(
            policy_name=row.policy_name,
            created_at=datetime.now(UTC),
            prompt_tokens=2**31 - 1,
            completion_tokens=2**31 - 1,
        )
        await gateway.parts.store.record(most)
        sums = KeySums(gateway.parts.store)
        total = await sums.since_by_policy(row.policy_name, datetime.now(UTC) - timedelta(hours=1))
        assert total.num_tokens == row.prompt_tokens + row.completion_tokens + 2 * (2**31 - 1)
