"""Chat completions over real HTTP: whole and streamed, what is asked for and what is logged."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

from backends.protocol import FinishReason
from backends.testing import Script
from tests.gateway.harness import echo_backends, events, make_settings, running


async def test_an_answer_is_openai_shaped_and_logged(tmp_path: Path) -> None:
    backends = echo_backends(large=Script(text="four", compute_s=3.6))
    async with running(make_settings(tmp_path), backends) as gateway:
        response = await gateway.chat("2 + 2?")
        assert response.status_code == 200, response.text
        body = response.json()
        assert body["object"] == "chat.completion"
        assert body["choices"][0]["message"]["content"] == "four"
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]
        row = await gateway.row()
        assert body["id"] == f"chatcmpl-{row.request_id}"
        assert response.headers["x-suffice-request-id"] == row.request_id
        assert response.headers["x-suffice-tier"] == "2" == str(row.final_tier)
        assert Decimal(response.headers["x-suffice-cost"]) == row.cost_usd == Decimal("0.01001")
        assert row.measured_cost_usd == Decimal("0.002")
        assert row.finish_reason is FinishReason.STOP
        gateway.assert_idle()


async def test_a_stream_ends_after_its_row(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path)) as gateway:
        response = await gateway.chat("one two three", stream=True, stream_options={"include_usage": True})
        assert response.headers["content-type"].startswith("text/event-stream")
        data = events(response.text)
        assert data[-1] == "[DONE]"
        chunks = [json.loads(each) for each in data[:-1]]
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        assert "".join(delta.get("content", "") for delta in deltas) == "one two three"
        assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == "stop"
        row = await gateway.row()
        assert chunks[-1]["usage"]["completion_tokens"] == row.completion_tokens == 3
        assert Decimal(chunks[-1]["suffice"]["cost_usd"]) == row.cost_usd
        assert row.stream
        gateway.assert_idle()
