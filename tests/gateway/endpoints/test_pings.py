"""Streams that are silent for long are kept alive by comments, and still end once, as they would have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest

from backends.errors import BackendUnavailable
from backends.testing import EchoBackend, Script
from tests.gateway.harness import Gateway, echo_backends, events, make_settings, running
from tests.gateway.raw import eventually

PING = ": ping\n\n"
BODY = {"model": "auto", "stream": True, "messages": [{"role": "user", "content": "one two three"}]}
SLOW = Script(first_delay_s=1.0)


class Gate:
    """Time that passes only when a test lets it: every sleep of a backend waits for ``opened``."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    async def sleep(self, _: float) -> None:
        await self.opened.wait()


class Reader:
    """Reads a stream as it comes."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.text = ""
        self._pieces = response.aiter_text()

    async def until(self, wanted: str, times: int = 1) -> None:
        while self.text.count(wanted) < times:
            self.text += await anext(self._pieces)

    async def rest(self) -> str:
        self.text += "".join([piece async for piece in self._pieces])
        return self.text

    @property
    def note(self) -> dict[str, Any]:
        """The ``suffice`` object at the end."""
        found: dict[str, Any] = orjson.loads(self.text.partition(": suffice ")[2].partition("\n")[0])
        return found


@asynccontextmanager
async def asked(gateway: Gateway, path: str = "/v1/chat/completions", **change: Any) -> AsyncIterator[Reader]:
    async with gateway.client.stream("POST", path, json=BODY | change) as response:
        yield Reader(response)


def settings(tmp_path: Path, **changes: Any) -> Any:
    return make_settings(tmp_path, **{"server__sse_ping_s": 0.01} | changes)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_long_prefill_is_not_silent(tmp_path: Path, path: str) -> None:
    gate = Gate()
    change = {} if "chat" in path else {"prompt": "one two three", "messages": None}
    body = {name: value for name, value in (BODY | change).items() if value is not None}
    async with running(settings(tmp_path), echo_backends(SLOW, SLOW, sleep=gate.sleep)) as gateway:
        async with gateway.client.stream("POST", path, json=body) as response:
            reader = Reader(response)
            await reader.until(PING, 3)
            assert response.status_code == 200
            assert "x-suffice-request-id" in response.headers
            # Who answers is not known yet, so nobody is named.
            assert "x-suffice-tier" not in response.headers
            gate.opened.set()
            text = await reader.rest()
        assert events(text)[-1] == "[DONE]"
        assert reader.note["tier"] == (await gateway.row()).final_tier
        # Nothing but comments came between the events.
        assert text.replace(PING, "").startswith("data: ")
        gateway.assert_idle()


async def test_the_openai_package_skips_pings(tmp_path: Path) -> None:
    gate = Gate()
    async with (
        running(settings(tmp_path), echo_backends(SLOW, SLOW, sleep=gate.sleep)) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        asked: Any = BODY["messages"]
        # It returns with the head, which the first ping sends: no tier answers before the gate is open.
        stream = await client.chat.completions.create(model="auto", messages=asked, stream=True)
        gate.opened.set()
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "one two three"


async def test_silence_between_tokens_is_filled_too(tmp_path: Path) -> None:
    gate = Gate()
    async with running(settings(tmp_path), echo_backends(large=Script(token_delay_s=1.0), sleep=gate.sleep)) as gateway:
        async with asked(gateway, model="expert") as reader:
            await reader.until(PING, 2)
            assert reader.text.startswith("data: ")
            assert reader.response.headers["x-suffice-tier"] == "2"
            gate.opened.set()
            assert events(await reader.rest())[-1] == "[DONE]"
        gateway.assert_idle()


async def test_another_tier_still_stands_in_after_a_ping(tmp_path: Path) -> None:
    gate = Gate()
    failing = Script(first_delay_s=1.0, fail_before=BackendUnavailable("down"))
    # Without an estimate the higher tier is asked first.
    async with running(
        settings(tmp_path, policy__fallback="any"), echo_backends(large=failing, sleep=gate.sleep)
    ) as gateway:
        async with asked(gateway, model="auto") as reader:
            await reader.until(PING)
            gate.opened.set()
            assert events(await reader.rest())[-1] == "[DONE]"
        assert (reader.note["tier"], reader.note["reason"]) == (1, "fallback")
        assert [each.error for each in (await gateway.row()).attempts] == ["model_unavailable", None]


async def test_a_failure_after_a_ping_is_the_streams_last_event(tmp_path: Path, database_url: str) -> None:
    gate = Gate()
    failing = Script(first_delay_s=1.0, fail_before=BackendUnavailable("down"))
    backends = echo_backends(failing, failing, sleep=gate.sleep)
    async with running(settings(tmp_path, database__url=database_url), backends) as gateway:
        async with asked(gateway) as reader:
            await reader.until(PING)
            gate.opened.set()
            (error,) = events(await reader.rest())
        assert orjson.loads(error)["error"]["code"] == "model_unavailable"
        row = await gateway.row()
        assert (row.status_code, row.finish_reason.value) == (503, "error")
        gateway.assert_idle()


async def test_who_waits_for_a_place_hears_that_too(tmp_path: Path) -> None:
    gate = Gate()
    options = {"server__max_concurrency": 1, "server__max_queue_s": 60}
    async with running(settings(tmp_path, **options), echo_backends(SLOW, SLOW, sleep=gate.sleep)) as gateway:
        async with asked(gateway) as first:
            await first.until(PING)
            async with asked(gateway) as second:
                await second.until(PING)
                assert gateway.parts.admission.num_waiting == 1
                gate.opened.set()
                for reader in (first, second):
                    assert events(await reader.rest())[-1] == "[DONE]"
        gateway.assert_idle()


async def test_a_client_that_leaves_a_pinged_stream_leaves_nothing(tmp_path: Path) -> None:
    gate = Gate()
    async with running(settings(tmp_path), echo_backends(SLOW, SLOW, sleep=gate.sleep)) as gateway:
        async with asked(gateway) as reader:
            await reader.until(PING)
        await eventually(lambda: gateway.parts.admission.num_running == 0)
        assert (await gateway.row()).finish_reason.value == "cancelled"
        gateway.assert_idle()


async def test_pings_can_be_left_out(tmp_path: Path) -> None:
    gate = Gate()
    backends = echo_backends(SLOW, SLOW, sleep=gate.sleep)
    async with running(settings(tmp_path, server__sse_ping_s=0), backends) as gateway:
        asking = asyncio.create_task(gateway.client.post("/v1/chat/completions", json=BODY))
        await eventually(lambda: any(isinstance(e, EchoBackend) and e.num_running for e in gateway.backends.values()))
        gate.opened.set()
        assert PING not in (await asking).text
