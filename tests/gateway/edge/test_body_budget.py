"""Bytes of bodies that are held at once: bounded in all and by key, from before they are read to the request's end."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.testing import Script
from gateway.edge.body_budget import BodyBudget, BodyShare
from gateway.errors import BodiesFull
from tests.gateway.harness import Gateway, assert_error, echo_backends, make_settings, running
from tests.gateway.raw import RawClient, eventually

ASK = {"model": "simple", "messages": [{"role": "user", "content": "x" * 50_000}]}
NUM_BYTES = len(json.dumps(ASK))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 60), st.booleans()), max_size=40))
def test_no_more_is_held_than_may_be_and_nothing_is_forgotten(steps: list[tuple[str, int, bool]]) -> None:
    budget = BodyBudget(100, 50)
    shares: list[tuple[str, BodyShare]] = []
    for key, num_bytes, closes in steps:
        share = budget.share(key)
        shares.append((key, share))
        try:
            share.grow_to(num_bytes // 2)
            share.grow_to(num_bytes)
            share.grow_to(num_bytes // 3)
        except BodiesFull:
            pass
        held = {name: sum(each.num_bytes for other, each in shares if other == name) for name in "abc"}
        assert max(held.values()) <= 50
        assert budget.num_bytes == sum(held.values()) <= 100
        if closes:
            share.close()
            share.close()
    for _, share in shares:
        share.close()
    assert budget.num_bytes == 0
    assert not budget._by_key


async def key_headers(gateway: Gateway, tenant: str) -> str:
    made = (await gateway.client.post("/admin/v1/keys", json={"name": tenant, "tenant": tenant})).json()
    return f"authorization: Bearer {made['key']}\r\n"


async def upload_slowly(stack: AsyncExitStack, gateway: Gateway, headers: str, num: int) -> list[RawClient]:
    """Send all but the end of as many bodies."""
    clients = [await stack.enter_async_context(RawClient(gateway.url)) for _ in range(num)]
    for client in clients:
        await client.post("/v1/chat/completions", ASK, headers=headers, send=100)
    return clients


async def test_slow_uploads_of_a_key_are_few_and_leave_room_for_others(tmp_path: Path) -> None:
    """A hundred connections held 400 MB and lived for ever (security review M4)."""
    limits: dict[str, Any] = {
        "server__max_body_bytes": 1024 * 60,
        "server__max_body_bytes_in_flight": 10 * NUM_BYTES,
        "server__max_body_bytes_in_flight_per_key": 4 * NUM_BYTES,
    }
    async with running(make_settings(tmp_path, **limits)) as gateway, AsyncExitStack() as stack:
        greedy, modest = await key_headers(gateway, "greedy"), await key_headers(gateway, "modest")
        # Once a request to the models has been answered, so much is measured that bodies can be.
        clients = await upload_slowly(stack, gateway, greedy, 100)
        answers = [asyncio.create_task(client.read_until(b"}}")) for client in clients]
        await eventually(lambda: sum(task.done() for task in answers) == 96)
        for task in answers:
            if task.done():
                head, _, body = (await task).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 429 ")
                assert b"\r\nretry-after: 1" in head
                assert json.loads(body)["error"]["code"] == "rate_limit_exceeded"
            else:
                task.cancel()
        name, _, value = modest.strip().partition(": ")
        response = await gateway.client.post("/v1/chat/completions", json=ASK, headers={name: value})
        assert response.status_code == 200
        assert_error(
            await gateway.client.post(
                "/v1/chat/completions", json=ASK, headers={name: greedy.strip().partition(": ")[2]}
            ),
            429,
            "rate_limit_exceeded",
        )
        await asyncio.gather(*answers, return_exceptions=True)
    gateway.assert_idle()


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/v1/feedback", "/admin/v1/keys"])
async def test_a_body_that_drips_is_cut_and_its_connection_closed(tmp_path: Path, path: str) -> None:
    """However lively it is (security review M4, fault review S7)."""
    configured = make_settings(tmp_path, server__body_timeout_s=0.4, server__slow_client_timeout_s=0.2)
    async with running(configured) as gateway, RawClient(gateway.url) as client:
        protocol = gateway.app.state.server.config.http
        protocol.head_timeout_s = 0.4
        body = b" " * 1_000_000
        await client.post(path, body, send=1)
        closed = asyncio.create_task(client.reader.read(-1))
        while not closed.done():
            client.writer.write(b" ")
            await asyncio.sleep(0.02)
        try:
            answer = await closed
        except ConnectionError:
            answer = b"HTTP/1.1 408 "
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert gateway.parts.admission.is_idle


async def test_a_body_counts_while_its_request_waits_and_is_answered(tmp_path: Path) -> None:
    backends = echo_backends(small=Script(text="a", first_delay_s=0.3))
    async with running(make_settings(tmp_path, server__max_concurrency=1), backends) as gateway:
        bodies = gateway.parts.gate.bodies
        asked = [asyncio.create_task(gateway.client.post("/v1/chat/completions", json=ASK)) for _ in range(3)]
        await eventually(lambda: gateway.parts.admission.num_waiting == 2)
        assert bodies.num_bytes >= 3 * 50_000
        await asyncio.gather(*asked)
        await eventually(lambda: bodies.num_bytes == 0)


async def test_a_largest_body_always_finds_room(tmp_path: Path) -> None:
    limits = {"server__max_body_bytes_in_flight": 10, "server__max_body_bytes_in_flight_per_key": 10}
    async with running(make_settings(tmp_path, **limits)) as gateway:
        assert (await gateway.client.post("/v1/chat/completions", json=ASK)).status_code == 200
