"""Clients that vanish, stall or dribble; tiers that fail. Always: one ending, nothing leaked, the right bill."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.errors import BackendFailure, BackendOverloaded, BackendTimeout, BackendUnavailable, RequestRejected
from backends.protocol import FinishReason
from backends.testing import EchoBackend, Script
from gateway.ids import uuid7
from tests.gateway.harness import Gateway, assert_error, echo_backends, events, make_settings, running
from tests.gateway.raw import PATIENCE_S, RawClient, eventually

ASK = {"model": "expert", "messages": [{"role": "user", "content": "hi"}]}
STREAM = ASK | {"stream": True}
LONG = "word " * 2000


# The kernel's share of an answer that nobody reads, well below the answers here.
SMALL_BUFFER_BYTES = 16_384


async def wait_for_row(gateway: Gateway) -> None:
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not await gateway.rows():  # noqa: ASYNC110 - nothing tells of a row but the log
                await asyncio.sleep(0.005)
    except TimeoutError:
        pytest.fail("no row was written")
    # The place is given back right after the commit.
    await eventually(lambda: gateway.parts.admission.num_running == 0)


@pytest.mark.parametrize("leave", [RawClient.reset, lambda client: client.writer.close()], ids=["reset", "close"])
@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "whole"])
async def test_a_client_that_leaves_is_cancelled_and_billed(
    tmp_path: Path, streamed: bool, leave: Callable[[RawClient], None]
) -> None:
    backends = echo_backends(large=Script(text=LONG, token_delay_s=0.02, prompt_tokens=7))
    async with running(make_settings(tmp_path), backends) as gateway:
        large = backends["large"]
        assert isinstance(large, EchoBackend)
        async with RawClient(gateway.url) as client:
            await client.post("/v1/chat/completions", STREAM if streamed else ASK)
            if streamed:
                await client.read_until(b"word")
            else:
                await eventually(lambda: large.num_running == 1)
                await asyncio.sleep(0.1)
            leave(client)
            await eventually(lambda: large.num_cancelled == 1)
        await wait_for_row(gateway)
        row = await gateway.row()
        assert row.finish_reason is FinishReason.CANCELLED
        assert row.error_code == "client_closed"
        assert 0 < row.completion_tokens < 200
        assert row.prompt_tokens > 0
        assert row.cost_usd == Decimal("0.01") + Decimal("0.00001") * row.completion_tokens
        gateway.assert_idle()
        assert (await gateway.chat("next", model="simple")).status_code == 200


@given(num_tokens=st.integers(0, 12), hang_up=st.floats(0, 0.02), streamed=st.booleans())
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_whenever_a_client_leaves_there_is_one_ending(
    tmp_path: Path, num_tokens: int, hang_up: float, streamed: bool
) -> None:
    backends = echo_backends(large=Script(text="w " * num_tokens, token_delay_s=0.001))
    async with running(
        make_settings(tmp_path, database__url=f"sqlite:///{tmp_path / uuid7()}.db"), backends
    ) as gateway:
        async with RawClient(gateway.url) as client:
            await client.post("/v1/chat/completions", STREAM if streamed else ASK)
            await asyncio.sleep(hang_up)
            client.reset()
        assert (await gateway.chat("next", model="simple")).status_code == 200
        large = backends["large"]
        assert isinstance(large, EchoBackend)
        await eventually(lambda: large.num_finished + large.num_cancelled + large.num_failed == len(large.requests))
        await eventually(lambda: gateway.parts.admission.num_running == 0)
        gateway.assert_idle()
        assert len(large.requests) <= 1
        assert len(await gateway.rows()) == 1 + len(large.requests)


async def test_a_crowd_of_good_and_bad_clients_leaves_one_row_each_and_nothing_else(tmp_path: Path) -> None:
    backends = echo_backends(large=Script(text="word " * 20, token_delay_s=0.001))
    async with running(make_settings(tmp_path), backends) as gateway:
        num_tasks = len(asyncio.all_tasks())

        async def good(place: int) -> None:
            model = "expert" if place % 2 else "simple"
            response = await gateway.chat("hi", model=model, stream=place % 4 < 2, n=1 + place % 3)
            assert response.status_code == 200

        async def bad(place: int) -> None:
            async with RawClient(gateway.url) as client:
                await client.post("/v1/chat/completions", (STREAM if place % 2 else ASK) | {"n": 1 + place % 3})
                await asyncio.sleep(0.004 * (place % 7))
                client.reset()

        await asyncio.gather(*(act(place) for place in range(40) for act in (good, bad)))
        large = backends["large"]
        assert isinstance(large, EchoBackend)
        await eventually(lambda: gateway.parts.admission.num_running == 0)
        gateway.assert_idle()
        assert large.num_finished + large.num_cancelled == len(large.requests)
        asked = {
            request.request_id.rsplit("-", 1)[0] if request.request_id.count("-") == 5 else request.request_id
            for backend in (large, backends["small"])
            for request in backend.requests
        }  # type: ignore[attr-defined]
        assert {row.request_id for row in await gateway.rows()} >= asked
        assert len(await gateway.rows()) <= 80
        await gateway.client.aclose()
        await eventually(lambda: len(asyncio.all_tasks()) <= num_tasks)


async def test_a_client_that_stops_reading_is_cut_off(tmp_path: Path) -> None:
    text = "x" * 1000 + " "
    backends = echo_backends(large=Script(text=text * 1000, token_delay_s=0.0))
    configured = make_settings(tmp_path, server__slow_client_timeout_s=0.4)
    async with running(configured, backends, send_buffer_bytes=SMALL_BUFFER_BYTES) as gateway:
        async with RawClient(gateway.url, receive_buffer_bytes=4096) as client:
            await client.post("/v1/chat/completions", STREAM)
            await client.reader.read(100)
            client.pause_reading()
            await wait_for_row(gateway)
        row = await gateway.row()
        assert row.finish_reason is FinishReason.CANCELLED
        assert row.error_code == "client_stalled"
        gateway.assert_idle()
        assert (await gateway.chat("next", model="simple")).status_code == 200


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
async def test_a_client_that_stops_reading_before_the_end_holds_nothing(tmp_path: Path, fails: bool) -> None:
    # One piece fills the connection, and only the end is left to send.
    script = Script(text="x" * 1_000_000 + " end", token_delay_s=0.05, fail_after=1 if fails else None)
    configured = make_settings(tmp_path, server__slow_client_timeout_s=0.5)
    backends = echo_backends(large=script)
    async with running(configured, backends, send_buffer_bytes=SMALL_BUFFER_BYTES) as gateway:
        async with RawClient(gateway.url, receive_buffer_bytes=4096) as client:
            await client.post("/v1/chat/completions", STREAM)
            await client.reader.read(100)
            client.pause_reading()
            await wait_for_row(gateway)
            connections = gateway.app.state.server.server_state.connections
            await eventually(lambda: not connections)
        gateway.assert_idle()
        assert (await gateway.chat("next", model="simple")).status_code == 200


async def test_a_body_that_dribbles_is_refused(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path, server__slow_client_timeout_s=0.2)) as gateway:
        async with RawClient(gateway.url) as client:
            await client.post("/v1/chat/completions", ASK, send=5)
            answer = await client.read_until(b"request_timeout")
        assert answer.startswith(b"HTTP/1.1 408")
        gateway.assert_idle()


async def test_a_client_that_leaves_before_its_body_is_forgotten(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path)) as gateway:
        async with RawClient(gateway.url) as client:
            await client.post("/v1/chat/completions", ASK, send=5)
        assert (await gateway.chat("next")).status_code == 200
        assert len(await gateway.rows()) == 1
        gateway.assert_idle()


async def test_a_body_beyond_the_limit_is_refused_unread(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path)) as gateway:
        huge = b'{"model": "auto", "messages": "' + b"x" * 10_000_000 + b'"}'
        response = await gateway.client.post("/v1/chat/completions", content=huge)
        error = assert_error(response, 413, "request_too_large")
        assert "4194304" in error["message"]

        async def pieces() -> object:
            for _ in range(100):
                yield b"x" * 100_000

        response = await gateway.client.post("/v1/chat/completions", content=pieces())  # type: ignore[arg-type]
        assert_error(response, 413, "request_too_large")
        async with RawClient(gateway.url) as client:
            # Announced, never sent: the refusal must not wait for it.
            await client.post("/v1/chat/completions", huge, send=0)
            assert b"413" in await client.read_until(b"request_too_large")
        assert (await gateway.chat("next")).status_code == 200
        gateway.assert_idle()


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (BackendUnavailable("down"), "model_unavailable"),
        (BackendOverloaded("full", retry_after_s=7), "overloaded"),
        (BackendTimeout("slow"), "model_timeout"),
        (BackendFailure("broken"), "model_failed"),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_a_failure_before_the_first_token_falls_back(tmp_path: Path, failure: Exception, code: str) -> None:
    backends = echo_backends(large=Script(fail_before=failure))  # type: ignore[arg-type]
    async with running(make_settings(tmp_path, policy__fallback="any"), backends) as gateway:
        response = await gateway.chat("hi", stream=True)
        assert response.status_code == 200
        assert response.headers["x-suffice-tier"] == "1"
        assert response.headers["x-suffice-reason"] == "fallback"
        row = await gateway.row()
        assert [(each.tier, each.error) for each in row.attempts] == [(2, code), (1, None)]
        assert (row.decided_tier, row.final_tier) == (2, 1)
        assert row.cost_usd == Decimal("0.0001")
        gateway.assert_idle()


async def test_by_default_no_tier_below_the_floor_answers_for_one_that_is_down(tmp_path: Path) -> None:
    """Without estimates nothing says that the cheap tier would do: 503, and not its answer with 200."""
    backends = echo_backends(large=Script(fail_before=BackendUnavailable("down")))
    async with running(make_settings(tmp_path), backends) as gateway:
        assert_error(await gateway.chat("hi"), 503, "model_unavailable")
        assert [each.tier for each in (await gateway.row()).attempts] == [2]
        gateway.assert_idle()


async def test_when_every_tier_fails_the_most_useful_error_is_shown(tmp_path: Path) -> None:
    backends = echo_backends(
        small=Script(fail_before=BackendOverloaded("full", retry_after_s=7)),
        large=Script(fail_before=BackendFailure("x")),
    )
    async with running(make_settings(tmp_path, policy__fallback="any"), backends) as gateway:
        response = await gateway.chat("hi")
        assert_error(response, 503, "overloaded")
        assert response.headers["retry-after"] == "7"
        row = await gateway.row()
        assert row.finish_reason is FinishReason.ERROR
        assert row.cost_usd == 0
        assert row.final_tier is None
        gateway.assert_idle()


async def test_a_pinned_tier_does_not_fall_back(tmp_path: Path) -> None:
    backends = echo_backends(large=Script(fail_before=BackendUnavailable("down")))
    async with running(make_settings(tmp_path), backends) as gateway:
        assert_error(await gateway.chat("hi", model="expert"), 503, "model_unavailable")
        gateway.assert_idle()


async def test_what_the_caller_must_mend_does_not_fall_back(tmp_path: Path) -> None:
    refused = RequestRejected("no such adapter", status=404, param="model", code="no_adapter")
    backends = echo_backends(large=Script(fail_before=refused))
    async with running(make_settings(tmp_path), backends) as gateway:
        assert_error(await gateway.chat("hi"), 404, "no_adapter", "model")
        assert len((await gateway.row()).attempts) == 1


@pytest.mark.parametrize("n", [1, 3])
async def test_a_failure_after_the_first_token_ends_the_stream_with_an_error(tmp_path: Path, n: int) -> None:
    backends = echo_backends(large=Script(text="a b c d", fail_after=2, prompt_tokens=5))
    async with running(make_settings(tmp_path), backends) as gateway:
        response = await gateway.chat("hi", stream=True, n=n)
        assert response.status_code == 200
        data = events(response.text)
        assert data[-1] != "[DONE]"
        last = json.loads(data[-1])
        assert set(last) == {"error"}
        assert last["error"]["code"] == "answer_failed"
        assert '"finish_reason":"' not in response.text
        row = await gateway.row()
        assert row.finish_reason is FinishReason.ERROR
        assert row.completion_tokens >= 2
        assert row.prompt_tokens >= 5
        gateway.assert_idle()


async def test_a_failure_after_the_first_token_of_a_whole_answer_is_an_error(tmp_path: Path) -> None:
    backends = echo_backends(large=Script(text="a b c d", fail_after=2))
    async with running(make_settings(tmp_path), backends) as gateway:
        assert_error(await gateway.chat("hi"), 502, "answer_failed")
        assert (await gateway.row()).completion_tokens == 2
        gateway.assert_idle()


async def test_a_backend_that_breaks_its_contract_is_an_error_not_a_crash(tmp_path: Path) -> None:
    class Broken(EchoBackend):
        def _next_script(self, request: object) -> Script:
            raise ZeroDivisionError("inside")

    backends = {"small": EchoBackend("small"), "large": Broken("large")}
    async with running(make_settings(tmp_path, policy__fallback="any"), backends) as gateway:
        response = await gateway.chat("hi")
        assert response.headers["x-suffice-tier"] == "1"
        assert_error(await gateway.chat("hi", model="expert"), 502, "model_failed")


async def test_a_request_lives_no_longer_than_allowed(tmp_path: Path) -> None:
    backends = echo_backends(large=Script(text="a b c", hang_after=1), small=Script(hang_after=0))
    async with running(make_settings(tmp_path, server__request_timeout_s=0.3), backends) as gateway:
        assert_error(await gateway.chat("hi", model="simple"), 504, "deadline_exceeded")
        response = await gateway.chat("hi", model="expert", stream=True)
        assert json.loads(events(response.text)[-1])["error"]["code"] == "deadline_exceeded"
        assert {row.finish_reason for row in await gateway.rows()} == {FinishReason.ERROR}
        gateway.assert_idle()
